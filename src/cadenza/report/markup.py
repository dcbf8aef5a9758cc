"""HTML that is safe by construction: everything that is not `Html` is text and is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Markup that is not escaped."""

    __slots__ = ()


def element(name: str, *children: object, **attributes: object) -> Html:
    """Return an element. Attributes that are None or False are left out; ``class_`` becomes ``class``.

    >>> element("p", "1 < 2 ", element("b", "&"), class_="sum", hidden=True, id=None)
    '<p class="sum" hidden>1 &lt; 2 <b>&amp;</b></p>'
    """
    start = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(start if name == "input" else f"{start}{joined(children)}</{name}>")  # an input has no end


def joined(children: Iterable[object]) -> Html:
    """Return the children in order, without None."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children if child is not None))


def _text(child: object) -> str:
    # A lone half of a surrogate pair, which a name may hold, is no UTF-8.
    return html.escape(str(child).encode(errors="backslashreplace").decode())


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-") if key != "viewBox" else key
    return f" {name}" if value is True else f' {name}="{_text(value)}"'

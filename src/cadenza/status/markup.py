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
    return Html(start if name in ("input", "img") else f"{start}{joined(children)}</{name}>")  # these have no end


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


_CELL = "text-align:left;padding:1px 14px 1px 0;border:none;background:none;white-space:nowrap;vertical-align:middle"
_WARNING = "color:#c4320a"


def notebook_table(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> Html:
    """Return a title and a table for the output of a notebook's cell. It takes its colours from the notebook, dark or light.

    Numbers must be text already. Every cell that is not `Html` is escaped. A wide table scrolls on its own.
    """
    lines = [element("tr", *(element("th", text, scope="col", style=_CELL) for text in head))] if any(head) else []
    lines += [element("tr", *_cells(row)) for row in rows]
    table = element("table", *lines, style="border:none;margin:.4em 0 0;font-size:inherit;font-variant-numeric:tabular-nums")
    return element("div", element("div", title), table, style="font-size:13px;line-height:1.5;overflow-x:auto")


def notebook_pre(text: str) -> Html:
    """Return lines of plain text for a notebook, the first as a title. It scrolls if it is wide; warnings stand out."""
    title, *lines = text.split("\n")
    shown = (element("span", line, style=_WARNING) if line.startswith("!") else line for line in lines)
    parts = (part for line in shown for part in (line, "\n"))
    pre = element("pre", *parts, style="margin:.4em 0 0;padding:0;border:none;background:none;color:inherit;overflow-x:auto")
    return element("div", element("b", title), pre, style="font-size:13px;line-height:1.35")


def _cells(row: Iterable[object]) -> Iterable[Html]:
    first, *others = row
    yield element("th", first, scope="row", style=f"{_CELL};font-weight:normal")
    yield from (element("td", cell, style=_CELL) for cell in others)

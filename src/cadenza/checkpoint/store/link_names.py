"""The names of links to checkpoints."""

from __future__ import annotations

import re

from cadenza.status.branches import Saved

LAST, BEST = "last", "best"
"""The names of the links to the newest and to the best checkpoint. Of several results, the links are ``best-eval-acc``."""
_LINK = re.compile(rf"{LAST}|{BEST}(?:-[\w.-]+)?", re.ASCII)


def is_link_name(name: str) -> bool:
    """Return whether a link to a checkpoint may have this name.

    >>> [is_link_name(name) for name in ("last", "best", "best-eval-acc", "latest")]
    [True, True, True, False]
    """
    return _LINK.fullmatch(name) is not None


def best_link(monitor: str) -> str:
    """Return the name of the link to the best checkpoint by one result.

    >>> best_link("eval/acc")
    'best-eval-acc'
    """
    return f"{BEST}-{re.sub('[^A-Za-z0-9_.]+', '-', monitor).strip('-') or 'result'}"


def target_in(content: bytes) -> str | None:
    """Return the name of a folder that a link holds; None if it holds no name."""
    text = content.decode(errors="replace").strip()
    return None if Saved.named(text) is None else text

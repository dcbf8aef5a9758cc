"""Counts with their nouns, for every text that a person reads."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun.

    >>> counted(1, "point"), counted(2000, "point"), counted(0, "batch"), counted(2, "child", "children")
    ('1 point', '2,000 points', '0 batches', '2 children')
    """
    return f"{count:,} {one if count == 1 else many or plural(one)}"


def some(texts: Sequence[str], most: int = 10) -> str:
    """Return the first texts, joined by semicolons, and the number of the others.

    >>> some(["a", "b", "c"]), some(["a", "b", "c"], most=2)
    ('a; b; c', 'a; b; and 1 more')
    """
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])


def plural(one: str) -> str:
    """Return the plural of a noun that follows the rules.

    >>> [plural(one) for one in ("step", "batch", "entry", "epoch", "branch")]
    ['steps', 'batches', 'entries', 'epochs', 'branches']
    """
    if one.endswith("y") and one[-2:-1] not in "aeiou":
        return f"{one[:-1]}ies"
    hissed = one.endswith(("s", "x", "sh", "ch")) and not one.endswith("och")
    return f"{one}es" if hissed else f"{one}s"

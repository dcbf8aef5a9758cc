"""What arguments of both dialects must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cadenza.compat.neural.logs import logging
from cadenza.errors import nearest


def frequency(name: str, every: int) -> int:
    """Return how often something happens; -1 is never.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(every, int) or (every < 1 and every != -1):
        raise ValueError(f"{name} must be a whole number of at least 1, or -1 for never; got {every!r}")
    return every


def left_out(what: str, given: Mapping[str, object], without_effect: Iterable[str], known: Iterable[str]) -> None:
    """Name arguments of NeMo that have no effect here in a warning.

    Args:
        what: What they were given to.
        given: Arguments that it does not take.
        without_effect: Those that NeMo takes.
        known: Those that it takes itself.

    Raises:
        TypeError: One that NeMo does not take either.
    """
    for name in given:
        if name not in without_effect:
            hint = nearest(name, [*known, *without_effect])
            raise TypeError(f"{what} has no argument {name!r}.{hint} It has {', '.join(known)}")
    if given:
        logging.warning("%s: these arguments have no effect here: %s", what, ", ".join(given))

"""Signs that a run breaks, seen in its loss: what `Capsule` and `Recover` wait for."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from statistics import median
from typing import Any

from cadenza.status.formats import counted

_SPREADS = 16  # losses of small batches have long tails: means of 4 squares are 8 such distances away once in 300 steps
_LOG_SPREADS = 4  # of single squares, 1 in 60 is 16 distances away; in logarithms, their tail is short
_MOST = 600.0  # an exponent of a float
_HIGHEST = sys.float_info.max
_LOWEST = -_HIGHEST
LEAST = 10  # values before the first judgement, if the window has that many


class Sign(ABC):
    """A sign in the loss of a step. ``a | b`` is a sign if one of the two is."""

    @abstractmethod
    def seen_in(self, loss: float) -> str | None:
        """Return what is wrong with this loss, in a sentence; None if nothing is. The loss is not added to the window."""

    def add(self, loss: float) -> None:  # noqa: B027  # a sign without a window has nothing to do
        """Add the loss of a complete step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that later judgements depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of `state_dict`."""

    def reset(self) -> None:  # noqa: B027
        """Forget the losses of an earlier run."""

    def quiet(self) -> tuple[float, int]:
        """Return a number, and of how many further losses those are no sign that are finite and not above it."""
        return -math.inf, 1

    def __or__(self, other: Sign) -> Sign:
        return AnySign([self, checked_sign(other)])


class NonFinite(Sign):
    """The loss is NaN or infinite.

    >>> NonFinite().seen_in(float("nan")), NonFinite().seen_in(1.0)
    ('the loss is nan', None)
    """

    def seen_in(self, loss: float) -> str | None:
        return None if math.isfinite(loss) else f"the loss is {loss}"

    def quiet(self) -> tuple[float, int]:
        return (math.inf, sys.maxsize) if type(self) is NonFinite else super().quiet()

    def __repr__(self) -> str:
        return "NonFinite()"


class Spike(Sign):
    """The loss is much larger than the last ones.

    A loss is a spike if it is above `ratio` times the highest of the last `window` losses, and far outside of their variation:
    above ``m + 16 * d``, with their median m and the median d of their distances from m; and if all are above 0, above
    ``m * exp(4 * e)``, with the median e of the distances of their logarithms. So losses of small batches, and rare wrong
    labels, are no spikes. Medians do not move with a few outliers (P. Huber, Robust Statistics, 1981, section 5). Nothing is
    judged before 10 losses, or `window` of them if it is shorter. A spike does not enter the window. The limit is computed
    again after each tenth of a window.

    Args:
        name: ``"loss"``, the mean loss of the step.
        ratio: How many times the highest loss; above 1.
        window: The number of losses that are compared.

    Raises:
        ValueError: An argument is out of range.

    >>> spike = Spike(ratio=3, window=4)
    >>> for loss in (1.0, 0.9, 1.1, 1.0):
    ...     spike.add(loss)
    >>> spike.seen_in(3.2), spike.seen_in(3.5)
    (None, 'the loss is 3.5, 3.5 times the median 1 of the last 4 steps')
    """

    def __init__(self, name: str = "loss", ratio: float = 3.0, window: int = 50) -> None:
        if name != "loss":
            raise ValueError(f"Spike watches the mean loss of the step: name must be 'loss'; got {name!r}")
        if not ratio > 1:
            raise ValueError(f"ratio must be above 1; got {ratio!r}")
        if type(window) is not int or window < 3:
            raise ValueError(f"window must be a whole number of at least 3 steps; got {window!r}")
        self.name: str = name
        self.ratio: float = ratio
        self.window: int = window
        self._losses: deque[float] = deque(maxlen=window)
        self._compared: list[float] = []  # the losses of which the limit is computed: empty until there are enough
        self._since = 0  # losses since then
        self._floor = math.inf  # the limit is not below
        self._limit: tuple[float, float] | None = None  # the median and the limit, once a loss was above the floor

    def seen_in(self, loss: float) -> str | None:
        if math.isinf(loss) or not self._is_spike(loss):
            return None
        middle = self._median_and_limit()[0]
        times = f", {loss / middle:.3g} times the median {middle:.4g}" if middle > 0 else f", after a median of {middle:.4g}"
        return f"the loss is {loss:.4g}{times} of the last {counted(len(self._losses), 'step')}"

    def add(self, loss: float) -> None:
        if not math.isfinite(loss) or self._is_spike(loss):
            return
        self._losses.append(loss)
        self._since += 1
        if self._since >= self._until():
            self._compared, self._since, self._limit = [*self._losses], 0, None
            self._floor = self._above(max(self._compared))

    def _until(self) -> float:
        """Return the number of losses from one limit to the next."""
        return self.window / 10 if self._floor < math.inf else min(LEAST, self.window)

    def _above(self, highest: float) -> float:
        return min(highest + (self.ratio - 1) * abs(highest), _HIGHEST)

    def _is_spike(self, loss: float) -> bool:
        return loss > self._floor and loss > self._median_and_limit()[1]

    def _median_and_limit(self) -> tuple[float, float]:
        if self._limit is None:
            losses, limit = self._compared, self._floor
            middle = median(losses)
            limit = max(limit, middle + _SPREADS * median([abs(loss - middle) for loss in losses]))
            if min(losses) > 0:
                spread = median([abs(math.log(loss) - math.log(middle)) for loss in losses])
                limit = max(limit, middle * math.exp(min(_LOG_SPREADS * spread, _MOST)))
            self._limit = middle, limit
        return self._limit

    def quiet(self) -> tuple[float, int]:
        if type(self) is not Spike:
            return super().quiet()
        if not self._compared:
            return self._floor, max(math.ceil(self._until() - self._since), 1)
        half = self.window // 2
        known = max(self._compared[-half:])  # it stays among the last losses while the other half of them is added
        return self._above(known) if known > 0 else known, max(self.window - half - self._since, 1)

    def state_dict(self) -> dict[str, Any]:
        limit = [*self._median_and_limit()] if self._floor < math.inf else []
        return {"sign": repr(self), "losses": [*self._losses], "limit": limit, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if state["sign"] != repr(self):  # the limit of this one is another
            for loss in state["losses"]:
                self.add(loss)
            return
        self._losses.extend(state["losses"])
        self._since = int(state["since"])
        if state["limit"]:
            middle, self._floor = state["limit"]
            self._limit = middle, self._floor

    def reset(self) -> None:
        self._losses.clear()
        self._compared, self._since, self._floor, self._limit = [], 0, math.inf, None

    def __repr__(self) -> str:
        return f"Spike({self.name!r}, ratio={self.ratio:g}, window={self.window})"


class AnySign(Sign):
    """The first of several signs."""

    def __init__(self, signs: Iterable[Sign]) -> None:
        self.signs: list[Sign] = [inner for sign in signs for inner in (sign.signs if isinstance(sign, AnySign) else [sign])]

    def seen_in(self, loss: float) -> str | None:
        return next((seen for sign in self.signs if (seen := sign.seen_in(loss)) is not None), None)

    def add(self, loss: float) -> None:
        for sign in self.signs:
            sign.add(loss)

    def quiet(self) -> tuple[float, int]:
        limits, counts = zip(*(sign.quiet() for sign in self.signs), strict=True)
        return min(limits), min(counts)

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, sign in self._named() if (state := sign.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, sign in self._named():
            if name in state:
                sign.load_state_dict(state[name])

    def _named(self) -> Iterator[tuple[str, Sign]]:
        """Yield each sign and its name: its class, and its number among those of the class."""
        numbers: Counter[str] = Counter()
        for sign in self.signs:
            name = type(sign).__name__
            numbers[name] += 1
            yield f"{name} {numbers[name]}", sign

    def reset(self) -> None:
        for sign in self.signs:
            sign.reset()

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.signs))


class Watch:
    """Shows each loss of a run to a sign. A loss below the limit of the sign costs one comparison, and is added later.

    >>> watch = Watch(NonFinite() | Spike(window=4))
    >>> [watch.look(loss) for loss in (1.0, 0.9, 1.1, 1.0, float("nan"))]
    [None, None, None, None, 'the loss is nan']
    >>> watch.look(3.5)
    'the loss is 3.5, 3.5 times the median 1 of the last 4 steps'
    """

    def __init__(self, sign: Sign) -> None:
        self.sign: Sign = sign
        self._later: list[float] = []
        self._limit, self._room = -math.inf, 0

    def reset(self) -> None:
        """Forget the losses of an earlier run."""
        self.sign.reset()
        self._later.clear()
        self._limit, self._room = -math.inf, 0

    def look(self, loss: float) -> str | None:
        """Return what is wrong with the loss of a step; None if nothing is, and then the sign gets it."""
        if _LOWEST <= loss <= self._limit and len(self._later) < self._room:
            self._later.append(loss)
            return None
        self._add_later()
        seen = self.sign.seen_in(loss)
        if seen is None:
            self.sign.add(loss)
        self._look_ahead()
        return seen

    def seen_in(self, loss: float) -> str | None:
        """Return what is wrong with a loss, which the sign does not get."""
        self._add_later()
        self._look_ahead()
        return self.sign.seen_in(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that later judgements depend on."""
        self._add_later()
        self._look_ahead()
        return AnySign([self.sign]).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, also of another sign: as far as both have signs of the same class."""
        self._later.clear()
        AnySign([self.sign]).load_state_dict(state)
        self._look_ahead()

    def _add_later(self) -> None:
        for sign in self._later:
            self.sign.add(sign)
        self._later.clear()

    def _look_ahead(self) -> None:
        limit, count = self.sign.quiet()
        self._limit, self._room = min(limit, _HIGHEST), count - 1


def checked_sign(when: object) -> Sign:
    """Return a copy of `when`, as callbacks with the same sign may see other losses; raise `TypeError` if it is no sign."""
    if not isinstance(when, Sign):
        raise TypeError(f"when must be NonFinite(), Spike(...), or several joined by |; got {when!r}")
    return deepcopy(when)

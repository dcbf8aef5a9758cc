"""The calendar of a run: when each listener with a schedule is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cadenza.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas

    from cadenza.status.markup import Html


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a listener: an element of `Calendar.rows`. The counters are those that its hook reads."""

    step: int | None
    """Completed steps; None if not known, as are epochs and batches with a loader of unknown length."""
    epoch: int | None
    """Completed epochs."""
    batch: int | None
    """Completed batches."""
    moment: str
    """The name of the moment."""
    callback: str
    """The name of the callback in the run."""
    schedule: str
    """The schedule as text."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """The calls of all listeners with a schedule; ``print(trainer.calendar())`` shows it.

    >>> from cadenza import Callback, Every, First, on
    >>> from cadenza.testing import tiny_trainer
    >>> note = on(Callback.on_step_end, every=Every("2 steps") & ~First("4 steps"))(lambda run: None)
    >>> calendar = tiny_trainer(epochs=2, callbacks=[note]).calendar()
    >>> print(calendar)
    calendar of 2 epochs, 10 steps
    on_step_end  <lambda>  every 2 steps and not in the first 4 steps  3 times: steps 6, 8, 10
    >>> [(call.step, call.epoch) for call in calendar.rows]
    [(6, 1), (8, 1), (10, 1)]
    """

    rows: Sequence[Call]
    """The calls, in their order."""
    unknown: Sequence[tuple[str, str, str]]
    """Of each listener with calls that are not known beforehand: its name and schedule, its moment, and why."""
    unscheduled: dict[str, int]
    """By moment, the number of listeners without a schedule, which are called each time."""
    headline: str
    """The length of the run, or of its part, in one line."""
    length: float
    """The number of steps, or of epochs if the steps are not known."""

    def __str__(self) -> str:
        rows = [(*key, _times(calls)) for key, calls in self._by_listener().items()]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = ["  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([self.headline, *lines, *self._others()])

    def __repr__(self) -> str:
        return str(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame: a row for each call, with the columns of `Call`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", needed_by="Calendar.to_frame()", extra="data") from None
        return pandas.DataFrame([asdict(row) for row in self.rows], columns=list(Call.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """Return the calendar as plain data, for JSON."""
        unknown = [{"listener": who, "moment": moment, "why": why} for who, moment, why in self.unknown]
        rows = [asdict(row) for row in self.rows]
        return {"headline": self.headline, "calls": rows, "unknown": unknown, "unscheduled": dict(self.unscheduled)}

    def _repr_html_(self) -> str:
        """Return what notebooks show: a line of time for each listener."""
        from cadenza.status.markup import element, joined, notebook_table  # imported here: few runs are in a notebook

        head = ("callback", "moment", "schedule", "", "")
        rows = [
            (owner, moment, schedule, self._picture(calls), _times(calls))
            for (moment, owner, schedule), calls in self._by_listener().items()
        ]
        return joined(
            [
                notebook_table(self.headline, head, rows),
                *(element("div", line, style="font-size:13px") for line in self._others()),
            ]
        )

    def _others(self) -> Iterator[str]:
        for who, moment, why in self.unknown:
            yield f"not known beforehand: {who}, {moment}: {why}"
        if self.unscheduled:
            calls = (f"{moment} {count}" for moment, count in self.unscheduled.items())
            yield f"called each time, by moment: {', '.join(calls)}"

    def _by_listener(self) -> dict[tuple[str, str, str], list[Call]]:
        found: dict[tuple[str, str, str], list[Call]] = {}
        for row in self.rows:
            found.setdefault((row.moment, row.callback, row.schedule), []).append(row)
        return found

    def _picture(self, calls: Iterable[Call]) -> Html:
        from cadenza.status.markup import element

        at = {round(_WIDTH * (_value(call) or 0) / max(1.0, self.length)) for call in calls}
        marks = "".join(f"M{x + 1},2v10" for x in sorted(at))
        line = element("path", d=f"M1,12h{_WIDTH}", stroke="currentColor", stroke_opacity=".3", fill="none")
        ticks = element("path", d=marks, stroke="currentColor", stroke_width="1.5", fill="none")
        return element("svg", line, ticks, width=_WIDTH + 2, height=14, viewBox=f"0 0 {_WIDTH + 2} 14", role="img")


_WIDTH = 320  # of the picture, in pixels
_SHOWN = 8  # more calls of a listener are not listed one by one


def _value(call: Call) -> int | None:
    return call.step if call.step is not None else call.epoch


def _times(calls: Sequence[Call]) -> str:
    """Return how often and at which steps a listener is called; steps at equal distances are not listed one by one."""
    unit = "steps" if calls[0].step is not None else "epochs"
    at = list(dict.fromkeys(_value(call) or 0 for call in calls))
    shown = ", ".join(map(str, at))
    if len(at) > _SHOWN:
        distance = {later - earlier for earlier, later in pairwise(at)}
        first = at[:3] if len(distance) == 1 else at[: _SHOWN - 2]
        shown = f"{', '.join(map(str, first))}, ..., {at[-1]}"
    return f"{'once' if len(calls) == 1 else f'{len(calls):,} times'}: {unit if len(at) > 1 else unit[:-1]} {shown}"

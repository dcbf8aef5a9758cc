"""The times of a run: plain data, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cadenza.profiling.spans import HostRead, Profiler, Span
from cadenza.status.counting import counted

MOST_ROWS = 20  # of callbacks in the table; the others are summed in one row


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Time that the trainer spent on one thing, such as ``"forward"``."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CallbackTime:
    """Time that one callback spent at one moment."""

    callback: str
    moment: str
    calls: int
    """Calls at which the schedule was due. The time to check the schedule is included in `seconds`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """Time that the ranks spent on one part of their steps."""

    part: str
    """``"data"``, ``"forward"``, ``"backward"``, ``"callbacks"``, or ``"waiting"`` in methods of the driver."""
    slowest: int
    """The rank that spent the most time on it."""
    seconds: float
    """The time of this rank."""
    mean_s: float
    least_s: float

    def __str__(self) -> str:
        return (
            f"{self.part}: rank {self.slowest} took {self.seconds:.3f} s; mean {self.mean_s:.3f} s, least {self.least_s:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a run in seconds. All phases and callbacks sum to `wall_s`.

    Each row holds only its own time: an evaluation inside a callback has a row of its own.
    """

    wall_s: float
    steps: int
    phases: tuple[PhaseTime, ...]
    """The last one, ``"loop"``, is the rest."""
    callbacks: tuple[CallbackTime, ...]
    note: str = ""
    """The meaning of the times on this device."""
    host_reads: tuple[HostRead, ...] = ()
    """Hooks that read tensors on the host in several of a few sampled steps: on a GPU each read waits for the device."""

    ranks: tuple[RankTime, ...] = ()
    """The slowest rank in each part of the steps, on the main process of several."""

    @classmethod
    def of(cls, profiler: Profiler, steps: int, note: str = "") -> Timings:
        """Read a profiler that continues to measure."""
        wall_ns = profiler.read() - profiler.began
        used = [span for span in profiler.spans if span.ns or span.calls]
        names = dict.fromkeys(span.name for span in used if not span.owner and span.name != "loop")
        callers = dict.fromkeys((span.owner, span.name) for span in used if span.owner)
        phases = [PhaseTime(name, *_sum(one for one in used if not one.owner and one.name == name)) for name in names]
        rest = sum(span.ns for span in used if span in (profiler.loop, profiler.gap))
        callbacks = [
            CallbackTime(owner, moment, *_sum(one for one in used if (one.owner, one.name) == (owner, moment)))
            for owner, moment in callers
        ]
        loop = PhaseTime("loop", steps, rest / 1e9)
        return cls(wall_ns / 1e9, steps, (*phases, loop), tuple(callbacks), note, profiler.host_reads)

    @property
    def rows(self) -> tuple[PhaseTime | CallbackTime, ...]:
        """All phases and all callbacks: their seconds sum to `wall_s`."""
        return (*self.phases, *self.callbacks)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``profile.json``."""
        return {
            "wall_s": self.wall_s,
            "steps": self.steps,
            "phases": [asdict(phase) for phase in self.phases],
            "callbacks": [asdict(callback) for callback in self.callbacks],
            "host_reads": [asdict(read) for read in self.host_reads],
            "ranks": [asdict(one) for one in self.ranks],
        }

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_pre  # imported here: few runs are in a notebook

        first, head, *rows = str(self).split("\n")
        return notebook_pre(first, [head, *rows])

    def __str__(self) -> str:
        rows = [(phase.name, phase.calls, phase.seconds) for phase in sorted(self.phases, key=_costly)]
        called = [(f"{one.callback}, {one.moment}", one.calls, one.seconds) for one in sorted(self.callbacks, key=_costly)]
        rows += called[:MOST_ROWS]
        if others := called[MOST_ROWS:]:
            rows.append((f"{len(others)} others", sum(row[1] for row in others), sum(row[2] for row in others)))
        ranks = ["slowest rank by part:", *(f"  {one}" for one in self.ranks)] if self.ranks else []
        return "\n".join([*self._lines(rows), *ranks, *(f"! {read}" for read in self.host_reads)])

    def _lines(self, rows: list[tuple[str, int, float]]) -> Iterator[str]:
        yield f"profile: {self.wall_s:.3f} s, {counted(self.steps, 'step')}" + (f"; {self.note}" if self.note else "")
        table = [("", "calls", "seconds", "of run", "a call")]
        for name, calls, seconds in rows:
            fraction = seconds / self.wall_s if self.wall_s else 0.0
            table.append((name, str(calls), f"{seconds:.3f}", f"{fraction:.1%}", _short(seconds, calls)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *numbers in table:
            cells = (f"{text:>{width}}" for text, width in zip(numbers, widths[1:], strict=True))
            yield "  ".join([f"{name:{widths[0]}}", *cells]).rstrip()


def _sum(spans: Iterable[Span]) -> tuple[int, float]:
    """Return calls and seconds."""
    calls, ns = 0, 0
    for span in spans:
        listener = span.listener
        calls += span.calls * span.counted if listener is None or listener.calls is None else listener.calls
        ns += span.ns
    return calls, ns / 1e9


def _costly(row: PhaseTime | CallbackTime) -> float:
    return -row.seconds


def _short(seconds: float, calls: int) -> str:
    """Return the mean time of a call in a unit that suits it.

    >>> _short(3.2, 480), _short(0.00042, 1000), _short(0.1, 0)
    ('6.67 ms', '420 ns', '')
    """
    if not calls:
        return ""
    mean = seconds / calls
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if mean >= size), (1e-9, "ns"))
    return f"{mean / size:.3g} {unit}"

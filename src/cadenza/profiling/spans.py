"""Spans: timed sections of the training thread, and the table of their times.

At any time exactly one span is measured, so all of them sum to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from cadenza.status.formats import counted

# The phase between the end of one moment and the start of another; the last value says whether it counts as a call.
# The time between any other two moments belongs to the loop. Moments that are not named here do not end a phase.
BETWEEN = (
    ("on_setup", "on_fit_start", "setup", True),
    ("on_epoch_start", "on_fetch_start", "fetch", False),  # the loader is opened
    ("on_fetch_start", "on_fetch_end", "fetch", True),
    ("on_fetch_end", "on_step_start", "transfer", True),
    ("on_fetch_end", "on_batch_start", "transfer", True),  # a further batch of an accumulation window
    ("on_batch_start", "on_before_backward", "forward", True),
    ("on_after_backward", "on_before_backward", "forward", True),  # a step_fn may go backward,
    ("on_after_zero_grad", "on_before_backward", "forward", True),  # and update, several times
    ("on_before_backward", "on_after_backward", "backward", True),
    ("on_batch_end", "on_before_optimizer_step", "optimizer", False),  # gradients are unscaled
    ("on_fetch_end", "on_before_optimizer_step", "optimizer", False),  # a short window ends the epoch
    ("on_before_optimizer_step", "on_after_optimizer_step", "optimizer", True),
    ("on_before_zero_grad", "on_after_zero_grad", "zero_grad", True),
    ("on_after_backward", "on_before_optimizer_step", "step_fn", False),  # the time outside of run.backward and run.update
    ("on_after_zero_grad", "on_before_optimizer_step", "step_fn", False),
    ("on_batch_start", "on_batch_end", "step_fn", True),
    ("on_after_backward", "on_batch_end", "step_fn", True),
    ("on_after_zero_grad", "on_batch_end", "step_fn", True),
)

BOUNDARIES = {name: index for index, name in enumerate(dict.fromkeys(name for row in BETWEEN for name in row[:2]))}
"""The moments that end a phase, each with its index in a row of `Profiler.rows`."""

OPENS = {"on_eval_start": "evaluation", "on_sanity_start": "sanity"}
"""The moments that start the span of an evaluation."""

CLOSES = ("on_eval_end", "on_sanity_end")

TIMED_MOMENTS = frozenset((*BOUNDARIES, *OPENS, *CLOSES))
"""The moments that read the clock even if they have no listeners."""

MOST_EVENTS = 200_000  # about 20 MB of trace: with more, a viewer gets slow


@dataclass(frozen=True, slots=True)
class HostRead:
    """A hook that read a tensor on the host in several of the sampled steps."""

    callback: str
    moment: str
    how: str
    """Such as ``tensor.item()``."""
    location: str
    """The file and line that did it most often: the innermost outside of torch."""
    reads: int
    """The number of reads there."""
    steps: int
    """The number of sampled steps with such a read."""
    sampled: int
    """The number of sampled steps."""

    @property
    def often(self) -> str:
        """In which steps, how, and where."""
        steps = f"each of {self.sampled}" if self.steps >= self.sampled else f"{self.steps} of {self.sampled}"
        return f"in {steps} sampled steps ({self.how} at {self.location})"

    def __str__(self) -> str:
        return f"{self.callback}.{self.moment} read a tensor on the host {self.often}"


class Timed(Protocol):
    """A listener: a hook of a callback."""

    owner: str
    calls: int | None
    span: Span | None

    @property
    def moment(self) -> Callable[..., None]: ...


class Span:
    """The time of a phase, or of a callback at a moment, without the time of other spans inside of it."""

    __slots__ = ("calls", "counted", "listener", "name", "ns", "owner", "title")

    def __init__(self, name: str, owner: str = "", *, counted: bool = True, listener: Timed | None = None) -> None:
        self.name: str = name
        self.owner: str = owner
        self.counted: bool = counted
        self.listener: Timed | None = listener
        self.title: str = f"{owner}.{name}" if owner else name
        self.ns: int = 0
        self.calls: int = 0

    @property
    def counted_calls(self) -> int:
        """The calls that a table shows: of a listener that asks a function first, those at which the answer was yes."""
        asked = None if self.listener is None else self.listener.calls
        return self.calls * self.counted if asked is None else asked


class Profiler:
    """Measures one run from its construction on. `Hooks.start_profile` makes every moment switch the `current` span.

    A switch adds the time `since` the last reading of the clock to the current span, so every nanosecond is counted once. The
    phase between two moments is known only at the second one. Until then its time is in the span `gap`.

    Args:
        step_fn: Whether a ``step_fn`` does the steps. Its time outside of ``run.backward`` and ``run.update`` is then a phase.
    """

    began: int
    gap_began: int
    since: int

    def __init__(self, *, step_fn: bool = False) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        """Returns nanoseconds; may wait for the device first."""
        self.loop: Span = Span("loop")
        self.gap: Span = Span("loop", counted=False)
        self.spans: list[Span] = [self.loop, self.gap]
        self.current: Span = self.gap
        self.rows: dict[str, list[Span]] = self._rows(step_fn)
        """By the name of the last moment: the span for each possible next moment, at its index in `BOUNDARIES`."""
        self.row: list[Span] = self.rows["on_setup"]
        self.opened: list[tuple[object, Span, Span, int]] = []
        """For each evaluation under way: the evaluation, the span that it interrupted, its span, and its start."""
        self.tracing: int = 0
        """How many traces are being recorded."""
        self.events: list[tuple[str, str, int, int]] = []
        """Kind, name, start and end of each event while a trace is recorded."""
        self.users: int = 0
        self.host_reads: tuple[HostRead, ...] = ()
        """Hooks that read tensors on the host in the sampled steps."""
        self.began = self.since = self.gap_began = self.clock()

    def _rows(self, step_fn: bool) -> dict[str, list[Span]]:
        rows = {name: [self.loop] * len(BOUNDARIES) for name in BOUNDARIES}
        for before, after, name, counts in BETWEEN:
            if step_fn or name != "step_fn":
                rows[before][BOUNDARIES[after]] = self.span(name, counted=counts)
        return rows

    def span(self, name: str, owner: str = "", *, counted: bool = True) -> Span:
        """Return the span of a phase, or of `owner` at the moment `name`. Each is made once."""
        for span in self.spans:
            if (span.name, span.owner, span.counted, span.listener) == (name, owner, counted, None):
                return span
        span = Span(name, owner, counted=counted)
        self.spans.append(span)
        return span

    def span_of(self, listener: Timed) -> Span:
        """Return the span of a listener. It is made once."""
        if listener.span is None:
            listener.span = Span(listener.moment.__name__, listener.owner, listener=listener)
            self.spans.append(listener.span)
        return listener.span

    def read(self) -> int:
        """Add the time up to now to the current span, and return the time. Since `began` it is the sum of all spans."""
        now = self.clock()
        self.current.ns += now - self.since
        self.since = now
        return now

    @contextmanager
    def timed(self, name: str, owner: str = "") -> Iterator[None]:
        """Measure the block, without moments in it, as a phase or as work of `owner` at `name`."""
        span, outer = self.span(name, owner), self.current
        self.read()
        self.current, begin = span, self.since
        span.calls += 1
        try:
            yield
        finally:
            self.read()
            self.current = outer
            if self.tracing:
                self.add_event("callback" if owner else "phase", span.title, begin, self.since)

    def add_event(self, kind: str, name: str, begin: int, end: int) -> None:
        """Add an event to the trace, which holds at most `MOST_EVENTS`."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((kind, name, begin, end))

    # -- for the function that fires a moment ------------------------------------------------------

    def count_call(self, began: int) -> None:
        """Count a call of the listener of the current span."""
        span, now = self.current, self.clock()
        span.ns += now - self.since
        span.calls += 1
        self.since = now
        if self.tracing:
            self.add_event("callback", span.title, began, now)

    def open(self, kind: str, evaluation: object, outer: Span) -> None:
        """Start the span of an evaluation, which interrupts `outer`."""
        span = self.span(f"{kind} {getattr(evaluation, 'name', '')}")
        span.calls += 1
        self.opened.append((evaluation, outer, span, self.since))
        self.current = span

    def close(self, evaluation: object, outer: Span) -> Span:
        """End the span of an evaluation; return the span that it interrupted."""
        while self.opened:  # more than one if an error kept an inner one from ending
            opened, interrupted, span, begin = self.opened.pop()
            if self.tracing:
                self.add_event("phase", span.name, begin, self.since)
            if opened is evaluation:
                return interrupted
        return outer


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
        rows: dict[tuple[str, str], tuple[int, int]] = {}
        for span in profiler.spans:
            if span.ns or span.calls:
                calls, ns = rows.get((span.owner, span.name), (0, 0))
                rows[span.owner, span.name] = calls + span.counted_calls, ns + span.ns
        _, rest = rows.pop(("", "loop"), (0, 0))
        phases = [PhaseTime(name, calls, ns / 1e9) for (owner, name), (calls, ns) in rows.items() if not owner]
        callbacks = [CallbackTime(owner, name, calls, ns / 1e9) for (owner, name), (calls, ns) in rows.items() if owner]
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
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_pre  # imported here: few runs are in a notebook

        return notebook_pre(str(self))

    def __str__(self) -> str:
        rows = [(phase.name, phase.calls, phase.seconds) for phase in sorted(self.phases, key=_costly)]
        called = [
            (f"{callback.callback}, {callback.moment}", callback.calls, callback.seconds)
            for callback in sorted(self.callbacks, key=_costly)
        ]
        rows += called[:MOST_ROWS]
        if others := called[MOST_ROWS:]:
            rows.append((f"{len(others)} others", sum(row[1] for row in others), sum(row[2] for row in others)))
        ranks = ["slowest rank by part:", *(f"  {rank}" for rank in self.ranks)] if self.ranks else []
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

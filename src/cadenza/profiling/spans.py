"""Spans: timed sections of the training thread. At any time exactly one span is measured, so all of them sum to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

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


class Profiler:
    """Measures one run from its construction on. `Hooks.start_profile` makes every moment switch the `current` span.

    A switch adds the time `since` the last reading of the clock to the current span, so every nanosecond is counted once. The
    phase between two moments is known only at the second one. Until then its time is in the span `gap`.

    Args:
        step_fn: Whether a ``step_fn`` does the steps. Its time outside of ``run.backward`` and ``run.update`` is then a phase.
    """

    __slots__ = (
        "began",
        "clock",
        "current",
        "events",
        "gap",
        "gap_began",
        "host_reads",
        "loop",
        "opened",
        "row",
        "rows",
        "since",
        "spans",
        "tracing",
        "users",
    )

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
        for before, after, name, counted in BETWEEN:
            if step_fn or name != "step_fn":
                rows[before][BOUNDARIES[after]] = self.span(name, counted=counted)
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

"""The function that calls all who hear a moment: written for each moment, and in a second form that keeps the time."""

from __future__ import annotations

import inspect
import linecache
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from cadenza.hooks.gates import Gate, nothing
from cadenza.profiling.spans import CLOSES, MARKS, OPENS

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks
    from cadenza.hooks.listener import Listener
    from cadenza.hooks.moments import Moment
    from cadenza.profiling.spans import Account, Watch
    from cadenza.status.progress import Progress

# An end reaches everybody, so that every start has its end; any other moment is over at the first error.
# Arguments are spelled out: handing them on as *arguments costs 120 ns a call.
_PLAIN = """\
def {name}(run{rest}):
{alarms}    first = None
    for call in CALLS:
        try:
            call(run{rest})
            continue
        except BaseException as error:
            fault = error
        first = HOOKS._failed(MOMENT, call, fault, run, first)
        del fault
        if first is not None and (not {reaches_all} or type(first) is LEFT):
            break
    if first is not None:
        raise first
"""

_ALARMS = """\
    progress = run.progress
    for read, wake in ROTA.alarms:
        if read(progress) >= wake:
            until = ROTA.look(progress)
            if until is not None and until > progress.step:
                HOOKS.hush(MOMENT, progress, until)
            break
"""

# The same, with the clock read once at the start and once after each call. Readings are spelled out, too: as calls of a
# method they would double the cost. See `Watch` for what they mean.
_START = """\
def {name}(run{rest}):
    clock, outer = WATCH.clock, WATCH.current
    now = begin = clock()
"""
_CREDIT = """\
    outer.ns += now - WATCH.since
    WATCH.since = now
"""
_CREDIT_AT_A_MARK = """\
    if outer is GAP:
        phase = WATCH.row[{place}]
        phase.ns += GAP.ns + now - WATCH.since
        phase.calls += 1
        GAP.ns = 0
        if WATCH.tracing and phase is not LOOP:
            WATCH.note("phase", phase.name, WATCH.gap_began, now)
    else:
        outer.ns += now - WATCH.since
    WATCH.since = now
"""
_END_OF_AN_EVALUATION = """\
    outer = WATCH.close(value0, outer)
"""
_CALLS = """\
    first = None
    for call, account in CALLS:
        called, fault = now, None
        WATCH.current = account
        try:
            call(run{rest})
        except BaseException as error:
            fault = error
        now = clock()
        account.ns += now - WATCH.since
        account.calls += 1
        WATCH.since = now
        if WATCH.tracing:
            WATCH.note("callback", account.title, called, now)
        if fault is None:
            continue
        first = HOOKS._failed(MOMENT, call, fault, run, first)
        fault = None
        WATCH.read()
        now = WATCH.since
        if first is not None and (not {reaches_all} or type(first) is LEFT):
            break
    WATCH.current = outer
    if WATCH.tracing:
        WATCH.note("moment", "{name}", begin, now)
"""
_RESTORE = """\
    WATCH.current = outer
"""
_END_OF_A_MARK = """\
    if outer is GAP:
        WATCH.row = ROW
        WATCH.gap_began = now
"""
_START_OF_AN_EVALUATION = """\
    WATCH.open("{opens}", value0, outer)
"""
_AGAIN = 50  # steps after which a rota is looked at again that could not tell until when nobody is awake

_RAISE = """\
    if first is not None:
        raise first
"""


class Left(BaseException):  # no error: it unwinds an evaluation
    """A signal ends the run and interrupts an evaluation. It unwinds the hook that evaluates, and the loop catches it.

    Later hooks of the moment are not called now: see `cadenza.suspension`.
    """

    def __init__(self, evaluation: str = "", batches: int = 0) -> None:
        super().__init__(f"{evaluation!r} was left after {batches} batches")
        self.evaluation, self.batches = evaluation, batches
        self.listener: Listener | None = None
        """The hook that evaluates."""
        self.due: list[list[Any]] = []
        """The due hooks after it, if the moment was interrupted before."""


class Rota:
    """Who is called at a moment now.

    Gates that sleep for long stand aside, and one look at each counter serves for all of them. If nobody is left, the moment
    is as one that nobody hears, until the step at which somebody wakes: what a call costs by itself is little beside what it
    costs when all that it touches has left the cache during the arithmetic of a step.

    Args:
        calls: All who are called, in order; a change of the list is told by `update`.
    """

    def __init__(self, calls: Sequence[Callable[..., Any]]) -> None:
        self._all = calls
        self.calls = list(calls)
        self.sleepy = [call for call in calls if isinstance(call, Gate) and call.sleeps_long]
        self._last: tuple[int, float] | None = None
        self.rouse()

    def rouse(self) -> None:
        """Have it looked at again when the moment comes next."""
        self.alarms: list[tuple[Callable[[Progress], float], float]] = [(always, 0.0)] if self.sleepy else []
        """Counters, and the values at which somebody wakes."""

    def update(self) -> None:
        """Take up a change of the list, also while the moment is under way: who is gone is not called any more."""
        self.calls[:] = [call if call in self._all else nothing for call in self.calls]
        self.sleepy = [gate for gate in self.sleepy if gate in self._all]

    def look(self, progress: Progress) -> float | None:
        """Find out who is awake; return the step until which nobody is, None if somebody is or it cannot be told."""
        asleep = [gate for gate in self.sleepy if gate.read(progress) < gate.wake]
        self.calls[:] = [call for call in self._all if call not in asleep]
        if len(asleep) < len(self.sleepy):
            self.rouse()  # those that are awake may fall asleep now
            return None
        pace = self._pace(progress)
        wakes: dict[Callable[[Progress], float], float] = {progress.reader("step"): progress.step + _AGAIN}
        for gate in asleep:
            wakes[gate.read] = min(gate.wake, wakes.get(gate.read, math.inf))
        self.alarms = list(wakes.items())
        quiet = [gate.quiet_until(progress, pace) for gate in asleep]
        told = [step for step in quiet if step is not None]
        return min(told) if not self.calls and len(told) == len(quiet) else None

    def _pace(self, progress: Progress) -> float | None:
        """Return how many steps a second were done since it was looked at last; None the first time."""
        before, self._last = self._last, (progress.step, progress.elapsed_s)
        if before is None or self._last[1] <= before[1]:
            return None
        return (self._last[0] - before[0]) / (self._last[1] - before[1])


def always(progress: Progress) -> float:
    """Be a counter that is always there."""
    return 0.0


def fan_out(hooks: Hooks, moment: Moment, rota: Rota) -> Callable[..., None]:
    """Return a function with the moment's arguments that calls who is awake; a change of the list takes effect at once."""
    template = _PLAIN.replace("{alarms}", _ALARMS if rota.sleepy else "")
    return _made(template, moment, {"HOOKS": hooks, "MOMENT": moment, "CALLS": rota.calls, "ROTA": rota})


def part_of(hooks: Hooks, moment: Moment, calls: Sequence[Callable[..., Any]]) -> Callable[..., None]:
    """Return a function with the moment's arguments that calls some of its listeners."""
    return _made(_PLAIN.replace("{alarms}", ""), moment, {"HOOKS": hooks, "MOMENT": moment, "CALLS": calls})


def watched_fan_out(
    hooks: Hooks, moment: Moment, calls: Sequence[tuple[Callable[..., Any], Account]], watch: Watch
) -> Callable[..., None]:
    """Return the same for pairs: the time of each call goes to the account beside it."""
    name, heard = moment.__name__, bool(calls)
    pieces = (
        (True, _START),
        (name in MARKS, _CREDIT_AT_A_MARK),
        (name not in MARKS, _CREDIT),
        (name in CLOSES, _END_OF_AN_EVALUATION),
        (heard, _CALLS),
        (name in CLOSES and not heard, _RESTORE),
        (name in MARKS, _END_OF_A_MARK),
        (name in OPENS, _START_OF_AN_EVALUATION),
        (heard, _RAISE),
    )
    scope = {"HOOKS": hooks, "MOMENT": moment, "CALLS": calls, "WATCH": watch}
    scope |= {"GAP": watch.gap, "LOOP": watch.loop, "ROW": watch.rows.get(name)}
    return _made("".join(piece for used, piece in pieces if used), moment, scope)


def _made(template: str, moment: Moment, scope: dict[str, Any]) -> Callable[..., None]:
    scope["LEFT"] = Left
    exec(_code(template, moment), scope)
    return scope[moment.__name__]  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _code(template: str, moment: Moment) -> CodeType:
    """Return the code of a template for a moment. Compiling takes a quarter of a millisecond, and each run has its fan-outs."""
    name, count = moment.__name__, len(inspect.signature(moment).parameters) - 2
    source = template.format(
        name=name,
        rest="".join(f", value{i}" for i in range(count)),
        reaches_all=name.endswith("_end") or name == "on_exception",
        place=MARKS.get(name),
        opens=OPENS.get(name),
    )
    file = f"<cadenza moment {name}{', watched' if 'WATCH' in template else ', gated' if 'ROTA' in template else ''}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    return compile(source, file, "exec")

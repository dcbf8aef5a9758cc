"""What took how long in a run: plain data, and a table of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cadenza.profiling.host_reads import HostRead
from cadenza.profiling.spans import Account, Watch

MOST_ROWS = 20  # of callbacks in the table; the others are summed up in one


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
    """A listener with a filter is called when the filter lets it through; asking the filter is part of its time."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Timings:
    """The time of a run, in seconds: all phases and all callbacks together make up `wall_s`.

    Each has its own time: what goes on inside of it, such as an evaluation inside a callback, stands in its own row.
    """

    wall_s: float
    steps: int
    phases: tuple[PhaseTime, ...]
    """``"loop"``, the last one, is what is left over."""
    callbacks: tuple[CallbackTime, ...]
    note: str = ""
    """What the times mean on this device."""
    host_reads: tuple[HostRead, ...] = ()
    """Hooks that read tensors on the host in several of a few sampled steps: on a GPU each read waits for the device."""

    @classmethod
    def of(cls, watch: Watch, steps: int, note: str = "") -> Timings:
        """Read a watch that goes on."""
        wall_ns = watch.read() - watch.began
        used = [account for account in watch.accounts if account.ns or account.calls]
        names = dict.fromkeys(account.name for account in used if not account.owner and account.name != "loop")
        heard = dict.fromkeys((account.owner, account.name) for account in used if account.owner)
        phases = [PhaseTime(name, *_sum(one for one in used if not one.owner and one.name == name)) for name in names]
        rest = sum(account.ns for account in used if account in (watch.loop, watch.gap))
        callbacks = [
            CallbackTime(owner, moment, *_sum(one for one in used if (one.owner, one.name) == (owner, moment)))
            for owner, moment in heard
        ]
        loop = PhaseTime("loop", steps, rest / 1e9)
        return cls(wall_ns / 1e9, steps, (*phases, loop), tuple(callbacks), note, watch.host_reads)

    @property
    def rows(self) -> tuple[PhaseTime | CallbackTime, ...]:
        """All phases and all callbacks: their seconds sum to `wall_s`."""
        return (*self.phases, *self.callbacks)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``profile.json`` holds."""
        return {
            "wall_s": self.wall_s,
            "steps": self.steps,
            "phases": [asdict(phase) for phase in self.phases],
            "callbacks": [asdict(callback) for callback in self.callbacks],
            "host_reads": [asdict(read) for read in self.host_reads],
        }

    def __str__(self) -> str:
        rows = [(phase.name, phase.calls, phase.seconds) for phase in sorted(self.phases, key=_costly)]
        called = [(f"{one.callback}, {one.moment}", one.calls, one.seconds) for one in sorted(self.callbacks, key=_costly)]
        rows += called[:MOST_ROWS]
        if others := called[MOST_ROWS:]:
            rows.append((f"{len(others)} others", sum(row[1] for row in others), sum(row[2] for row in others)))
        return "\n".join([*self._lines(rows), *(f"! {read}" for read in self.host_reads)])

    def _lines(self, rows: list[tuple[str, int, float]]) -> Iterator[str]:
        width = max(len(name) for name, _, _ in rows)
        yield f"profile: {self.wall_s:.3f} s, {self.steps} steps" + (f"; {self.note}" if self.note else "")
        yield f"{'':{width}}  {'calls':>8}  {'seconds':>9}  {'share':>6}  {'a call':>8}"
        for name, calls, seconds in rows:
            share = seconds / self.wall_s if self.wall_s else 0.0
            yield f"{name:{width}}  {calls:>8}  {seconds:>9.3f}  {share:>6.1%}  {_short(seconds, calls):>8}"


def _sum(accounts: Iterable[Account]) -> tuple[int, float]:
    """Return calls and seconds."""
    calls, ns = 0, 0
    for account in accounts:
        listener = account.listener
        calls += listener.calls if listener is not None and listener.schedule is not None else account.calls * account.counted
        ns += account.ns
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

"""Who has the time of the training thread: it is handed from one account to the next, so that the parts make the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cadenza.profiling.host_reads import HostRead

# What the trainer does between the end of one moment and the start of another; the last says whether it counts as a call.
# Between any others it does what is not worth a name; moments that are not named here interrupt, and change nothing.
BETWEEN = (
    ("on_setup", "on_fit_start", "setup", True),
    ("on_epoch_start", "on_fetch_start", "fetch", False),  # the loader is opened
    ("on_fetch_start", "on_fetch_end", "fetch", True),
    ("on_fetch_end", "on_step_start", "transfer", True),
    ("on_fetch_end", "on_batch_start", "transfer", True),  # a further batch of a group
    ("on_batch_start", "on_before_backward", "forward", True),
    ("on_after_backward", "on_before_backward", "forward", True),  # a step_fn may go backward,
    ("on_after_zero_grad", "on_before_backward", "forward", True),  # and update, several times
    ("on_before_backward", "on_after_backward", "backward", True),
    ("on_batch_end", "on_before_optimizer_step", "optimizer", False),  # gradients are unscaled
    ("on_fetch_end", "on_before_optimizer_step", "optimizer", False),  # a short group ends the epoch
    ("on_before_optimizer_step", "on_after_optimizer_step", "optimizer", True),
    ("on_before_zero_grad", "on_after_zero_grad", "zero_grad", True),
    ("on_after_backward", "on_before_optimizer_step", "step_fn", False),  # what it does without our verbs
    ("on_after_zero_grad", "on_before_optimizer_step", "step_fn", False),
    ("on_batch_start", "on_batch_end", "step_fn", True),
    ("on_after_backward", "on_batch_end", "step_fn", True),
    ("on_after_zero_grad", "on_batch_end", "step_fn", True),
)

MARKS = {name: place for place, name in enumerate(dict.fromkeys(name for row in BETWEEN for name in row[:2]))}
"""The moments that part what the trainer does, each with its place in a row of `Watch.rows`."""

OPENS = {"on_eval_start": "evaluation", "on_sanity_start": "sanity"}
"""The moments after which the time is an evaluation's, until its end."""

CLOSES = ("on_eval_end", "on_sanity_end")

PARTING = frozenset((*MARKS, *OPENS, *CLOSES))
"""The moments at which time changes hands though nobody hears them."""

MOST_SPANS = 200_000  # some 20 MB of trace: beyond, a viewer gets slow


class Timed(Protocol):
    """A listener: a hook of a callback."""

    owner: str
    calls: int
    account: Account | None

    @property
    def moment(self) -> Callable[..., None]: ...
    @property
    def schedule(self) -> object | None: ...


class Account:
    """Time of one kind: of a phase, or of a callback at a moment; its own time, without that of others inside of it."""

    __slots__ = ("calls", "counted", "listener", "name", "ns", "owner", "title")

    def __init__(self, name: str, owner: str = "", *, counted: bool = True, listener: Timed | None = None) -> None:
        self.name, self.owner, self.counted, self.listener = name, owner, counted, listener
        self.title = f"{owner}.{name}" if owner else name
        self.ns = 0
        self.calls = 0


class Watch:
    """The time of one run, from now on. `Hooks.watch` makes every moment hand it on.

    At any instant one account is the `current` one. Whoever takes over credits it with the time `since` the last reading
    of the clock, so every nanosecond is counted once. What the trainer does between two moments is only known when the
    second one comes: until then its time waits in the account `gap`.

    Args:
        step_fn: Whether a ``step_fn`` does the steps: what it does without our verbs then has a name.
    """

    __slots__ = (
        "accounts",
        "began",
        "clock",
        "current",
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

    def __init__(self, *, step_fn: bool = False) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        """Returns nanoseconds; may wait for the device first."""
        self.loop, self.gap = Account("loop"), Account("loop", counted=False)
        self.accounts = [self.loop, self.gap]
        self.current = self.gap
        self.rows = self._rows(step_fn)
        """By the name of the moment that ended last: the account for each that may come next, at its place in `MARKS`."""
        self.row = self.rows["on_setup"]
        self.opened: list[tuple[object, Account, Account, int]] = []
        """Evaluations under way, the account that each interrupted, its own, and when it began."""
        self.tracing = 0
        """How many want spans now."""
        self.spans: list[tuple[str, str, int, int]] = []
        """Kind, name, start and end of what took place while somebody traced."""
        self.users = 0
        self.host_reads: tuple[HostRead, ...] = ()
        """Hooks that read tensors on the host, of a few steps that were looked at."""
        self.began = self.since = self.gap_began = self.clock()

    def _rows(self, step_fn: bool) -> dict[str, list[Account]]:
        rows = {name: [self.loop] * len(MARKS) for name in MARKS}
        for before, after, name, counted in BETWEEN:
            if step_fn or name != "step_fn":
                rows[before][MARKS[after]] = self.account(name, counted=counted)
        return rows

    def account(self, name: str, owner: str = "", *, counted: bool = True) -> Account:
        """Return the account of a phase, or of what `owner` does at the moment `name`; always the same one."""
        for account in self.accounts:
            if (account.name, account.owner, account.counted, account.listener) == (name, owner, counted, None):
                return account
        account = Account(name, owner, counted=counted)
        self.accounts.append(account)
        return account

    def account_of(self, listener: Timed) -> Account:
        """Return the account of a listener; always the same one."""
        if listener.account is None:
            listener.account = Account(listener.moment.__name__, listener.owner, listener=listener)
            self.accounts.append(listener.account)
        return listener.account

    def read(self) -> int:
        """Credit the current account up to now, and return what the clock says; since `began` it is the sum of all accounts."""
        now = self.clock()
        self.current.ns += now - self.since
        self.since = now
        return now

    @contextmanager
    def during(self, name: str, owner: str = "") -> Iterator[None]:
        """Credit what is done inside, but for moments, to the account of a phase or of what `owner` does at `name`."""
        account, outer = self.account(name, owner), self.current
        self.read()
        self.current, begin = account, self.since
        account.calls += 1
        try:
            yield
        finally:
            self.read()
            self.current = outer
            if self.tracing:
                self.note("callback" if owner else "phase", account.title, begin, self.since)

    def note(self, kind: str, name: str, begin: int, end: int) -> None:
        """Keep a span of time for the trace; not more than `MOST_SPANS`."""
        if len(self.spans) < MOST_SPANS:
            self.spans.append((kind, name, begin, end))

    # -- for the function that fires a moment ------------------------------------------------------

    def returned(self, account: Account, called: int) -> int:
        """Credit a call of a listener that began at `called`; return what the clock says."""
        now = self.clock()
        account.ns += now - self.since
        account.calls += 1
        self.since = now
        if self.tracing:
            self.note("callback", account.title, called, now)
        return now

    def end_phase(self, name: str, now: int) -> None:
        """Credit the time since the last moment to the phase that ends at the moment `name`."""
        phase, gap = self.row[MARKS[name]], self.gap
        phase.ns += gap.ns + now - self.since
        phase.calls += 1
        gap.ns = 0
        if self.tracing and phase is not self.loop:
            self.note("phase", phase.name, self.gap_began, now)

    def open(self, kind: str, evaluation: object, outer: Account) -> None:
        """Begin the time of an evaluation, which interrupts that of `outer`."""
        account = self.account(f"{kind} {getattr(evaluation, 'name', '')}")
        account.calls += 1
        self.opened.append((evaluation, outer, account, self.since))
        self.current = account

    def close(self, evaluation: object, outer: Account) -> Account:
        """End the time of an evaluation; return the account that it interrupted."""
        while self.opened:  # more than one if an error kept an inner one from ending
            opened, interrupted, account, begin = self.opened.pop()
            if self.tracing:
                self.note("phase", account.name, begin, self.since)
            if opened is evaluation:
                return interrupted
        return outer

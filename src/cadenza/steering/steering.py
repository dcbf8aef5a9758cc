"""The callback that lets people and programs act on a run while it goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.engine.session import session_of
from cadenza.errors import DirectoryError
from cadenza.hooks.dispatch import Closer, hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Every
from cadenza.status.decisions import decide
from cadenza.steering.acts import FIELDS, VERBS, Act, check_content, log_of
from cadenza.steering.inbox import Inbox
from cadenza.steering.verbs import Changes, RefusedError, carry_out

if TYPE_CHECKING:
    from cadenza.engine.session import Session
    from cadenza.run import Run

LOOK_S = 0.1
"""How often a thread looks for acts, in seconds."""
_ASK_S = 1.0  # after this time a request for the next boundary is repeated
_MOST_REFUSED = 20  # files that are no acts, of which decisions are recorded


class Steering(Callback):
    """Take acts on the run from its directory: ``cadenza tell RUN stop``, ``pause``, ``set lr=1e-4`` and so on.

    An act is carried out at the next step boundary and recorded as a decision ``steered``, or ``not steered`` with the reason.
    A thread looks for acts ten times a second, so a step without an act costs nothing. Each act is logged with its step before
    it has an effect. If the process is killed then, the process that continues the run carries the act out at the same step,
    so the continued run equals one that was not killed.

    With multiple ranks: communicates. The main process looks for acts, all ranks agree on them five times a second, and carry
    them out at the same step.

    Args:
        acts: The directory of a run: repeat the acts that it took, each at its step. With the same arguments and seed, the run
            gets the same weights to the bit. ``pause`` and ``resume`` are left out, because they change no weights.
        attach: Whether ``attach module:Callback`` is allowed: it runs code that the author of the act names. It works in one
            process only.

    Raises:
        DirectoryError: `acts` is not the directory of a run that took acts; or the folder of the acts in the directory of this
            run belongs to another user.

    >>> import tempfile
    >>> from cadenza import Callback, on
    >>> from cadenza.steering import tell
    >>> from cadenza.testing import tiny_run
    >>> directory = tempfile.mkdtemp()
    >>> ask = on(Callback.on_step_end, at=3)(lambda run: tell(directory, "set", {"lr": 0.01}, author="ann", wait_s=0) and None)
    >>> run = tiny_run(epochs=100, directory=directory, callbacks=[ask, Steering()])
    >>> run.optimizers[0].param_groups[0]["lr"], run.why("steered").partition(": ")[2]
    (0.01, 'set lr=0.01 by ann: lr 0.1 -> 0.01 in 1 parameter group')
    """

    decides: tuple[str, ...] = ("steered", "stopped", "paused")

    def __init__(self, *, acts: str | os.PathLike[str] | None = None, attach: bool = False) -> None:
        self.acts: Path | None = None if acts is None else Path(acts)
        self.attach: bool = attach
        self._given = [] if acts is None else _taken_by(Path(acts))
        self._forget()

    def _forget(self) -> None:
        self._changes, self._applied = Changes(), list[str]()
        self._repeats: list[tuple[tuple[int, int], Act]] = []
        self._inbox: Inbox | None = None
        self._thread: threading.Thread | None = None
        self._ended: threading.Event | None = None
        self._asked_at = float("-inf")
        self._paused = False
        self._reported = 0
        self._warned = False

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), Listener(Callback.on_step_end, self._meet, Every(f"{2 * LOOK_S} s"), silent=True)]

    def on_setup(self, run: Run) -> None:
        self._forget()
        session = session_of(run)
        if run.driver.world_size == 1:
            hooks_of(run).remove(Callback.on_step_end, self._meet)
        state = session.restored.callback_states.get(hooks_of(run).name_of(self))
        if state:
            self.load_state_dict(state)
            self._changes.make(session)

    def on_fit_start(self, run: Run) -> None:
        session, main = session_of(run), run.is_main
        if run.info.directory is None:
            if main:
                run.warn("Steering takes no acts: the run has no directory. Give Trainer(directory=...)")
        elif main:
            self._open(run.info.directory, run.info.id)
        own = [] if self._inbox is None or run.info.directory is None else _in_log(run.info.directory, run.info.id)
        rows = run.driver.broadcast([*self._given, *own])
        self._repeats = _ordered(rows, {*self._applied})
        if self._paused:
            decide(run, "paused", "as it was when its last process ended", who="Steering")
        self._repeat(session)
        if self._inbox is not None and run.driver.world_size == 1:
            self._ended = threading.Event()
            given = session, self._inbox, self._ended, hooks_of(run).here().listener
            self._thread = threading.Thread(target=self._look, args=given, name="cadenza steering", daemon=True)
            self._thread.start()

    def on_fit_end(self, run: Run) -> None:
        if self._thread is not None and self._ended is not None:
            self._ended.set()
            self._thread.join()
        self._thread = self._ended = None  # they cannot be copied
        inbox, self._inbox = self._inbox, None
        if inbox is None:
            return
        if run.outcome is not None and run.outcome.kind in ("finished", "stopped"):
            for act in inbox.take(_counters(run)):
                self._refuse(run, inbox, act, f"the run is over: {run.outcome.kind}, {run.outcome.reason}", over=True)
        inbox.close()

    def state_dict(self) -> dict[str, Any]:
        return {"applied": [*self._applied], "paused": self._paused, **self._changes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._applied, self._paused = [*state["applied"]], bool(state["paused"])
        self._changes.load_state_dict(state)

    # -- acts that come ----------------------------------------------------------------------------

    def _open(self, directory: Path, run: str) -> None:
        try:
            self._inbox = Inbox(directory, run)
        except OSError as error:
            raise DirectoryError(f"Steering cannot take acts in {str(directory)!r}: {error}") from error

    def _look(self, session: Session, inbox: Inbox, ended: threading.Event, listener: Listener | None) -> None:
        """Ask for the next step boundary while acts wait. Runs in a thread of its own, in a run of one process."""
        while not ended.wait(LOOK_S):
            if not inbox.is_empty() and time.monotonic() - self._asked_at > _ASK_S:
                self._asked_at = time.monotonic()
                session.acts.next.append(Closer(listener, partial(self._take, session)))

    def _take(self, session: Session) -> None:
        """Carry out the acts that wait, in a run of one process."""
        self._asked_at = float("-inf")
        self._carry_out(session, self._arrived(session))

    def _meet(self, run: Run) -> None:
        """Agree on the acts that wait: all ranks call this at the same step."""
        session = session_of(run)
        acts = run.driver.broadcast(self._arrived(session) if run.is_main else None)
        if acts:
            run.after_step(partial(self._carry_out, session, acts))

    def _arrived(self, session: Session) -> list[Act]:
        inbox = self._inbox
        if inbox is None or session.outcome is not None:
            return []
        acts = inbox.take(_counters(session.run))
        for name, why in inbox.refused[self._reported : _MOST_REFUSED]:
            decide(session.run, "not steered", f"{name} is not an act of this run: {why}", who="Steering")
        self._reported = len(inbox.refused)
        self._warn(session.run, inbox)
        return acts

    def _warn(self, run: Run, inbox: Inbox) -> None:
        if inbox.problem and not self._warned:
            self._warned = True
            run.warn(f"Steering cannot write its log: {inbox.problem}. Acts wait until it can be written")

    def _carry_out(self, session: Session, acts: list[Act]) -> None:
        """Carry out acts at a step boundary. Every rank must call this."""
        for act in acts:
            self._act(session, act)
        if self._paused:
            self._wait(session)
        if session.sync.several and session.sync.requests.leave:
            session.sync.take_requests()

    def _act(self, session: Session, act: Act) -> None:
        run, inbox = session.run, self._inbox
        self._applied.append(act.id)
        if inbox is not None and act.id not in inbox.taken:  # of another run
            inbox.note_taken(act, _counters(run))
        try:
            result = self._pause_or_go_on(run, act) if act.verb in ("pause", "resume") else self._done(session, act)
        except RefusedError as error:
            self._refuse(run, inbox, act, str(error))
            return
        except Exception as error:
            self._refuse(run, inbox, act, repr(error))
            if act.verb in ("evaluate", "save"):  # an error of a hook, which ends the run as it does without an act
                raise
            return
        data = {"act": act.id, "verb": act.verb, "arguments": dict(act.arguments), "author": act.author, "result": result}
        because = f" ({act.reason})" if act.reason else ""
        decide(run, "steered", f"{act} by {act.author}{because}: {result}", who="Steering", data={**data, "reason": act.reason})
        if inbox is not None:
            inbox.note_result(act, _counters(run), result=result)
            self._warn(run, inbox)

    def _done(self, session: Session, act: Act) -> str:
        return carry_out(session, act, self._changes, may_attach=self.attach)

    def _refuse(self, run: Run, inbox: Inbox | None, act: Act, why: str, **more: bool) -> None:
        data = {"act": act.id, "verb": act.verb, "arguments": dict(act.arguments), "author": act.author, "reason": act.reason}
        decide(run, "not steered", f"{act} by {act.author}: {why}", who="Steering", data=data)
        if inbox is not None:
            inbox.note_result(act, _counters(run), refused=why, **more)

    # -- a pause -----------------------------------------------------------------------------------

    def _pause_or_go_on(self, run: Run, act: Act) -> str:
        if self._paused == (act.verb == "pause"):
            raise RefusedError("the run is paused already" if self._paused else "the run is not paused")
        self._paused = not self._paused
        decide(run, "paused" if self._paused else "continued", f"told by {act.author}", who="Steering")
        return "the run waits at this step" if self._paused else "the run goes on"

    def _wait(self, session: Session) -> None:
        """Wait until an act resumes the run, or a request or a signal ends it. Every rank must call this."""
        run, requests = session.run, session.sync.requests
        with session.progress.aside(), session.hooks.timed("paused"):
            while self._paused and not run.driver.any_rank(requests.ends_run):
                for act in run.driver.broadcast(self._arrived(session) if run.is_main else None):
                    self._act(session, act)
                time.sleep(LOOK_S)

    # -- acts that are repeated --------------------------------------------------------------------

    def _repeat(self, session: Session) -> None:
        """Carry out the acts that were taken at this boundary, and wait for the others. Every rank must call this."""
        progress = session.progress
        while self._repeats and self._repeats[0][0] <= (progress.step, progress.epoch):
            self._act(session, self._repeats.pop(0)[1])
        if self._paused:
            self._wait(session)
        if session.sync.several and session.sync.requests.leave and session.outcome is None:
            session.sync.take_requests()
        if self._repeats:
            session.acts.after_next_step(partial(self._repeat, session))


def add_steering(callbacks: list[Any]) -> None:
    """Add `Steering` to the callbacks of a trainer that has none: for ``CADENZA_STEERING=1``."""
    if not any(isinstance(callback, Steering) for callback in callbacks):
        callbacks.append(Steering())


def _counters(run: Run) -> dict[str, int]:
    return {"step": run.progress.step, "epoch": run.progress.epoch}


Taken = tuple[tuple[int, int], Act]
"""An act, and the steps and epochs that were complete when it was taken."""


def _in_log(directory: Path, run: str = "") -> list[Taken]:
    """Return the acts in the log of a run, in order, without those that came when it was over, and those of another run."""
    rows = [*log_of(str(directory))]
    over = {row["id"] for row in rows if row.get("over") is True}
    found = [row for row in rows if _is_taken(row) and row["id"] not in over and run in ("", row["run"])]
    return [((row["step"], row["epoch"]), Act(*(row[name] for name in FIELDS))) for row in found]


def _is_taken(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the log is that of an act that was taken. Who damaged or changed the log ends no run."""
    texts = (row.get(name) for name in ("run", "verb", "author", "reason"))
    counters = (row.get(name) for name in ("step", "epoch"))
    right = all(isinstance(text, str) for text in texts) and all(type(counter) is int for counter in counters)
    try:
        check_content(row)
    except ValueError:
        return False
    return right and row["verb"] in VERBS and isinstance(row.get("arguments"), dict) and "time" in row


def _taken_by(directory: Path) -> list[Taken]:
    """Return the acts that another run took, without its pauses.

    Raises:
        DirectoryError: The run has no log of acts.
    """
    found = _in_log(directory)
    if not found:
        raise DirectoryError(f"{str(directory)!r} holds no acts: expected a steering/log.jsonl in the directory of a run.")
    return [(at, act) for at, act in found if act.verb not in ("pause", "resume")]


def _ordered(rows: list[Taken], applied: set[str]) -> list[Taken]:
    """Return the acts that are not applied yet, each once, in the order of their steps."""
    first: dict[str, Taken] = {}
    for at, act in rows:
        if act.id not in applied:
            first.setdefault(act.id, (at, act))
    return sorted(first.values(), key=lambda taken: taken[0])

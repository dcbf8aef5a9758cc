"""The evaluations that are due at a step boundary. They run right after the moment at which they became due.

No moment is open then. A signal interrupts an evaluation before its next batch. The run is saved with the names of the
evaluations that are still due, and these run first after the resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.errors import notes_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.loading.batches import moved
from cadenza.status.decisions import Outcome
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks
    from cadenza.run import Run
    from cadenza.status.decisions import Requests

Evaluating = Callable[["Run"], object]
Session = Any  # that of cadenza.engine.session, which holds a `DueEvaluations`


class EvaluationInterrupted(BaseException):  # not an error: it unwinds an evaluation
    """Raised before the next batch of an evaluation when a signal ends the run. `DueEvaluations.run` catches it."""

    def __init__(self, evaluation: str, batches: int) -> None:
        super().__init__(f"{evaluation!r} was left after {counted(batches, 'batch')}")
        self.data: dict[str, Any] = {"evaluation": evaluation, "batches": batches}


class Deferred:
    """The function of a listener that evaluates: it adds the evaluation to those that are due at the boundary.

    In a run with callbacks of other libraries it evaluates immediately: they read the results in the same moment.

    Args:
        evaluate: Evaluates the model, and logs the results.
    """

    def __init__(self, evaluate: Evaluating) -> None:
        self.evaluate: Evaluating = evaluate

    def __call__(self, run: Run) -> None:
        session: Session = run._session
        listener = session.hooks.here().listener
        if session.adapters or listener is None:
            self.evaluate(run)
        else:
            session.due.add(listener, self.evaluate)


def deferred_in(hooks: Hooks) -> dict[str, list[Listener]]:
    """Return the listeners that evaluate, by the name of their callback."""
    found: dict[str, list[Listener]] = {}
    for listeners in hooks.by_moment.values():
        for one in listeners:
            if isinstance(one.function, Deferred):
                found.setdefault(one.owner, []).append(one)
    return found


class DueEvaluations:
    """The evaluations that are due at the present boundary, in the order of the list."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        """The evaluations still due after a signal, for the checkpoint or from it, with what their record holds so far."""
        self._waiting: list[Listener] = []
        self._interruptible = False

    def add(self, listener: Listener, evaluate: Evaluating) -> None:
        """Run an evaluation after the present moment, as the work of `listener`."""
        evaluating = Listener(listener.moment, evaluate)
        evaluating.begin(listener.owner)
        self._waiting.append(evaluating)

    def interrupts(self, requests: Requests) -> Requests | None:
        """Return the requests in which a signal interrupts the running evaluation; None if none does."""
        return requests if self._interruptible and requests.from_signals else None

    def run_first(self, session: Session) -> None:
        """Run the sanity checks of the start, unless the run is to end before. Every rank must call this."""
        if self._waiting and session.sync.over():
            self._waiting = []
        self.run(session)

    def run(self, session: Session) -> bool:
        """Run the due evaluations, in order; return False if a signal leaves some of them to the resume.

        Every rank must call this.
        """
        return not self._waiting or self._run_each(session)

    def _run_each(self, session: Session) -> bool:
        outcome = session.outcome
        while self._waiting:
            listener = self._waiting[0]
            if outcome is not None and outcome.kind in ("preempted", "interrupted"):  # and saved at an earlier boundary
                self._keep(session)
                return False
            self._interruptible = outcome is None  # else no resume would repeat it
            try:
                with session.hooks.timed("evaluate", listener.owner):
                    session.hooks.call([listener], session.run)
            except EvaluationInterrupted as interrupted:
                self._interrupt(session, listener, interrupted)
                return False
            finally:
                self._interruptible = False
            del self._waiting[0]
        return True

    def take_up(self, session: Session, settle: Callable[[], None]) -> None:
        """After a resume, run the evaluations that were still due: `settle` does so, then the rest of their boundary."""
        saved, self.state = self.state, None
        if saved is None:
            return
        held = moved({name: saved[name] for name in ("losses", "weights")}, session.device)
        session.step.last_window.losses, session.step.last_window.weights = held["losses"], held["weights"]
        session.metrics.buffer.put_numbers(saved["numbers"])
        session.cursor.leave_boundary()
        known = deferred_in(session.hooks)
        for name in saved["names"]:
            if name in known:
                listener: Any = known[name][0]
                self.add(listener, listener.function.evaluate)
            else:
                session.warn(
                    f"{name} was evaluating when the run was interrupted, but is no longer in callbacks. Its evaluation is not "
                    "repeated"
                )
        settle()

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Take the state of a checkpoint, for `take_up`."""
        self.state = None if saved is None else dict(saved)

    def _interrupt(self, session: Session, listener: Listener, interrupted: EvaluationInterrupted) -> None:
        session.decide("evaluation left", f"{interrupted}; it is repeated when the run continues", data=interrupted.data)
        for note in notes_of(interrupted):
            if note.startswith("then "):
                session.warn(note)
        if listener.moment is not Callback.on_fit_start:
            self.state = None
            self._keep(session)
            return
        session.sync.take_requests()  # nothing is trained yet, so nothing is saved
        stop = session.sync.take_stop()
        session.end(Outcome(session.sync.requests.kind, "" if stop is None else stop.why))

    def _keep(self, session: Session) -> None:
        """Leave the evaluations to the resume, with the numbers of their record and the loss of their step."""
        names, window = [listener.owner for listener in self._waiting], session.step.last_window
        self._waiting = []
        if self.state is None:
            numbers = session.metrics.buffer.take_numbers()
            state = {"names": names, "numbers": numbers, "losses": list(window.losses), "weights": list(window.weights)}
            self.state = moved(pytree.tree_map_only(Tensor, Tensor.detach, state), torch.device("cpu"))

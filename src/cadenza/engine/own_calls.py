"""Mistakes in a ``step_fn`` or in a loop of the user's own: calls of torch beside the run, and gradients that mix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple
from weakref import proxy

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cadenza.drivers.sharding import local
from cadenza.engine.session import Session
from cadenza.errors import LossError
from cadenza.optim.optimizers import needs_closure
from cadenza.optim.parameters import distinct_gradients, parameters_of
from cadenza.optim.stepping import StepGuard
from cadenza.status.decisions import COMPLETE
from cadenza.status.formats import counted

_STEPS = 100  # replay buffers fill, and critics train, before the first update


class Added(NamedTuple):
    """When backward passes of the run have added to the present gradient of a parameter."""

    updates: int
    """The updates of the run before the first of them."""
    version: int
    """The version of the gradient after the last of them."""
    between: Sequence[Optimizer] = ()
    """The optimizers that were updated between two of them."""


class OwnCalls:
    """Compares the calls of the user's code with those of its run.

    It raises an error for ``optimizer.step()`` and ``loss.backward()`` instead of the verbs of the run, and for gradients that
    are dropped before their update. It warns once of a run without updates, and of an update with gradients from before and
    after the update of another optimizer.

    Hooks of the optimizers and of the gradients call it, so it costs a run with ``compute_loss`` nothing.

    Args:
        session: The session of the run.
        name: ``run``, ``step`` or ``loop``, the variable with the verbs of the run.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session: Session = proxy(session)
        self._name = name
        self._update = "step.update(), or the end of the step," if name == "step" else f"{name}.update()"
        self.outside: bool = False
        """Whether an optimizer has stepped between two steps of the run, since this was set to False."""
        self._mixes = name != "step" and len(session.optimizers) > 1  # whether gradients of two updates may still be mixed
        self._reached: set[Tensor] = set()  # by backward passes since this was last looked at
        self._raw: set[Tensor] = set()  # that have gradients of loss.backward()
        self._added: dict[Tensor, Added] = {}
        self._last: Sequence[Optimizer] = ()  # that were updated
        self._handles: list[StepGuard | RemovableHandle] = []
        self._first_step = self._first_epoch = 0

    def begin(self, ending: ExitStack) -> None:
        """Look at the calls of the user's code until `ending`."""
        session, progress = self._session, self._session.progress
        self._first_step, self._first_epoch = progress.step, progress.epoch + (progress.batch_in_epoch > 0)
        self._handles = [StepGuard(one, self._check_step) for one in session.optimizers]
        for parameter in dict.fromkeys(parameters_of(session.optimizers)):
            if parameter.is_floating_point() or parameter.is_complex():
                trained = parameter.requires_grad  # it may be frozen now, and trained later
                hook = parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._reached.add)
                self._handles.append(hook)
                parameter.requires_grad_(trained)
        ending.callback(self._end)
        session.after_next_step(self._look_for_updates)

    def _end(self) -> None:
        for one in self._handles:
            one.remove()
        self._reached.clear()

    # -- backward passes and updates of the run ----------------------------------------------------

    def before_backward(self) -> None:
        """Note which gradients come from ``loss.backward()``, and which were dropped. A closure may call it in an update."""
        if self._session.step.in_update:
            return
        self._note_raw()
        if self._added:
            now = self._session.step.updates
            left = (pair for pair in self._added.items() if pair[1].updates == now or _is_there(pair[0].grad, pair[1].version))
            self._added = dict(left)

    def after_backward(self) -> None:
        """Note the parameters that the backward pass has reached."""
        if not self._session.step.in_update:
            self._note_added(self._session.step.updates)

    def before_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise an error if the update takes gradients of ``loss.backward()``. Warn if it takes those of two updates."""
        self._note_raw()
        if self._raw and not self._raw.isdisjoint(parameters_of(optimizers)):
            raise LossError(
                f"the update of step {self._step} would take gradients of loss.backward(), which skips the callbacks and the "
                f"precision of the run. Call {self._name}.backward(loss) instead of loss.backward()."
            )
        for parameter in parameters_of(optimizers) if self._added else ():
            added = self._added.get(parameter)
            if added is not None and added.between and _is_there(parameter.grad, added.version):
                self._warn_of_mixed(optimizers, added.between)
                break

    def after_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the update, and the gradients that its closure has added to other parameters."""
        self._last = optimizers
        self._note_added(self._session.step.updates - 1)

    def _note_raw(self) -> None:
        if self._reached:
            self._raw |= self._reached
            self._reached.clear()
        if self._raw:
            self._raw = {one for one in self._raw if one.grad is not None and not _is_zero(one.grad)}

    def _note_added(self, updates: int) -> None:
        """Note the parameters that were reached after so many updates."""
        for parameter in self._reached if self._mixes else ():
            if parameter.grad is not None:
                first, _, between = self._added.get(parameter, (updates, 0, ()))
                version = local(parameter.grad)._version
                self._added[parameter] = Added(first, version, between or (self._last if first < updates else ()))
        self._reached.clear()

    def _warn_of_mixed(self, optimizers: Sequence[Optimizer], between: Sequence[Optimizer]) -> None:
        self._mixes, self._added = False, {}
        self._session.warn(
            f"the update of {self._named(optimizers)} in step {self._step} takes the sum of gradients from before and after "
            f"the update of {self._named(between)}. If you do not add them on purpose, call {self._name}.backward(loss, "
            "into=optimizer), which adds gradients for this optimizer alone, or optimizer.zero_grad() before the backward pass"
        )

    def _named(self, optimizers: Iterable[Optimizer]) -> str:
        known = [*self._session.optimizers]
        return " and ".join(f"run.optimizers[{known.index(one)}] ({type(one).__name__})" for one in optimizers)

    # -- lines that are left in a loop, or missing --------------------------------------------------

    def check_gradients(self, before: str) -> None:
        """Raise an error if there are no gradients any more. To be called after a backward pass.

        Args:
            before: The call of the run that needs them.
        """
        step = self._session.step
        if not step.updates and not step.window.weights and not self._has_gradients():
            raise LossError(
                f"the gradients of step {self._step} were dropped before {before}, so they would never be "
                f"used. Remove optimizer.zero_grad() from the loop: {self._update} drops the gradients."
            )

    def _has_gradients(self) -> bool:
        parameters = chain(parameters_of(self._session.optimizers), self._session.module.parameters())
        return any(one.grad is not None for one in parameters)

    def check_first_update(self) -> None:
        """Warn if there are no gradients in the first update of the run."""
        session = self._session
        if not session.step.updates and not session.driver.reduces and not distinct_gradients(session.optimizers):
            session.warn(
                f"{self._name}.update(...) in step {self._step} found no gradients, so the weights do not change. Call "
                f"{self._name}.backward(loss) before"
            )

    def _check_step(self, optimizer: Optimizer) -> None:
        session = self._session
        self.outside |= session.cursor.at_boundary
        if session.step.in_update or session.cursor.at_boundary:  # at a boundary a driver may step, to make the state
            return
        update = f"{self._name}.update(optimizer, closure)" if needs_closure(optimizer) else self._update
        session.step.raised = LossError(
            f"optimizer.step() was called in step {self._step}, beside the update of the run. Remove it from "
            f"{'step_fn' if self._name == 'run' else 'the loop'}: {update} updates the weights."
        )
        raise session.step.raised

    def _look_for_updates(self) -> None:
        """Warn, once, if the first steps, the first whole epoch or the whole run had no update. Called between steps."""
        session, progress = self._session, self._session.progress
        steps, outcome = progress.step - self._first_step, session.outcome
        if session.step.updates or (outcome is not None and outcome.kind not in COMPLETE):
            return
        if steps and (steps >= _STEPS or progress.epoch > self._first_epoch or outcome is not None):
            update = "" if self._name == "step" else f" and {self._update}"
            session.warn(
                f"the first {counted(steps, 'step')} of this run had no update, so the weights did not change. Call "
                f"{self._name}.backward(loss){update} in each step that trains"
            )
        else:
            session.after_next_step(self._look_for_updates)

    @property
    def _step(self) -> int:
        return self._session.progress.step + 1


def _is_there(gradient: Tensor | None, version: int) -> bool:
    """Return whether a gradient was not dropped: neither removed, nor set to zeros since it had this version."""
    return gradient is not None and (local(gradient)._version == version or not _is_zero(gradient))


def _is_zero(gradient: Tensor) -> bool:
    return not gradient.is_sparse and not bool(local(gradient).any())

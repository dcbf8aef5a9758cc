"""What `Run.backward` and `Run.update` do: in a ``step_fn``, over ``trainer.steps()``, and in a loop of ``attach``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.engine import updating
from cadenza.engine.own_calls import OwnCalls
from cadenza.engine.session import Loops, Session
from cadenza.engine.start_checks import check_computes_batch
from cadenza.errors import LossError
from cadenza.optim.optimizers import needs_closure
from cadenza.optim.parameters import parameters_of
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs, scalar
from cadenza.status.shown import brief

Into = Optimizer | Sequence[Optimizer] | None

_ONE_UPDATE = "an update is one of all optimizers. For updates of some of them, use cadenza.attach(...) or step_fn=."


class Verbs:
    """Backward passes and updates of a ``step_fn``, which accumulates itself: each call takes effect at once."""

    name: str = "run"
    """The variable with the verbs."""

    def __init__(self, session: Session) -> None:
        self.session: Session = proxy(session)  # which holds this
        self.own_calls: OwnCalls = OwnCalls(session, self.name)

    def begin(self, ending: ExitStack) -> None:
        """Look at what a ``step_fn`` or a loop of the user's own calls, until `ending`."""
        if self.session.advises and (self.session.loop is not Loops.FIT or self.session.step_fn is not None):
            self.own_calls.begin(ending)

    def backward(self, loss: Any, into: Into = None) -> None:
        """See `Run.backward`."""
        self._add_gradients(Outputs(loss=scalar(loss)), into)

    def _add_gradients(self, outputs: Outputs, into: Into) -> None:
        optimizers = [into] if isinstance(into, Optimizer) else into
        self._check_known(optimizers or ())
        self.own_calls.before_backward()
        alone = nullcontext() if optimizers is None else _adding_to(self.session, optimizers)
        with self.session.precision.disabled(), alone:
            updating.backward(self.session, outputs)
        self.own_calls.after_backward()

    def update(self, arguments: Sequence[Any]) -> Any:
        """See `Run.update`."""
        session, optimizers, closure = self.session, arguments, None
        if arguments and callable(arguments[-1]) and not isinstance(arguments[-1], Optimizer):
            *optimizers, closure = arguments
        self._check_known(optimizers)
        optimizers = optimizers or session.optimizers
        self._check_closure(optimizers, closure)
        if closure is None and not session.step.skipping:
            self.own_calls.check_first_update()
        self.own_calls.before_update(optimizers)
        if session.driver.reduces:  # the user's own module is called: with DDP its backward pass reduces nothing
            held = {id(parameter) for parameter in parameters_of(optimizers)}
            session.driver.average_gradients([one for one in session.module.parameters() if id(one) in held])
        losses: list[Any] = []
        with session.precision.disabled():
            updating.update(session, optimizers, closure and partial(self._step_with, closure, losses))
        self.own_calls.after_update(optimizers)
        return losses[0] if losses else None

    def _step_with(self, closure: Callable[[], Any], losses: list[Any], optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Let an optimizer step with a closure of which loss and gradients are means over the ranks."""
        driver, precision = self.session.driver, self.session.precision
        parameters = [*dict.fromkeys(parameters_of(optimizers))]

        def averaged() -> Any:
            torch.clear_autocast_cache()  # it holds the weights of the call before
            with precision.autocast():
                loss = closure()
            loss = loss.detach() if isinstance(loss, Tensor) else loss
            if driver.reduces:
                driver.average_gradients(parameters)
                loss = driver.reduce(torch.as_tensor(loss))
            return loss

        losses.append(optimizers[0].step(averaged))
        torch.clear_autocast_cache()
        return ()

    def _check_known(self, optimizers: Sequence[Any]) -> None:
        session = self.session
        for one in optimizers:
            if not any(one is known for known in session.optimizers):
                raise ValueError(
                    f"expected optimizers of the run; got {brief(one)}, which no checkpoint would hold. Give all optimizers to "
                    f"Trainer(...) or attach(...); pass several as {self.name}.update(first, second)."
                )

    def _check_closure(self, optimizers: Sequence[Optimizer], closure: Callable[[], Any] | None) -> None:
        call = f"{self.name}.update(optimizer, closure)"
        if closure is None:
            for one in filter(needs_closure, optimizers):
                raise ValueError(f"{type(one).__name__}.step needs a closure, and none came. Call {call}.")
        elif len(optimizers) != 1:
            raise ValueError(f"a closure is for one optimizer; got {counted(len(optimizers), 'optimizer')}. Call {call}.")
        elif self.session.precision.name == "fp16":
            raise ValueError("precision='fp16' supports no closure. Use bf16 or fp32.")

    def check_window(self) -> None:
        """Report mistakes of a loop of the user's own after the batches of a step: no gradients, or those of a raw call."""


class StepVerbs(Verbs):
    """One backward pass for each batch of an accumulation window, and one update at its end."""

    name = "step"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._done = -1  # the batch that had its backward pass, counted in the run
        self._has_warned_of_skipped = False

    def backward(self, loss: Any, into: Into = None) -> None:
        if into is not None:
            raise ValueError(f"in a loop over trainer.steps(), {_ONE_UPDATE}")
        session, step = self.session, self.session.step
        if step.counted:
            raise LossError(
                "step.backward(loss) must be called inside of `for batch in step:`, before the next batch is taken and before "
                "step.update()."
            )
        if self._done == session.progress.batch:
            raise LossError(
                "step.backward(...) was called twice for one batch. Add the losses and call it once. For a step with several "
                "losses or optimizers, use cadenza.attach(...) or step_fn=."
            )
        if self._done < 0:
            check_computes_batch(session, step.batch)
        if step.window.losses:
            self.own_calls.check_gradients("the next batch")
        self._done = session.progress.batch
        step.outputs.take(loss, "step.backward(...) expects")
        if step.skipping:
            return
        self.own_calls.before_backward()
        with session.precision.disabled():
            updating.backward(session, step.outputs, step.window)
        self.own_calls.after_backward()

    def update(self, arguments: Sequence[Any]) -> None:
        if arguments and [*arguments] != [*self.session.optimizers]:
            raise ValueError(f"in a loop over trainer.steps(), {_ONE_UPDATE}")
        with self.session.precision.disabled():
            updating.finish_window(self.session)

    def check_window(self) -> None:
        self.own_calls.before_update(self.session.optimizers)
        if self.session.step.window.losses:
            self.own_calls.check_gradients("the update")

    def warn_of_skipped(self, batches: int) -> None:
        """Warn, once, that an update skipped batches."""
        if not self._has_warned_of_skipped:
            self._has_warned_of_skipped = True
            self.session.warn(
                f"step.update() skipped {counted(batches, 'batch')} of step {self.session.progress.step + 1}, which the loop "
                "had not taken. Call it after `for batch in step:`, or not at all: the update is done at the end of the step"
            )


class LoopVerbs(Verbs):
    """The verbs of a loop of ``attach``: each call takes effect at once."""

    name = "loop"

    def backward(self, loss: Any, into: Into = None) -> None:
        step = self.session.step
        if step.skipping:
            return
        step.outputs.take(loss, "loop.backward(...) expects")
        self._add_gradients(step.outputs, into)
        step.window.losses.append(scalar(step.outputs["loss"].detach()))

    def update(self, arguments: Sequence[Any]) -> Any:
        step = self.session.step
        if step.skipping:
            return None
        if step.window.losses:
            self.own_calls.check_gradients("loop.update(...)")
        return super().update(arguments)

    def check_between(self) -> None:
        """Raise an error if the loop has updated weights since the last ``over()``, and has done no step."""
        if self.own_calls.outside:
            raise LossError(
                "optimizer.step() was called between two calls of loop.over(), outside of a step, so the run would never end. "
                "Surround each update with `with loop.step():`, and call loop.backward(loss) and loop.update() in it."
            )


OF_LOOP: dict[Loops, type[Verbs]] = {Loops.FIT: Verbs, Loops.STEPS: StepVerbs, Loops.ATTACHED: LoopVerbs}
"""The verbs of a run, by the loop that does its steps."""


@contextmanager
def _adding_to(session: Session, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let a backward pass add gradients to the parameters of these optimizers alone."""
    inside = {id(one): one for one in parameters_of(optimizers) if one.requires_grad}
    if not inside:
        raise LossError("into= expects an optimizer with parameters that require a gradient; got none of them.")
    if not session.driver.shards:
        session.precision.backward_pass.inputs = tuple(inside.values())
        try:
            yield
        finally:
            session.precision.backward_pass.inputs = ()
        return
    # With FSDP, a backward pass ends at the gathered weights, and shards their gradients: those of the others are restored.
    others = [one for one in chain(session.module.parameters(), parameters_of(session.optimizers)) if id(one) not in inside]
    held = [(one, one.grad) for one in dict.fromkeys(others)]
    for one, _ in held:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in held:
            one.grad = gradient

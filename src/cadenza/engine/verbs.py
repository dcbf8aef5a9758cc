"""What `Run.backward` and `Run.update` do: in a ``step_fn``, over ``trainer.steps()``, and in a loop of ``attach``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cadenza.drivers.sharding import local
from cadenza.engine import weight_update
from cadenza.engine.session import Loops, Session
from cadenza.engine.start_checks import check_computes_batch, warn_of_new_doubts
from cadenza.errors import LossError
from cadenza.optim.fast_step import StepGuard
from cadenza.optim.optimizers import needs_closure
from cadenza.optim.parameters import distinct_gradients, parameters_of
from cadenza.status.decisions import COMPLETE
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs, scalar
from cadenza.status.reprs import brief

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
        """Look at the first updates; and at what a ``step_fn`` or the user's loop calls, until `ending`."""
        if self.session.advises:
            self.own_calls.begin(ending)

    def backward(self, loss: Any, into: Into = None) -> None:
        """See `Run.backward`."""
        self._add_gradients(Outputs(loss=scalar(loss)), into)

    def _add_gradients(self, outputs: Outputs, into: Into) -> None:
        optimizers = into if into is None or isinstance(into, Sequence) else [into]
        self._check_known(optimizers or ())
        self.own_calls.before_backward()
        alone = nullcontext() if optimizers is None else _adding_to(self.session, optimizers)
        with self.session.precision.disabled(), alone:
            weight_update.backward(self.session, outputs)
        self.own_calls.after_backward()

    def update(self, arguments: Sequence[Any]) -> Any:
        """See `Run.update`."""
        session, optimizers, closure = self.session, arguments, None
        if arguments and callable(arguments[-1]) and not isinstance(arguments[-1], Optimizer):
            *optimizers, closure = arguments
        self._check_known(optimizers)
        optimizers = optimizers or session.optimizers
        self._check_closure(optimizers, closure)
        self.own_calls.before_update(optimizers)
        if session.driver.reduces:  # the user's own module is called: with DDP its backward pass reduces nothing
            held = {id(parameter) for parameter in parameters_of(optimizers)}
            session.driver.average_gradients([parameter for parameter in session.module.parameters() if id(parameter) in held])
        losses: list[Any] = []
        with session.precision.disabled():
            weight_update.update(session, optimizers, closure and partial(self._step_with, closure, losses))
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
        for optimizer in optimizers:
            if not any(optimizer is known for known in session.optimizers):
                if isinstance(optimizer, nn.Module):
                    raise TypeError(
                        f"expected an optimizer of the run; got {brief(optimizer)}. Give the one of its parameters."
                    )
                if isinstance(optimizer, int):
                    index = f"run.optimizers[{optimizer}]"
                    raise ValueError(f"expected an optimizer of the run; got {optimizer}. Write {self.name}.update({index}).")
                raise ValueError(
                    f"expected optimizers of the run; got {brief(optimizer)}, which no checkpoint would hold. Give all "
                    f"optimizers to Trainer(...) or attach(...); pass several as {self.name}.update(first, second)."
                )

    def _check_closure(self, optimizers: Sequence[Optimizer], closure: Callable[[], Any] | None) -> None:
        call = f"{self.name}.update(optimizer, closure)"
        if closure is None:
            for optimizer in filter(needs_closure, optimizers):
                raise ValueError(f"{type(optimizer).__name__}.step needs a closure, and none came. Call {call}.")
        elif len(optimizers) != 1:
            raise ValueError(f"a closure is for one optimizer; got {counted(len(optimizers), 'optimizer')}. Call {call}.")
        elif self.session.precision.name == "fp16":
            raise ValueError("precision='fp16' supports no closure. Use bf16 or fp32.")

    def check_window(self) -> None:
        """Report mistakes after the batches of a step, before its update: no gradients, or those of a raw call."""
        self.own_calls.look_again()


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
        if self._done < 0 or not session.progress.batch_in_epoch:
            check_computes_batch(session, step.batch)
            if session.advises:
                warn_of_new_doubts(session)
        if step.window.losses:
            self.own_calls.check_gradients("the next batch")
        self._done = session.progress.batch
        step.outputs.take(loss, "step.backward(...) expects")
        if step.skipping:
            return
        self.own_calls.before_backward()
        with session.precision.disabled():
            weight_update.backward(session, step.outputs, step.window)
        self.own_calls.after_backward()

    def update(self, arguments: Sequence[Any]) -> None:
        if arguments and [*arguments] != [*self.session.optimizers]:
            raise ValueError(f"in a loop over trainer.steps(), {_ONE_UPDATE}")
        with self.session.precision.disabled():
            weight_update.finish_window(self.session)

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
        step.window.note(scalar(step.outputs["loss"]), dict.get(step.outputs, "weight"))

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
    inside = {id(parameter): parameter for parameter in parameters_of(optimizers) if parameter.requires_grad}
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
    others = [
        parameter
        for parameter in chain(session.module.parameters(), parameters_of(session.optimizers))
        if id(parameter) not in inside
    ]
    held = [(parameter, parameter.grad) for parameter in dict.fromkeys(others)]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


# -- mistakes: calls of torch beside the run, and gradients that mix -------------------------------


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
    are dropped before their update. It warns once of a run without updates, of an optimizer that gets no gradient, and of an
    update with gradients from before and after the update of another optimizer.

    Hooks of the optimizers and of the gradients call it. A run with ``compute_loss`` has them in its first updates alone.

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
        self._waiting: dict[Optimizer, StepGuard] = {}  # the optimizers without a gradient so far
        self._stepped: set[Optimizer] = set()
        self._trained = set[Optimizer]()  # those that have had one since
        self._any_gradient = False  # whether there were gradients, of any value
        self._first_step = self._first_epoch = 0
        self._without_acts = False

    def begin(self, ending: ExitStack) -> None:
        """Look at the calls of the user's code until `ending`."""
        session, progress = self._session, self._session.progress
        plain = session.loop is Loops.FIT and session.step_fn is None
        if plain and progress.step:  # a run that continues has been looked at
            return
        self._without_acts = plain and session.sync.several  # with which ranks would wait for each other
        self._first_step = progress.step
        self._first_epoch = progress.epoch + (progress.batch_in_epoch > 0)
        ending.callback(self._end)
        for optimizer in session.optimizers:
            if getattr(type(optimizer).step, "hooked", False):  # a wrapper of an optimizer calls no hooks
                self._waiting[optimizer] = StepGuard(optimizer, self._note_step, after=True)
        self._look_later()
        if plain:
            return
        self._handles = [StepGuard(optimizer, self._check_step) for optimizer in session.optimizers]
        for parameter in dict.fromkeys(parameters_of(session.optimizers)):
            if parameter.is_floating_point() or parameter.is_complex():
                trained = parameter.requires_grad  # it may be frozen now, and trained later
                hook = parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._reached.add)
                self._handles.append(hook)
                parameter.requires_grad_(trained)

    def _look_later(self) -> None:
        if not self._without_acts:
            self._session.acts.after_next_step(self._look_for_updates)

    def look_again(self) -> None:
        """Look for gradients of the updates so far, on multiple ranks: before the update of a step, and at the end."""
        if self._without_acts and self._waiting and self._session.step.updates:
            self._look_for_updates()

    def _end(self) -> None:
        self.look_again()
        for handle in (*self._handles, *self._waiting.values()):
            handle.remove()
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
            self._raw = {raw for raw in self._raw if raw.grad is not None and not _is_zero(raw.grad)}

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
        return " and ".join(
            f"run.optimizers[{known.index(optimizer)}] ({type(optimizer).__name__})" for optimizer in optimizers
        )

    # -- lines that are left in a loop, or missing --------------------------------------------------

    def check_gradients(self, before: str) -> None:
        """Raise an error if there are no gradients any more. To be called after a backward pass.

        Args:
            before: The call of the run that needs them.
        """
        session = self._session
        every = chain(parameters_of(session.optimizers), session.module.parameters())
        if session.step.updates or session.step.window.weights or any(parameter.grad is not None for parameter in every):
            return
        raise LossError(
            f"there are no gradients in step {self._step} before {before}: optimizer.zero_grad() has dropped them, or the loss "
            "depends on no parameter of the run, such as that of another model. Remove optimizer.zero_grad() from the loop, as "
            f"{self._update} drops the gradients; or compute the loss with the model of the run."
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

    def _note_step(self, optimizer: Optimizer) -> None:
        self._stepped.add(optimizer)
        gradients = distinct_gradients([optimizer])
        if not gradients:
            return
        self._any_gradient = True
        if self._session.driver.shards or not all(map(_is_zero, gradients)):  # a shard may be empty
            self._trained.add(optimizer)

    def _look_for_updates(self) -> None:
        """Warn, once, if an optimizer had no gradient in the first steps, the first whole epoch or the whole run.

        If no optimizer had any, the first update is enough. Called between steps.
        """
        session, progress = self._session, self._session.progress
        compiled = session.precision.backward_pass.updated()
        known = self._trained.union(compiled, session.step.left_out)  # left out, as its gradients are not finite
        for optimizer in [*self._waiting]:
            if optimizer in known or not any(parameter.requires_grad for parameter in parameters_of([optimizer])):
                self._waiting.pop(optimizer).remove()
        outcome, updates = session.outcome, session.step.updates
        steps = progress.step - self._first_step
        if (updates and not self._waiting) or (outcome is not None and outcome.kind not in COMPLETE):
            return
        enough = 1 if updates and not self._any_gradient and len(self._waiting) == len(session.optimizers) else _STEPS
        idle = updates and self._stepped.isdisjoint(self._waiting)  # they may begin later
        if not steps or (outcome is None and (idle or (steps < enough and progress.epoch <= self._first_epoch))):
            self._look_later()
            return
        if updates:
            by_hand = f"Before each update call {self._name}.backward(loss), with a loss of the model of the run"
            cure = by_hand if self._handles else "Compute the loss with the model that compute_loss receives"
            session.warn(
                f"after {counted(steps, 'step')} of this run, no update of {self._named(self._waiting)} has had a gradient "
                f"(other than 0), so its weights have not changed. {cure}, and let no hook drop the gradients"
            )
        elif self._handles:
            update = "" if self._name == "step" else f" and {self._update}"
            session.warn(
                f"the first {counted(steps, 'step')} of this run had no update, so the weights did not change. Call "
                f"{self._name}.backward(loss){update} in each step that trains"
            )
        for watch in self._waiting.values():
            watch.remove()
        self._waiting.clear()

    @property
    def _step(self) -> int:
        return self._session.progress.step + 1


def _is_there(gradient: Tensor | None, version: int) -> bool:
    """Return whether a gradient was not dropped: neither removed, nor set to zeros since it had this version."""
    return gradient is not None and (local(gradient)._version == version or not _is_zero(gradient))


def _is_zero(gradient: Tensor) -> bool:
    return not gradient.is_sparse and not gradient.is_meta and not bool(local(gradient).any())

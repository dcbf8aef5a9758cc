"""Overrides of ``backward`` and ``optimizer_step``, and optimizers that need a closure, in automatic optimization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.engine import weight_update
from cadenza.engine.objective import checked_loss
from cadenza.engine.session import session_of
from cadenza.errors import AdapterError
from cadenza.optim.optimizers import needs_closure
from cadenza.optim.precision import BackwardPass, Precision

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.run import Run


def install(attached: Attached, run: Run) -> None:
    """Make the loop call the module's overrides, if any."""
    session = session_of(run)
    if attached.overrides("backward") or not attached.automatic:
        session.precision.backward_pass = ModuleBackward(attached, session.precision.backward_pass)
    if attached.automatic and (attached.overrides("optimizer_step") or any(map(needs_closure, attached.optimizers))):
        session.precision = ModulePrecision(attached, session.precision)


class ModuleBackward(BackwardPass):
    """Call ``module.backward`` if the module overrides it or ``manual_backward`` had extra arguments."""

    def __init__(self, attached: Attached, inner: BackwardPass) -> None:
        super().__init__()
        self._attached, self._inner, self._overridden = attached, inner, attached.overrides("backward")

    def __call__(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        arguments, keywords = self._attached.backward_arguments
        if not (self._overridden or arguments or keywords):
            self._inner(loss, scale)
            return
        if not isinstance(scale, float):
            loss = loss * scale
        elif scale != 1.0:
            loss = loss / self._attached.accumulate  # bit-identical to Lightning
        self._attached.call("backward", loss, *arguments, **keywords)


class ModulePrecision(Precision):
    """The precision of a run, in which ``module.optimizer_step`` updates the weights.

    The backward pass of the batch precedes ``optimizer_step``. The first call of its closure returns the batch's loss. Further
    calls recompute loss and gradients.
    """

    def __init__(self, attached: Attached, inner: Precision) -> None:
        self.name: str = inner.name
        self._attached, self._inner = attached, inner
        self.backward_pass: BackwardPass = inner.backward_pass
        self._left_out: Sequence[Optimizer] = ()

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return self._inner.wrap(compute)

    def disabled(self) -> AbstractContextManager[None]:
        return self._inner.disabled()

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        self._inner.backward(loss, scale)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        self._inner.unscale(optimizers)

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        attached, left_out = self._attached, list[Optimizer]()
        assert attached.run is not None, "the run has begun"
        for optimizer in optimizers:
            updates = list[Any]()
            handle = optimizer.register_step_post_hook(lambda *_, seen=updates: seen.append(None))
            try:
                wrapped = attached.wrapped(optimizer, self)
                closure = Closure(attached, attached.run)
                attached.call("optimizer_step", attached.run.progress.epoch, attached.batch_idx - 1, wrapped, closure)
            finally:
                handle.remove()
            if not updates:
                left_out.append(optimizer)
        return left_out

    @property
    def lightning_module(self) -> Any:
        """The LightningModule."""
        return self._attached.module

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **keywords: Any) -> Any:
        """Implement ``optimizer.step(closure)`` for ``module.optimizer_step``."""
        if self.name != "fp16":
            return optimizer.step(closure=closure, **keywords)
        if needs_closure(optimizer):
            raise AdapterError(
                f"{type(optimizer).__name__} needs a closure, and precision='fp16' supports none. Use bf16 or fp32."
            )
        loss = closure()
        self._inner.step([optimizer])
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


class Closure:
    """The closure passed to ``module.optimizer_step``."""

    def __init__(self, attached: Attached, run: Run) -> None:
        self._attached, self._run, self._called = attached, run, False

    def __call__(self) -> Tensor | None:
        session = session_of(self._run)
        if not self._called:
            self._called = True
            return session.step.window.mean_loss()
        if session.step.window.size > 1:
            raise AdapterError("the closure of optimizer_step can be called again with accumulate=1 only")
        with torch.enable_grad():
            weight_update.drop_gradients(session.optimizers)
            self._attached.again = True
            try:
                loss = checked_loss(session.compute(session.model, self._run.batch)["loss"])
            finally:
                self._attached.again = False
            session.precision.backward(loss)
        return loss.detach()

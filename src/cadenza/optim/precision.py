"""Number formats of the forward pass, one small class each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BackwardPass:
    """What ``loss.backward()`` does, at four fifths of the cost on a small model.

    ``torch.autograd.backward`` looks at arguments that a training loop does not have. Here the engine is called as it calls it,
    and a loss that counts for a share of the step gets that share as its gradient, instead of being multiplied. The engine's
    entry is not public: where a version of torch has none, or the loss is of a class of its own, the public function is called.

    Hooks and custom functions receive the gradient of the loss and may write into it, also in ways that raise no version
    counter (``.numpy()``, ``.data``, kernels of their own). So each call gives away a copy of the tensor that is kept.
    """

    def __init__(self) -> None:
        self._engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
        self._share, self._gradient = 0.0, torch.zeros(())

    def __call__(self, loss: Tensor, share: float | Tensor = 1.0) -> None:
        """Add the gradients of `share` times `loss`, both of shape ()."""
        if self._engine is None or type(loss) is not Tensor:
            torch.autograd.backward(loss * share)
            return
        if isinstance(share, float):
            kept = self._gradient
            if share != self._share or kept.dtype is not loss.dtype or kept.device != loss.device:
                kept = self._gradient = torch.full_like(loss, share, requires_grad=False)
                self._share = share
            given = kept.clone()
        else:
            given = (torch.ones_like(loss) * share).to(loss.dtype)
        self._engine((loss,), (given,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Precision:
    """Plain float32: everything as it is given."""

    name = "fp32"

    def __init__(self) -> None:
        self.backward_pass = BackwardPass()

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute` with its forward pass in this precision."""
        return compute

    def outside(self) -> AbstractContextManager[None]:
        """Inside, numbers are as they are given, also within a wrapped function: for backward and update in a ``step_fn``."""
        return nullcontext()

    def backward(self, loss: Tensor, share: float | Tensor = 1.0) -> None:
        """Add the gradients of `share` times `loss`."""
        self.backward_pass(loss, share)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Bring the optimizers' gradients back to their true size."""

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Update the weights; return the optimizers that skipped the update because their gradients are not finite."""
        for optimizer in optimizers:
            optimizer.step()
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""


class Autocast(Precision):
    """bfloat16 where torch deems it safe (``torch.autocast``); weights and gradients stay float32."""

    name = "bf16"
    dtype = torch.bfloat16

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        device_type, dtype = self.device_type, self.dtype

        def forward(*arguments: Any) -> Any:
            with torch.autocast(device_type, dtype=dtype):
                return compute(*arguments)

        return forward

    def outside(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, enabled=False)


class Scaled(Autocast):
    """float16 with ``torch.amp.GradScaler``: the loss is scaled up so that small gradients do not vanish."""

    name = "fp16"
    dtype = torch.float16

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.scaler = torch.amp.GradScaler(device_type)
        self._unscaled: list[Optimizer] = []
        self._done: list[Optimizer] = []  # since the scaler last set its scale

    def backward(self, loss: Tensor, share: float | Tensor = 1.0) -> None:
        self._set_scale()
        self.backward_pass(self.scaler.scale(loss), share)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        self._unscaled = _with_gradients(optimizers)
        if any(_is_in(self._done, one) for one in self._unscaled):
            self._set_scale()
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        left_out = [one for one in self._unscaled if self._overflowed(one)]
        for optimizer in _with_gradients(self._unscaled):  # a callback may have dropped the gradients
            self.scaler.step(optimizer)
        self._done += self._unscaled
        self._unscaled = []
        return left_out

    def _overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient of this optimizer is not finite. The scaler then skips its update."""
        return any(found.item() for found in self.scaler._found_inf_per_device(optimizer).values())

    def _set_scale(self) -> None:
        """Let the scaler set its scale by what it has unscaled: not earlier than before the next backward pass.

        In a ``step_fn`` the gradients of another optimizer may still have the scale of the last backward pass.
        """
        if self._done:
            self.scaler.update()
            self._done = []

    def state_dict(self) -> dict[str, Any]:
        self._set_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(dict(state))


def _is_in(optimizers: Sequence[Optimizer], one: Optimizer) -> bool:
    return any(one is other for other in optimizers)


def _with_gradients(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that have something to do; the scaler refuses others."""
    return [
        optimizer
        for optimizer in optimizers
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
    ]


PRECISIONS = ("fp32", "bf16", "fp16")


def precision_of(name: str, device_type: str) -> Precision:
    """Return the precision called `name` for a type of device.

    Raises:
        ValueError: `name` is not one of fp32, bf16 and fp16.
    """
    match name:
        case "fp32":
            return Precision()
        case "bf16":
            return Autocast(device_type)
        case "fp16":
            return Scaled(device_type)
        case _:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {name!r}")

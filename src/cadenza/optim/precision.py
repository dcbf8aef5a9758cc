"""Number formats of the forward pass, one small class each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.optim import fast_step
from cadenza.optim.parameters import distinct_gradients, parameters_of
from cadenza.text.hints import hints

_NOTHING = nullcontext()


class BackwardPass:
    """What ``loss.backward()`` does, at four fifths of the cost on a small model.

    ``torch.autograd.backward`` checks arguments that a training loop does not pass. This class calls the autograd engine
    directly, and passes the scale of the loss as its gradient instead of multiplying the loss. The entry of the engine is not
    public: if a version of torch has no such entry, or the loss is a tensor subclass, the public function is called.

    Hooks and custom functions receive the gradient of the loss and may write into it, also in ways that raise no version
    counter (``.numpy()``, ``.data``, custom kernels). Each call therefore passes a copy of the cached tensor.
    """

    def __init__(self) -> None:
        self._engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
        self._scale, self._gradient = 0.0, torch.zeros(())
        self.inputs: tuple[Tensor, ...] = ()
        """The parameters to which gradients are added; empty: all."""

    def __call__(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        """Add the gradients of `scale` times `loss`, both of shape ()."""
        if self._engine is None or type(loss) is not Tensor:
            # torch.autograd.backward of torch 2.7 ignores tensor subclasses
            (loss * scale).backward(inputs=self.inputs or None)
            return
        if isinstance(scale, float):
            kept = self._gradient
            if scale != self._scale or kept.dtype is not loss.dtype or kept.device != loss.device:
                kept = self._gradient = torch.full_like(loss, scale, requires_grad=False)
                self._scale = scale
            given = kept.clone()
        else:
            given = (torch.ones_like(loss) * scale).to(loss.dtype)
        self._engine((loss,), (given,), False, False, self.inputs, allow_unreachable=True, accumulate_grad=True)

    def updated(self) -> Sequence[Optimizer]:
        """Return the optimizers that were updated with the last backward pass: see `cadenza.compiled`."""
        return ()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None without one."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


class Precision:
    """Plain float32: tensors keep their formats."""

    name = "fp32"

    def __init__(self) -> None:
        self.backward_pass: BackwardPass = BackwardPass()
        self.take_step: Callable[[Optimizer], None] = fast_step.step
        """Lets one optimizer step."""

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute` with its forward pass in this precision."""
        return compute

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return _NOTHING

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context without autocast, for backward and update inside a wrapped ``step_fn``."""
        return _NOTHING

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        """Add the gradients of `scale` times `loss`."""
        self.backward_pass(loss, scale)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Divide the gradients of the optimizers by the scale of the loss."""

    def unscale_again(self, optimizers: Sequence[Optimizer]) -> None:
        """Do the same once more, to gradients that were computed again after `unscale`."""

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Update the weights; return the optimizers that skipped the update because their gradients are not finite."""
        for optimizer in optimizers:
            self.take_step(optimizer)
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


class Autocast(Precision):
    """bfloat16 where ``torch.autocast`` uses it; weights and gradients stay float32."""

    name = "bf16"
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute, assigned=(), updated=())  # `inspect.unwrap` finds it
        def forward(*arguments: Any) -> Any:
            with self.autocast():
                return compute(*arguments)

        return forward

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def disabled(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, enabled=False)

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        left_out = super().step(optimizers)
        torch.clear_autocast_cache()  # in a step_fn, further forward passes would use the weights before the update
        return left_out


class Scaled(Autocast):
    """float16 with ``torch.amp.GradScaler``, which scales the loss up so that small gradients do not underflow."""

    name = "fp16"
    dtype: torch.dtype = torch.float16

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler(device_type)
        self._unscaled: list[Optimizer] = []
        self._done: list[Optimizer] = []  # since the last update of the scale

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        self._set_scale()
        self.backward_pass(self.scaler.scale(loss), scale)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        # The scaler refuses an optimizer without gradients.
        self._unscaled = [
            optimizer for optimizer in optimizers if any(parameter.grad is not None for parameter in parameters_of([optimizer]))
        ]
        if any(_is_in(self._done, optimizer) for optimizer in self._unscaled):
            self._set_scale()
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)

    def unscale_again(self, optimizers: Sequence[Optimizer]) -> None:
        if gradients := distinct_gradients(optimizers):
            torch._foreach_mul_(gradients, 1.0 / self.scaler.get_scale())

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer are unscaled for the update in progress."""
        return _is_in(self._unscaled, optimizer)

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        left_out = [optimizer for optimizer in self._unscaled if self._overflowed(optimizer)]
        for optimizer in self._unscaled:  # not by the scaler, which would wait for the device once more
            if not _is_in(left_out, optimizer):
                fast_step.step(optimizer)
        self._done += self._unscaled
        self._unscaled = []
        torch.clear_autocast_cache()
        return left_out

    def _overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient of this optimizer is not finite. Its update is skipped then."""
        return any(found.item() for found in self.scaler._found_inf_per_device(optimizer).values())

    def _set_scale(self) -> None:
        """Let the scaler update its scale, as late as possible: before the next backward pass.

        Earlier, in a ``step_fn``, the gradients of another optimizer may still have the scale of the last backward pass.
        """
        if self._done:
            self.scaler.update()
            self._done = []

    def state_dict(self) -> dict[str, Any]:
        self._set_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(dict(state))


def _is_in(optimizers: Sequence[Optimizer], optimizer: Optimizer) -> bool:
    return any(optimizer is other for other in optimizers)


PRECISIONS = ("fp32", "bf16", "fp16")


def check_precision(precision: object) -> None:
    """Raise `ValueError` for an unknown precision. The message translates the names of other libraries."""
    if precision not in PRECISIONS:
        meant = hints("precision").get(str(precision).removeprefix("torch."), "")
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}. {meant}".rstrip())


def precision_of(name: str, device_type: str) -> Precision:
    """Return the precision with this name for a type of device.

    Raises:
        ValueError: `name` is not one of fp32, bf16 and fp16.
    """
    check_precision(name)
    match name:
        case "fp32":
            return Precision()
        case "bf16":
            return Autocast(device_type)
        case _:
            return Scaled(device_type)

"""NeMo's own optimizers (``nemo.backends.pytorch.optimizers``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
State = dict[str, Any]


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


class _Moments(Optimizer):
    """An optimizer with moments of the gradients. A subclass updates one parameter.

    Its states have NeMo's names, so that it continues from NeMo's files: ``step``, ``exp_avg``, ``exp_avg_sq``,
    ``max_exp_avg_sq``.
    """

    def __init__(self, params: Parameters, **settings: Any) -> None:
        lr, eps, betas = settings["lr"], settings["eps"], settings["betas"]
        if lr < 0 or eps < 0:
            raise ValueError(f"lr and eps must be at least 0; got lr={lr} and eps={eps}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1; got {betas}")
        super().__init__(params, settings)

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense gradients; use torch.optim.SparseAdam for sparse ones"
                    )
                state = self.state[parameter]
                if not state:
                    self._begin(state, parameter, group)
                state["step"] = int(state["step"]) + 1  # in states of torch's AdamW, it is a tensor
                self._update(parameter, parameter.grad, state, group)
        return loss

    def _begin(self, state: State, parameter: Tensor, group: State) -> None:
        second = self._second(parameter)
        state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=second)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = second.clone()

    def _second(self, parameter: Tensor) -> Tensor:
        """Return the initial second moment of a parameter."""
        return torch.zeros_like(parameter)

    def _denominator(self, state: State, group: State) -> Tensor:
        """Return the root of the second moment, or of its maximum, plus eps."""
        second: Tensor = state["exp_avg_sq"]
        if group["amsgrad"]:
            second = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], second))
        return second.sqrt().add_(group["eps"])

    def _update(self, parameter: Tensor, grad: Tensor, state: State, group: State) -> None:
        raise NotImplementedError


class AdamW(_Moments):
    """AdamW (Loshchilov and Hutter 2019) with NeMo's formula, which ``adam_w`` stands for.

    With ``s = lr * sqrt(1 - beta2**t) / (1 - beta1**t)``, a weight w becomes
    ``w - s * (weight_decay * w + m / (sqrt(v) + eps))``.
    `torch.optim.AdamW` multiplies the decay by lr instead of s, and corrects the bias of v before it adds eps.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        betas: The decays of m and v.
        eps: Added to the denominator.
        weight_decay: The decay of the weights.
        amsgrad: Use the maximum of v.

    Raises:
        ValueError: A setting is out of its range.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)

    def _update(self, parameter: Tensor, grad: Tensor, state: State, group: State) -> None:
        (beta1, beta2), steps = group["betas"], state["step"]
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        change = torch.mul(parameter, group["weight_decay"]).addcdiv_(state["exp_avg"], self._denominator(state, group))
        rate = group["lr"] * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
        parameter.add_(change, alpha=-rate)


class Novograd(_Moments):
    """NovoGrad (Ginsburg et al. 2019): the second moment is one number for each parameter tensor.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        betas: The decays of the moments.
        eps: Added to the denominator.
        weight_decay: The decay of the weights.
        grad_averaging: Multiply the normalised gradient by 1 - beta1.
        amsgrad: Use the maximum of the second moment.
        luc: Limit an update to `luc_trust` times the norm of the weights.
        luc_trust: This factor.
        luc_eps: Added to the norm of an update.

    Raises:
        ValueError: A setting is out of its range.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        amsgrad: bool = False,
        luc: bool = False,
        luc_trust: float = 1e-3,
        luc_eps: float = 1e-8,
    ) -> None:
        settings: dict[str, Any] = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "amsgrad": amsgrad}
        super().__init__(params, lr=lr, betas=betas, eps=eps, **settings)
        self.luc: bool = luc
        self.luc_trust: float = luc_trust
        self.luc_eps: float = luc_eps

    def _second(self, parameter: Tensor) -> Tensor:
        return parameter.new_zeros([], dtype=torch.float32)

    def _update(self, parameter: Tensor, grad: Tensor, state: State, group: State) -> None:
        beta1, beta2 = group["betas"]
        norm, second = grad.norm().pow(2), state["exp_avg_sq"]
        second.copy_(torch.where(second == 0, norm, second.mul(beta2).add(norm, alpha=1 - beta2)))
        change = grad / self._denominator(state, group)
        if group["weight_decay"] != 0:
            change.add_(parameter, alpha=group["weight_decay"])
        if group["grad_averaging"]:
            change.mul_(1 - beta1)
        state["exp_avg"].mul_(beta1).add_(change)
        if not self.luc:
            parameter.add_(state["exp_avg"], alpha=-group["lr"])
            return
        limit = self.luc_trust * parameter.norm() / (state["exp_avg"].norm() + self.luc_eps)
        parameter.sub_(limit.clamp(max=group["lr"]) * state["exp_avg"])

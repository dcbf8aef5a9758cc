"""``optimizer.step()`` without the record for a profiler that does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler


def _code_within(function: Any, *names: str) -> CodeType | None:
    """Return the code of a function that is defined inside another one; None if there is none of this name."""
    code: CodeType | None = getattr(function, "__code__", None)
    for name in names:
        inner = [const for const in getattr(code, "co_consts", ()) if isinstance(const, CodeType) and const.co_name == name]
        code = inner[0] if inner else None
    return code


# None if a version of torch lacks the function: `optimizer.step()` is called then.
_WRAPPER = getattr(Optimizer.profile_hook_step(Optimizer.step), "__code__", None)
_TRACKER = _code_within(LRScheduler.__init__, "patch_track_step_called", "wrap_step", "wrapper")
_GLOBAL_HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class StepGuard:
    """A hook that is called before ``optimizer.step()`` of the user's code; `step` calls it only beside other hooks.

    With `after`, it is called after each step, also of the run. Wrappers such as Lookahead have a plain dict of hooks, which
    ``register_step_pre_hook`` does not take.
    """

    def __init__(self, optimizer: Optimizer, check: Callable[[Optimizer], None], *, after: bool = False) -> None:
        self._hooks: Any = optimizer._optimizer_step_post_hooks if after else optimizer._optimizer_step_pre_hooks
        self._hooks[id(self)] = self
        self._check = check

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        self._check(optimizer)

    def remove(self) -> None:
        """Do not call it any more."""
        self._hooks.pop(id(self), None)


def step(optimizer: Optimizer) -> None:
    """Do what ``optimizer.step()`` does, at half of its cost on a small model.

    torch wraps ``step`` of each optimizer class: the wrapper opens a record for the profiler and calls hooks. If there is no
    profiler and no hook but those of Cadenza, and the method is one of ``torch.optim``, the function inside the wrapper is
    called. A scheduler of torch wraps ``step`` of the instance, to note that it was called: the same note is made. In any other
    case ``optimizer.step()`` is called: for a profiler, for hooks of this optimizer or of all, and for a class or an instance
    with a ``step`` of its own.
    """
    inner = _inside(getattr(type(optimizer), "step", None))
    profiled = torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()
    if inner is None or profiled or optimizer._optimizer_step_post_hooks or not is_bare(optimizer):
        optimizer.step()
        return
    if "step" in optimizer.__dict__:
        note_call(optimizer)
    if made_fit in optimizer._optimizer_step_pre_hooks.values():
        made_fit(optimizer)
    inner(optimizer)


def is_bare(optimizer: Optimizer) -> bool:
    """Return whether nothing but ``step`` of its class, and Cadenza, would be called by ``optimizer.step()``."""
    own = optimizer.__dict__.get("step")
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return not (
        (own is not None and not _is_tracker(own, optimizer, getattr(type(optimizer), "step", None)))
        or any(type(hook) is not StepGuard and hook is not made_fit for hook in hooks)
        or any(_GLOBAL_HOOKS)
    )


def note_call(optimizer: Optimizer) -> None:
    """Note that an optimizer has stepped: schedulers of torch warn without it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _inside(method: Any) -> Callable[[Optimizer], Any] | None:
    """Return what torch's wrapper calls; None for another function, also for a wrapper around that of torch."""
    if getattr(method, "__code__", None) is not _WRAPPER or not method.__module__.startswith("torch.optim."):
        return None
    inner: Callable[[Optimizer], Any] | None = getattr(method, "__wrapped__", None)
    return inner


def _is_tracker(own: Any, optimizer: Optimizer, method: Any) -> bool:
    """Return whether `own` is the function with which torch's schedulers wrap the `method` of this optimizer."""
    if getattr(own, "__code__", own) is not _TRACKER:
        return False
    around = dict(zip(own.__code__.co_freevars, own.__closure__, strict=True))
    if around.keys() != {"func", "opt_ref"}:
        return False
    return around["func"].cell_contents is method and around["opt_ref"].cell_contents() is optimizer


def made_fit(optimizer: Optimizer, *_: object) -> None:
    """Copy gradients into the memory order of their weights. Turn fusing off for gradients of another kind.

    This is a hook of the optimizers that `cadenza.optim.optimizers.fuse` fused; `step` calls it without torch's wrapper.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or gradient.dtype is not parameter.dtype:
                for each in optimizer.param_groups:
                    each["fused"] = None
                return
            if gradient.stride() != parameter.stride() and not _alike(gradient, parameter):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
    if type(optimizer) is SGD:
        for group in optimizer.param_groups:
            if group["momentum"]:
                _with_momentum(optimizer, group["params"])


def _with_momentum(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give weights that are trained for the first time a momentum of 0, if others have one already.

    The fused SGD of torch needs a momentum for all weights or for none. Without dampening the result is the same: the first
    momentum is the gradient.
    """
    fresh = [new for new in parameters if new.grad is not None and optimizer.state[new].get("momentum_buffer") is None]
    if fresh and any(state.get("momentum_buffer") is not None for state in optimizer.state.values()):
        for parameter in fresh:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _alike(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same memory order. Strides of dimensions of size 1 are ignored."""
    return all(a == b for a, b, size in zip(tensor.stride(), other.stride(), tensor.shape, strict=True) if size > 1)

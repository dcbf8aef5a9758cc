"""``optimizer.step()`` without the record for a profiler that does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_WRAPPER = getattr(Optimizer.profile_hook_step(Optimizer.step), "__code__", None)
_GLOBAL_HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


def step(optimizer: Optimizer) -> None:
    """Do what ``optimizer.step()`` does, at half of its cost on a small model.

    torch wraps ``step`` of each optimizer class: the wrapper opens a record for the profiler and calls hooks. If there is no
    profiler and no hook, and the method is one of ``torch.optim``, the function inside the wrapper is called. In any other case
    ``optimizer.step()`` is called: for a profiler, for hooks of this optimizer or of all, for a class with a ``step`` of its
    own, and for an instance with one, as a scheduler of torch makes it.
    """
    inner = _inside(getattr(type(optimizer), "step", None))
    if inner is None or _is_observed(optimizer):
        optimizer.step()
    else:
        inner(optimizer)


def _inside(method: Any) -> Callable[[Optimizer], Any] | None:
    """Return what torch's wrapper calls; None for another function, also for a wrapper around that of torch."""
    if getattr(method, "__code__", None) is not _WRAPPER or not method.__module__.startswith("torch.optim."):
        return None
    inner: Callable[[Optimizer], Any] | None = getattr(method, "__wrapped__", None)
    return inner


def _is_observed(optimizer: Optimizer) -> bool:
    return (
        "step" in optimizer.__dict__
        or bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        or any(_GLOBAL_HOOKS)
        or torch.autograd.profiler._is_profiler_enabled
        or torch._C._autograd._profiler_enabled()
    )

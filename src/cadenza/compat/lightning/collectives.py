"""Collectives of a strategy of Lightning that a driver does not have: with gradients, and in a process group of the user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_OPERATIONS = {"mean": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}


def reduced_in(group: Any, value: Tensor, how: str) -> Tensor:
    """Return `value` reduced over the ranks of a process group: its ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``."""
    result = value.detach().clone()
    if how == "mean" and not result.is_floating_point():
        result = result.float()
    dist.all_reduce(result, getattr(dist.ReduceOp, _OPERATIONS[how]), group=group)
    return result / dist.get_world_size(group) if how == "mean" else result


def gathered(group: Any, value: Tensor, *, sync_grads: bool) -> Tensor:
    """Return the tensors of the ranks of a process group, stacked on dim 0.

    Args:
        group: The process group. None: all ranks.
        value: The tensor of this rank. It has the same shape on all ranks.
        sync_grads: Let gradients flow back: each rank gets those of its own tensor, summed over the ranks.
    """
    stacked: Tensor = Gathered.apply(value, group)  # type: ignore[no-untyped-call]
    return stacked if sync_grads else stacked.detach()


class Gathered(torch.autograd.Function):
    """Stack the tensors of the ranks, with the gradients of Lightning's ``all_gather``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # the gradient may be used elsewhere, too
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None

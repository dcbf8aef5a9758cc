"""Communication hooks of DDP: how gradients are reduced. The weights must stay the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.errors import DistributedError
from cadenza.status.counting import counted

CommHook = Callable[[Any, Any], Any]
"""A communication hook of DDP: called with its state and a ``GradBucket``; returns a ``torch.futures.Future[Tensor]``."""
_LOCAL = ("post_localSGD_hook", "noop_hook")
_REDUCES = "Pass a hook that reduces each gradient over all ranks, such as bf16_compress_hook, or none."


def state_and_hook(given: Any) -> tuple[object, CommHook] | None:
    """Return the state and the function of a communication hook; None if there is none.

    Raises:
        TypeError: It is no function and no pair.
        ValueError: It is a hook of torch that does not reduce gradients over all ranks.
    """
    if given is None:
        return None
    state, hook = given if isinstance(given, tuple) and len(given) == 2 else (None, given)
    if not callable(hook):
        raise TypeError(f"comm_hook must be a function hook(state, bucket), or a pair (state, hook); got {given!r}")
    if (name := getattr(hook, "__name__", "")) in _LOCAL and hook.__module__.startswith("torch."):
        raise ValueError(
            f"comm_hook={name} does not reduce gradients over all ranks, so the weights of the ranks differ, and a checkpoint "
            f"holds those of rank 0 alone. {_REDUCES}"
        )
    compare = _Comparison()

    @wraps(hook, assigned=["__name__"], updated=())  # torch rejects annotations that are strings, as in many files
    def called(state, bucket):  # type: ignore[no-untyped-def]
        compare(bucket)
        return hook(state, bucket)

    del called.__wrapped__
    return state, called


class _Comparison:
    """Compares the weights of a bucket over the ranks at calls 2, 4, 8, and so on: a hook may begin late to differ."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}

    def __call__(self, bucket: Any) -> None:
        index = bucket.index()
        self._calls[index] = calls = self._calls.get(index, 0) + 1
        if calls > 1 and not calls & (calls - 1):
            _check_same(bucket.parameters(), calls)


def _check_same(parameters: list[nn.Parameter], call: int) -> None:
    lowest = torch.stack([_sum_of_bytes(one) for one in parameters])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    differing = int((lowest != highest).sum())
    if differing:
        raise DistributedError(
            f"the weights of the ranks differ in {differing} of {counted(len(parameters), 'parameter')} at call {call} of "
            f"comm_hook, and a checkpoint holds those of rank 0 alone. {_REDUCES}"
        )


def _sum_of_bytes(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64)

"""The content of a checkpoint, copied to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cadenza.checkpoint.store.shards import Shard
from cadenza.checkpoint.store.tree import encode, host_copy
from cadenza.drivers.sharding import is_sharded


@dataclass(slots=True)
class Content:
    """The content of a checkpoint, copied to the host, so that it does not change during the write."""

    model: dict[str, Tensor]
    """The model's ``state_dict``, tensors only; a file of its own, readable by every tool that knows safetensors."""
    plain: Any
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """The facts for the manifest: step, epoch, reason, and whether the checkpoint is exact and finite."""
    model_shards: dict[str, Shard] = field(default_factory=dict)
    """The shards of the model on this rank."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """The shards of other tensors on this rank."""

    @staticmethod
    def of(model: Mapping[str, Tensor], state: Any, facts: Mapping[str, Any]) -> Content:
        """Copy model and state to the host.

        Raises:
            StateError: A value in `state` cannot be saved.
        """
        weights = {name: host_copy(tensor) for name, tensor in model.items() if not is_sharded(tensor)}
        parts = {name: Shard.of(tensor) for name, tensor in model.items() if is_sharded(tensor)}
        shards: dict[str, Shard] = {}
        plain, tensors = encode(state, shards)
        finite = all_finite([*weights.values(), *(shard.part for shard in parts.values())])
        return Content(weights, plain, tensors, {**facts, "finite": finite}, parts, shards)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no float in any of these is NaN or infinite. Waits for the device."""
    floats = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel())
    # Both ends of the range in one pass that keeps nothing: a fifth of what isfinite and all take. NaN is at both.
    return all(bool(end.isfinite()) for tensor in floats for end in torch.aminmax(tensor))

"""Sharded tensors: torch's DTensors, of which each rank holds a shard. Their module is imported only when they are used."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.errors import StateError

Region = tuple[slice, ...]
"""A part of a tensor: a range of indices for each dimension."""


class Readable(Protocol):
    """A stored tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def read(self, region: Region | None = None) -> Tensor:
        """Read the whole tensor, or a part, to the host."""


def is_sharded(value: object) -> bool:
    """Return whether `value` is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")  # loaded by the code that made the DTensor
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, detached, in the same memory; a tensor that is not sharded whole.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    detached: Any = tensor.detach()
    part: Tensor = detached.to_local() if is_sharded(tensor) else detached
    return part


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local` of each."""
    return [local(tensor) for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. Every rank must call this if the tensor is sharded."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else detached  # type: ignore[no-any-return]  # torch leaves it untyped


def region_of(tensor: Tensor) -> Region:
    """Return the part of a sharded tensor that this rank holds.

    Raises:
        StateError: Its ranks hold terms of a sum.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise StateError(
            f"a tensor has the layout {sharded.placements}: the ranks hold terms of a sum. Reduce it with full_tensor()."
        )
    sizes, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def is_first_holder(tensor: Tensor) -> bool:
    """Return whether no rank before this one holds the same part of a sharded tensor."""
    sharded: Any = tensor
    at = sharded.device_mesh.get_coordinate()
    return not any(number and placement.is_replicate() for number, placement in zip(at, sharded.placements, strict=True))


def chunk_of(size: int, rank: int, ranks: int) -> slice:
    """Return the rows of a rank, as ``torch.chunk`` splits `size` rows: full chunks, then the rest, then empty chunks.

    >>> [chunk_of(5, rank, 4) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    step = -(-size // ranks)
    return slice(min(rank * step, size), min((rank + 1) * step, size))


def laid_out(value: Tensor | Readable, like: Tensor) -> Tensor:
    """Return a tensor in the layout of `like`, which has its shape. Of a stored tensor only the shard of this rank is read.

    Every rank must call this. If `like` is not sharded, the result is whole and stays on its device.
    """
    if not is_sharded(like):
        return whole(value) if isinstance(value, Tensor) else value.read()
    if is_sharded(value):
        assert isinstance(value, Tensor)
        return value
    from torch.distributed.tensor import DTensor

    target: Any = like
    region = region_of(like)
    part = value[region].clone() if isinstance(value, Tensor) else value.read(region)
    device = target.device_mesh.device_type
    return DTensor.from_local(
        part.to(device), target.device_mesh, target.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def all_laid_out(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return each value in the layout of the tensor of the same name; whole if there is none of the same shape."""
    return {name: _laid_out(value, like.get(name)) for name, value in values.items()}


def _laid_out(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) and not hasattr(value, "read"):
        return value
    if isinstance(like, Tensor) and tuple(like.shape) == tuple(value.shape):
        return laid_out(value, like)
    return value if isinstance(value, Tensor) else value.read()


def optimizer_laid_out(state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Return an optimizer's ``state_dict``. A tensor with the shape of its parameter gets the layout of the parameter."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    laid = {
        number: {key: _laid_out(value, owners.get(number)) for key, value in own.items()} if isinstance(own, Mapping) else own
        for number, own in state["state"].items()
    }
    return {**state, "state": laid}


def refuse_shards(content: Any, who: str) -> None:
    """Raise `StateError` if a nested value holds a sharded tensor. For code that writes whole weights from one process."""
    leaves = pytree.tree_leaves(content)
    modules = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
    if any(map(is_sharded, [*leaves, *(parameter for module in modules for parameter in module.parameters())])):
        raise StateError(
            f"{who} writes whole weights from one process, and here each rank holds a shard of them. Use the callback "
            "Checkpoint, then cadenza.export_weights; or cadenza.save_weights, on every rank."
        )


def total_norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients, of which some are sharded, shape (). Every rank must call this.

    ``torch.nn.utils.get_total_norm`` fails for an empty shard, and for a mix of sharded and whole gradients.
    """
    from torch import distributed as dist
    from torch.nn.utils import get_total_norm

    mesh = _mesh_of(tensors)
    parts = [part for one in tensors if is_sharded(one) and is_first_holder(one) and (part := local(one)).numel()]
    others = [one for one in tensors if not is_sharded(one)]
    # A sum of powers could overflow in single precision.
    own, rest = (
        torch.as_tensor(get_total_norm(kind, norm_type) if kind else 0.0, dtype=torch.float64, device=mesh.device_type)
        for kind in (parts, others)
    )
    if norm_type == float("inf"):
        return torch.maximum(_over(mesh, own, dist.ReduceOp.MAX), rest).float()
    return ((_over(mesh, own**norm_type, dist.ReduceOp.SUM) + rest**norm_type) ** (1 / norm_type)).float()


def _over(mesh: Any, value: Tensor, operation: Any) -> Tensor:
    """Reduce a number over all ranks of a mesh."""
    from torch import distributed as dist

    for dim in range(mesh.ndim):
        dist.all_reduce(value, operation, group=mesh.get_group(dim))
    return value


def _mesh_of(tensors: Iterable[Any]) -> Any:
    meshes = {one.device_mesh for one in tensors if is_sharded(one)}
    if len(meshes) != 1:
        raise StateError(f"expected sharded gradients over one group of ranks; got {len(meshes)} groups")
    return meshes.pop()

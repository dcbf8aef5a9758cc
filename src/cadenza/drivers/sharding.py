"""Tensors in shards: torch's DTensors, of which each rank holds a part. Where there are none, their module stays out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from cadenza.errors import StateError

Place = tuple[slice, ...]


class Readable(Protocol):
    """A whole tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""

    def read(self, place: Place | None = None) -> Tensor:
        """Return the tensor, or a part of it, on the host."""


def is_sharded(value: object) -> bool:
    """Return whether `value` is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")  # whoever made one has loaded it
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached, in the same memory; all of it if it is not sharded.

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
    """Return all of a tensor, detached. If it is sharded, every rank must call this."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else detached  # type: ignore[no-any-return]  # torch leaves it untyped


def place_of(tensor: Tensor) -> Place:
    """Return which part of a sharded tensor this rank holds.

    Raises:
        StateError: It is not cut along one dimension, over all ranks of one dimension.
    """
    sharded: Any = tensor
    mesh, placements = sharded.device_mesh, sharded.placements
    place = [slice(0, size) for size in tensor.shape]
    if mesh.ndim != 1 or not (placements[0].is_shard() or placements[0].is_replicate()):
        raise StateError(
            f"a tensor is laid out as {placements} over {tuple(mesh.shape)} ranks, and cadenza knows those that are cut along "
            "one dimension, over all ranks: what FsdpDriver makes"
        )
    if placements[0].is_shard():
        dim = placements[0].dim
        size, rank = tensor.shape[dim], mesh.get_local_rank()
        step = -(-size // mesh.size())  # as torch.chunk does: full parts first, then a rest, then nothing
        place[dim] = slice(min(rank * step, size), min((rank + 1) * step, size))
    return tuple(place)


def laid_out(value: Tensor | Readable, like: Tensor) -> Tensor:
    """Return a tensor in the layout of another one of its shape; of what is stored only this rank's part is read.

    Every rank must call this. In the layout of a tensor that is not sharded it is whole, on the device where it is.
    """
    if not is_sharded(like):
        return whole(value) if isinstance(value, Tensor) else value.read()
    if is_sharded(value):
        assert isinstance(value, Tensor)
        return value
    from torch.distributed.tensor import DTensor

    target: Any = like
    place = place_of(like)
    part = value[place].clone() if isinstance(value, Tensor) else value.read(place)
    device = target.device_mesh.device_type
    return DTensor.from_local(
        part.to(device), target.device_mesh, target.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def all_laid_out(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return each value in the layout of the tensor of its name; whole, if there is none or its shape is another."""
    return {name: _laid_out(value, like.get(name)) for name, value in values.items()}


def _laid_out(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) and not hasattr(value, "read"):
        return value
    if isinstance(like, Tensor) and tuple(like.shape) == tuple(value.shape):
        return laid_out(value, like)
    return value if isinstance(value, Tensor) else value.read()


def optimizer_laid_out(state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with what has the shape of its parameter in that parameter's layout."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    laid = {
        number: {key: _laid_out(value, owners.get(number)) for key, value in own.items()} if isinstance(own, Mapping) else own
        for number, own in state["state"].items()
    }
    return {**state, "state": laid}


def refuse_shards(content: Any, who: str) -> None:
    """Raise `StateError` if something in a nested value is in shards: for what writes whole weights from one process."""
    parts: Iterable[Any] = ()
    if is_sharded(content):
        raise StateError(
            f"{who} writes whole weights from one process, and here each rank holds a part of them. Use the callback "
            "Checkpoint, then cadenza.export_weights; or cadenza.save_weights, on every rank"
        )
    if isinstance(content, torch.nn.Module):
        parts = content.parameters()
    elif isinstance(content, Mapping):
        parts = content.values()
    elif isinstance(content, list | tuple):
        parts = content
    for part in parts:
        refuse_shards(part, who)


def total_norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all numbers in gradients, some of them in shards, shape (). Every rank must call this.

    Like ``torch.nn.utils.get_total_norm``, which fails where a rank holds nothing of a tensor, and for a mix of both kinds.
    """
    from torch import distributed as dist
    from torch.nn.utils import get_total_norm

    parts = [part for one in tensors if is_sharded(one) and (part := local(one)).numel()]
    others = [one for one in tensors if not is_sharded(one)]
    mesh = _mesh_of(tensors)
    # In double precision, as a sum of powers could overflow.
    own, rest = (
        torch.as_tensor(get_total_norm(kind, norm_type) if kind else 0.0, dtype=torch.float64, device=mesh.device_type)
        for kind in (parts, others)
    )
    if norm_type == float("inf"):
        dist.all_reduce(own, dist.ReduceOp.MAX, group=mesh.get_group())
        return torch.maximum(own, rest).float()
    powers = own**norm_type
    dist.all_reduce(powers, group=mesh.get_group())
    return ((powers + rest**norm_type) ** (1 / norm_type)).float()


def _mesh_of(tensors: Iterable[Any]) -> Any:
    meshes = {one.device_mesh for one in tensors if is_sharded(one)}
    if len(meshes) != 1:
        raise StateError(f"expected gradients in shards over one group of ranks; got {len(meshes)}")
    return meshes.pop()

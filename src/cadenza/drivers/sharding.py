"""Sharded tensors: torch's DTensors, of which each rank holds a shard. Their module is imported only when they are used."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from operator import mul
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.errors import StateError
from cadenza.status.encoding import is_built_of_tensors, parts_of_tensor

STAGE = "stage"
"""The dimension of a mesh over which the weights of a pipeline's stage are sharded. Other ranks hold nothing of them."""
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


def is_elsewhere(tensor: Tensor) -> bool:
    """Return whether a DTensor belongs to other ranks, such as those of another stage. This rank has an empty part of it."""
    sharded: Any = tensor
    return sharded.device_mesh.get_coordinate() is None


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, detached, in the same memory; a tensor that is not sharded whole.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached  # type: ignore[no-any-return]  # torch leaves it untyped


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local` of each."""
    return [local(tensor) for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached. Every rank must call this if the tensor is sharded.

    Raises:
        StateError: It belongs to other ranks.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    if is_elsewhere(tensor):
        raise StateError(
            "this rank has no part of a tensor of another stage, so it cannot be gathered here. Use the callback Checkpoint, "
            "then cadenza.export_weights, which read the parts of all ranks."
        )
    sharded: Any = tensor.detach()
    return sharded.full_tensor()  # type: ignore[no-any-return]  # torch leaves it untyped


def region_of(tensor: Tensor) -> Region:
    """Return the part of a sharded tensor that this rank holds.

    Raises:
        StateError: Its ranks hold terms of a sum.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    if is_elsewhere(tensor):
        return tuple(slice(0, 0) for _ in tensor.shape)
    if any(placement.is_partial() for placement in sharded.placements):
        raise StateError(
            f"a tensor has the layout {sharded.placements}: the ranks hold terms of a sum. Reduce it with full_tensor()."
        )
    sizes, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


class Split(NamedTuple):
    """How a dimension of a tensor is split: over some ranks, from rank 0 on, with `stride` between two of them."""

    dim: int
    ranks: int
    stride: int


class Splits(NamedTuple):
    """How a tensor is split over the ranks: the parts of each split are split by the next one."""

    splits: tuple[Split, ...]
    is_first: bool
    """Whether no rank before this one holds the same part."""
    origin: int = 0
    """The first rank with a part."""

    @staticmethod
    def of(tensor: Tensor) -> Splits:
        """Return how a sharded tensor is split.

        Raises:
            StateError: Its ranks hold terms of a sum, or its parts do not follow from the numbers of the ranks.
        """
        sharded: Any = tensor
        mesh, at, region = sharded.device_mesh.mesh, sharded.device_mesh.get_coordinate(), region_of(tensor)
        first = int(mesh.flatten()[0])
        origin = first if STAGE in (sharded.device_mesh.mesh_dim_names or ()) else 0
        strides = [int(mesh.select(dim, 1).flatten()[0]) - first if size > 1 else 0 for dim, size in enumerate(mesh.shape)]
        # torch applies a split with a stride after the later ones: FSDP splits the parts of tensor parallelism.
        order = sorted(range(mesh.ndim), key=lambda dim: type(sharded.placements[dim]).__name__ == "_StridedShard")
        order = [dim for dim in order if not sharded.placements[dim].is_replicate()]
        splits = tuple(Split(sharded.placements[dim].dim, mesh.shape[dim], strides[dim]) for dim in order)
        if at is None:
            return Splits(splits, is_first=False, origin=origin)
        found = [(split, at[dim]) for split, dim in zip(splits, order, strict=True)]
        part, rank = tuple(slice(0, size) for size in tensor.shape), torch.distributed.get_rank()
        for split, number in found:
            part = part_of(part, split, number)
        # An empty part may be at any index.
        other = any(own != cut and own.start < own.stop for own, cut in zip(part, region, strict=True))
        if other or rank != first + sum(map(mul, at, strides)):
            raise StateError(
                f"a tensor has the layout {sharded.placements} over a mesh of the shape {tuple(mesh.shape)}, of which rank "
                f"{rank} has the part {region}; expected {part}. Shard the model with FsdpDriver."
            )
        return Splits(splits, rank == origin + sum(split.stride * number for split, number in found), origin)


def part_of(part: Region, split: Split, number: int) -> Region:
    """Return the part of a rank, of `part`, where `number` is the index of the rank among those of the split.

    >>> part_of((slice(4, 9), slice(0, 2)), Split(dim=0, ranks=2, stride=1), 1)
    (slice(7, 9, None), slice(0, 2, None))
    """
    whole = part[split.dim]
    rows = chunk_of(whole.stop - whole.start, number, split.ranks)
    own = slice(whole.start + rows.start, whole.start + rows.stop)
    return (*part[: split.dim], own, *part[split.dim + 1 :])


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
    if is_sharded(like):
        return _sharded(value, like)
    return whole(value) if isinstance(value, Tensor) else value.read()


def _sharded(value: Tensor | Readable, like: Tensor) -> Tensor:
    if isinstance(value, Tensor) and is_sharded(value):
        given: Any = value
        if (given.device_mesh, given.placements) == (like.device_mesh, like.placements):  # type: ignore[attr-defined]
            return value
        value = whole(value)
    from torch.distributed.tensor import DTensor

    target: Any = like
    region = region_of(like)
    part = value[region].clone() if isinstance(value, Tensor) else value.read(region)
    return DTensor.from_local(
        part.to(local(like).device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
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

    ``torch.nn.utils.get_total_norm`` fails for an empty shard, for gradients over different meshes, and for a mix of sharded
    and whole gradients. The ranks of a mesh must hold all parts: a gradient that is not split over all dimensions of the mesh
    of its model, but over a mesh of fewer dimensions, is the same in the others.
    """
    from torch.nn.utils import get_total_norm

    meshes: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if is_sharded(tensor) and not is_elsewhere(tensor):
            meshes.setdefault(tensor.device_mesh, []).append(tensor)  # type: ignore[attr-defined]
    if not meshes:
        raise StateError("expected sharded gradients; got none")
    device = next(iter(meshes)).device_type
    whole_ones = [tensor for tensor in tensors if not is_sharded(tensor)]

    def norm_of(some: list[Tensor]) -> Tensor:  # a sum of powers could overflow in single precision
        nothing = torch.zeros((), dtype=torch.float64, device=device)  # a number of the host would wait for the device
        return get_total_norm(some, norm_type).to(nothing) if some else nothing

    norms = [norm_of(whole_ones)]
    for mesh, sharded in meshes.items():
        parts = [part for tensor in sharded if _is_first_in_mesh(tensor) and (part := local(tensor)).numel()]
        norms.append(norm_over(mesh, norm_of(parts), norm_type))
    together: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return together.float()


def _is_first_in_mesh(tensor: Tensor) -> bool:
    """Return whether no rank before this one in the mesh holds the same part of a sharded tensor."""
    sharded: Any = tensor
    at = sharded.device_mesh.get_coordinate()
    return not any(number and placement.is_replicate() for number, placement in zip(at, sharded.placements, strict=True))


def norm_over(mesh: Any, norm: Tensor, norm_type: float) -> Tensor:
    """Return the norm over all ranks of a mesh."""
    from torch import distributed as dist

    largest = norm_type == float("inf")
    value = norm if largest else norm**norm_type
    for dim in range(mesh.ndim):
        dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return value if largest else value ** (1 / norm_type)


# -- checksums: CRC-32 of the bytes of tensors, as in the manifest of a checkpoint --------------------


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the values of a tensor of any shape; of a sharded tensor, of the shard of this rank.

    It finds every changed bit. Waits for the device.

    >>> checksum(torch.zeros(3)) == checksum(-torch.zeros(3)), checksum(torch.zeros(3)) == checksum(torch.zeros(3))
    (False, True)
    """
    if is_built_of_tensors(tensor):
        inner: dict[str, Tensor] = parts_of_tensor(tensor)["tensors"]
        return checksum_of_all(inner.values())
    part = local(tensor)
    if part.layout is not torch.strided:
        if not part.is_sparse:
            return checksum(part.to_dense())
        part = part.coalesce()
        return checksum_of_all([part.indices(), part.values()])
    return zlib.crc32(bytes_of(part))


def checksum_of_all(tensors: Iterable[Tensor]) -> int:
    """Return the checksum of several tensors in this order."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(checksum(tensor).to_bytes(4, "little"), total)
    return total


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values bit for bit; of sharded tensors, the shards of this rank.

    >>> nan = torch.tensor(float("nan"))
    >>> same_bits(nan, nan.clone()), same_bits(torch.zeros(1), -torch.zeros(1))
    (True, False)
    """
    tensor, other = local(tensor), local(other)
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if tensor.layout is not torch.strided or other.layout is not torch.strided or is_built_of_tensors(tensor):
        return checksum(tensor) == checksum(other)
    first, second = (part.contiguous().reshape(-1).view(torch.uint8) for part in (tensor, other))
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a dense tensor as bytes on the host."""
    import numpy  # here: without it torch gives no view of the memory, and its own error does not name the package

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: memoryview = numpy.asarray(plain.reshape(-1).view(torch.uint8)).data
    return data

"""Named dimensions of the ranks of a run."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from cadenza.drivers.rendezvous import rendezvous_of
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("data", "shard", "expert", "context", "pipeline", "tensor")
"""The dimensions, from the outermost to the innermost: ranks along the last one are consecutive."""
TOGETHER = ("context", "pipeline", "tensor")
"""The dimensions along which ranks compute together, on the same batches."""


class Mesh:
    """The ranks of a run, arranged along named dimensions; for `Parallel`.

    Ranks along ``data``, ``shard`` and ``expert`` read different batches. Ranks along ``context``, ``pipeline`` and ``tensor``
    compute together: they see the same batches, and are consecutive. The ranks along ``tensor`` are closest to each other.

    Args:
        data: The number of groups of ranks that each hold the whole model. Gradients are averaged over them.
        shard: The number of ranks over which each weight is sharded (FSDP2).
        expert: The number of ranks over which the experts of a layer are distributed. Other weights are sharded over them.
        context: The number of ranks over which a sequence is split. Weights are sharded over them too.
        pipeline: The number of ranks over which the layers of the model are distributed, in stages.
        tensor: The number of ranks over which single layers are split.

    One of the sizes may be -1: the ranks that the others leave. If that is one rank, what uses the dimension has no effect.

    Raises:
        TypeError: A size is no integer.
        ValueError: A size is neither -1 nor at least 1, two are -1, or the product is not the number of ranks.

    >>> Mesh(shard=-1)
    Mesh(1 rank)
    >>> Mesh(data=2, tensor=2)
    Traceback (most recent call last):
    ValueError: Mesh(data=2, tensor=2) has 4 ranks, and this run has 1 rank. Set one of the sizes to -1, or start 4 processes.
    """

    def __init__(
        self, *, data: int = 1, shard: int = 1, expert: int = 1, context: int = 1, pipeline: int = 1, tensor: int = 1
    ) -> None:
        given = {
            "data": data, "shard": shard, "expert": expert, "context": context, "pipeline": pipeline, "tensor": tensor,
        }  # fmt: skip
        at = None if dist.is_initialized() else rendezvous_of()
        ranks = dist.get_world_size() if dist.is_initialized() else at.ranks if at is not None else 1
        self.rest: str | None = next((name for name, size in given.items() if size == -1), None)
        """The dimension that was given as -1."""
        self.sizes: dict[str, int] = _sizes(given, ranks)
        """The number of ranks along each dimension, by name."""
        self._meshes: dict[str, DeviceMesh] = {}

    @property
    def together(self) -> int:
        """The number of ranks that compute together."""
        return prod(self.sizes[name] for name in TOGETHER)

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the ranks along a dimension with this rank in it, as a ``DeviceMesh`` of one dimension.

        Raises:
            KeyError: No such dimension, or it has one rank.
            RuntimeError: No `Parallel` was made with this mesh, which connects the ranks.
        """
        if self.sizes.get(name, 1) == 1:
            several = ", ".join(name for name, size in self.sizes.items() if size > 1) or "none"
            raise KeyError(f"expected a dimension of {self} with multiple ranks, {several}; got {name!r}")
        if name not in self._meshes:
            raise RuntimeError(f"{self} has no process groups yet. Make Parallel(mesh, ...) before, on every rank.")
        return self._meshes[name]

    def mean(self, values: Tensor, over: str = "context", *, where: Tensor | None = None) -> Tensor:
        """Return the mean of all values on the ranks along a dimension, shape (). Every rank must call this.

        A loss that each rank computes from its part of the sequences: the same number on all of them, with the gradient of one
        mean over all tokens. With one rank, it is ``values.mean()``.

        Args:
            values: The values of this rank, such as the loss of each token, of any shape.
            over: The dimension.
            where: Which values count, as numbers or flags of the shape of `values`. None: all.

        >>> Mesh().mean(torch.tensor([1.0, 5.0, 3.0]), where=torch.tensor([1, 0, 1]))
        tensor(2.)
        """
        total = (values if where is None else values * where).sum()
        count = torch.as_tensor(values.numel() if where is None else where.sum(), dtype=total.dtype, device=total.device)
        if self.sizes[over] > 1:
            from torch.distributed.tensor import DTensor, Partial

            ranks = self[over]
            if total.requires_grad:  # FSDP averages the gradients of these ranks, and this is their sum
                total.register_hook(lambda gradient: gradient * ranks.size())
            total, count = (DTensor.from_local(part, ranks, [Partial()]).full_tensor() for part in (total, count))
        return total / count

    def connect(self, device: str, weights: DeviceMesh) -> DeviceMesh:
        """Make the process groups that `weights` lacks; return the ranks by all dimensions. Every rank must call this.

        Args:
            device: The type of the devices.
            weights: The ranks by the dimensions along which most weights are arranged; ``expert`` and ``context`` are in
                ``shard``.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = [name for name in DIMENSIONS if self.sizes[name] > 1 or (name == "shard" and self.sizes["expert"] > 1)]
        whole = weights
        if {"expert", "context", "pipeline"} & {*names}:
            whole = init_device_mesh(device, tuple(self.sizes[name] for name in names), mesh_dim_names=tuple(names))
        for name in names:
            # The layers that are split over tensor are sharded further, so both must be dimensions of one mesh.
            self._meshes[name] = (weights if name == "tensor" else whole)[name]
        return whole

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)
        return f"Mesh({shown or '1 rank'})"


def _sizes(given: dict[str, int], ranks: int) -> dict[str, int]:
    shown = f"Mesh({', '.join(f'{name}={size!r}' for name, size in given.items() if size != 1) or ''})"
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be a number of ranks, or -1 for the rest; got {size!r}")
        if size < 1 and size != -1:
            raise ValueError(f"{name} must be at least 1, or -1 for the rest; got {size}")
    rest = [name for name, size in given.items() if size == -1]
    known = prod(size for size in given.values() if size != -1)
    if len(rest) > 1:
        raise ValueError(f"one dimension may be -1, the ranks that the others leave; got {' and '.join(rest)}")
    if rest and ranks % known:
        raise ValueError(
            f"{shown}: the other sizes have {counted(known, 'rank')}, which do not divide the {counted(ranks, 'rank')} of this "
            f"run, so {rest[0]}=-1 has no value."
        )
    sizes = {name: ranks // known if size == -1 else size for name, size in given.items()}
    if prod(sizes.values()) != ranks:
        raise ValueError(
            f"{shown} has {counted(known, 'rank')}, and this run has {counted(ranks, 'rank')}. Set one of the sizes to -1, or "
            f"start {counted(known, 'process')}."
        )
    return sizes

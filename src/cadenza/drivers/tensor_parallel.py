"""Layers that multiple ranks compute together: torch's tensor parallelism, ``parallelize_module``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from cadenza.drivers.name_patterns import named_matches
from cadenza.status.formats import counted
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


class TensorParallel:
    """How layers are split over ranks that compute them together, on the same batches; for `FsdpDriver`.

    These ranks follow one another: with ``ranks=2``, ranks 0 and 1 compute together, as do ranks 2 and 3. The others read
    different data. Each weight of the plan is split as its style says, and what remains is sharded over the data, as all other
    weights are.

    Args:
        plan: The style of each module, by name: ``{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}``
            (``*`` also matches dots); the styles are in ``torch.distributed.tensor.parallel``. Or a function ``(model, mesh)``
            that calls ``parallelize_module`` itself; `mesh` has the ranks that compute together.
        ranks: The number of ranks that compute together. It divides the number of ranks.
        mesh: Instead of `ranks`, a ``DeviceMesh`` of all ranks, in order, with names. Its last dimension has the ranks that
            compute together. Before it stand the dimensions of ``fully_shard``: one, over which weights are sharded, or two,
            over the first of which they are replicated.

    Raises:
        TypeError: `plan` is neither a mapping nor a function, or a name in it is no pattern.
        ValueError: Not one of `ranks` and `mesh` is given, or `ranks` is less than 1, or the mesh has another form.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel
    >>> TensorParallel({"up": ColwiseParallel()}, ranks=2)
    TensorParallel(2 ranks)
    """

    def __init__(
        self,
        plan: Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object],
        *,
        ranks: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not isinstance(plan, Mapping) and not callable(plan):
            raise TypeError(
                "plan must be a mapping of names of modules to styles, such as {'blocks.*.up': ColwiseParallel()}, or a "
                f"function (model, mesh); got {plan!r}"
            )
        if isinstance(plan, Mapping):
            _check_styles(plan)
        if (ranks is None) == (mesh is None):
            raise ValueError(f"TensorParallel needs one of ranks= and mesh=; got ranks={ranks!r} and mesh={mesh!r}")
        if mesh is not None:
            _check_mesh(mesh)
            ranks = mesh.size(mesh.ndim - 1)
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks must be at least 1; got {ranks!r}")
        self.plan: Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object] = plan
        self.ranks: int = ranks
        self.mesh: DeviceMesh | None = mesh

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split the layers of `model` in place over the ranks of `mesh`, of one dimension. Every rank must call this.

        Raises:
            ValueError: A pattern matches no module, two match the same one, or the parts of a common weight would differ.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        tied = _tied(model)
        if isinstance(self.plan, Mapping):
            parallelize_module(model, mesh, _by_name(self.plan, model))
        else:
            self.plan(model, mesh)
        _tie_again(model, tied)

    def __repr__(self) -> str:
        return f"TensorParallel({counted(self.ranks, 'rank')})"


def _by_name(plan: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, ParallelStyle]:
    named, styles, patterns = dict(model.named_modules()), dict[str, Any](), dict[str, str]()
    for pattern, style in plan.items():
        for name in named_matches(pattern, named, argument="TensorParallel(plan=...)", kind="module"):
            if name in styles:
                raise ValueError(
                    f"TensorParallel(plan=...): the patterns {patterns[name]!r} and {pattern!r} both match {name!r}. Expected "
                    "one style for each module: change one of the patterns."
                )
            styles[name], patterns[name] = style, pattern
    return styles


def _check_styles(plan: Mapping[Any, Any]) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle

    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise TypeError(f"plan[{pattern!r}] must be a style such as ColwiseParallel() for a pattern; got {brief(style)}")


def _check_mesh(mesh: DeviceMesh) -> None:
    names, shape = mesh.mesh_dim_names, tuple(mesh.mesh.shape)
    in_order = torch.equal(mesh.mesh.flatten(), torch.arange(dist.get_world_size()))
    if names is None or len(shape) not in (2, 3) or not in_order:
        raise ValueError(
            f"mesh must have {counted(dist.get_world_size(), 'rank')}, all in order, two or three dimensions, and names, as "
            f"init_device_mesh('cpu', (2, 2), mesh_dim_names=('shard', 'tensor')); got the shape {shape} with the names {names}"
            f"{'' if in_order else ' and other ranks'}"
        )


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Make one weight again of those that were one: torch splits each module apart."""
    for first, *others in tied:
        kept: Any = model.get_parameter(first)
        for name in others:
            own: Any = model.get_parameter(name)
            layouts = [getattr(item, "placements", None) for item in (kept, own)]
            if layouts[0] != layouts[1]:
                raise ValueError(
                    f"{first} and {name} are one weight, and the plan would split it in two ways: {layouts[0]} and "
                    f"{layouts[1]}. Give both modules styles that split it alike, or leave out both."
                )
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, kept)

"""One driver for all arrangements of ranks that torch's own tools compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.drivers import FsdpDriver, TensorParallel
from cadenza.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Plan = "Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object]"


class Parallel(FsdpDriver):
    """The ranks of a `Mesh`: each of its dimensions computes with the tool of torch that is made for it.

    Weights are sharded over ``shard`` and replicated over ``data``, with FSDP2. See `FsdpDriver` for what holds for all sharded
    models: the optimizer is a function of the parameters, and every rank must call the model.

    Args:
        mesh: The arrangement of the ranks.
        device: ``"cpu"`` or ``"cuda"``; None takes the CUDA device of this rank if there is one.
        tensor: How layers are split over ``tensor``: the plan of `TensorParallel`, styles of
            ``torch.distributed.tensor.parallel`` by names of modules, or a function ``(model, mesh)``.
        loss_parallel: Compute cross entropy from scores that are split over ``tensor`` along their classes (torch's
            ``loss_parallel``), in training and in evaluations. The last layer of the plan must return DTensors:
            ``ColwiseParallel(use_local_output=False)``.
        **options: Other options of `FsdpDriver`, such as ``shard=Block`` and ``param_dtype="bf16"``. `replicas` and
            `tensor_parallel` follow from the mesh.

    Raises:
        TypeError: An argument has a wrong type, or `FsdpDriver` has no such option.
        ValueError: A dimension of the mesh has multiple ranks, and no argument uses it, or an argument needs a dimension of one
            rank. Otherwise as `FsdpDriver`.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: str | None = None,
        *,
        tensor: Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object] | None = None,
        loss_parallel: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a Mesh(data=..., shard=..., ...); got {mesh!r}")
        for name in {"replicas", "tensor_parallel"} & options.keys():
            raise TypeError(f"Parallel takes {name} from the mesh: leave {name}= out, and give the sizes to Mesh(...)")
        _check_use(mesh, {"tensor": ("tensor", tensor), "loss_parallel": ("tensor", loss_parallel)})
        self.mesh: Mesh = mesh
        self.loss_parallel: bool = loss_parallel
        layers = TensorParallel(tensor, ranks=mesh.sizes["tensor"]) if tensor is not None else None
        super().__init__(device, replicas=mesh.sizes["data"], tensor_parallel=layers, **options)
        self._entered = 0  # how many of the runs and evaluations that are under way have entered the contexts of torch
        mesh.connect(self.device.type, self._mesh())

    def _computing_together(self) -> int:
        return self.mesh.together

    @property
    def _data_shape(self) -> tuple[int, ...]:
        sizes = self.mesh.sizes
        ranks = sizes["shard"] * sizes["expert"] * sizes["context"]
        return (ranks,) if sizes["data"] == 1 else (sizes["data"], ranks)

    @property
    def _shape(self) -> tuple[int, ...]:
        inner = (self.mesh.sizes[name] for name in ("pipeline", "tensor"))
        return (*self._data_shape, *(size for size in inner if size > 1))

    @property
    def _names(self) -> tuple[str, ...]:
        named = [name for name in ("data", "pipeline", "tensor") if self.mesh.sizes[name] > 1]
        named.insert("data" in named, "shard")
        return tuple(named)

    def _data_mesh(self) -> DeviceMesh:
        outer = self._names[: len(self._data_shape)]
        return self._mesh() if outer == self._names else self._mesh()[outer]

    @contextmanager
    def watched(self, *arguments: Any, **options: Any) -> Iterator[None]:
        # A run, or an evaluation: forward passes and their backward passes are all in here.
        with super().watched(*arguments, **options), ExitStack() as ending:
            self._entered += 1
            if self._entered == 1:
                self._enter(ending)
            try:
                yield
            finally:
                self._entered -= 1

    def _enter(self, ending: ExitStack) -> None:
        """Enter the contexts in which torch computes layers and losses in parts."""
        from torch.distributed.tensor.parallel import loss_parallel

        if self.loss_parallel:
            context: Any = loss_parallel()
            context.__enter__()
            ending.callback(context.__exit__, None, None, None)  # it would stay entered after an error


def _check_use(mesh: Mesh, uses: Mapping[str, tuple[str, object]]) -> None:
    """Raise `ValueError` if a dimension has ranks and nothing uses it, or the other way round."""
    for argument, (name, value) in uses.items():
        ranks, used = mesh.sizes[name], value is not None and value is not False
        if used and ranks == 1:
            raise ValueError(f"{argument}= needs a dimension {name!r} of multiple ranks; got {mesh}. Give Mesh({name}=...).")
        if ranks > 1 and not used and argument == name:
            raise ValueError(f"{mesh} has {name}={ranks}, and nothing uses it. Give Parallel({argument}=...), or set it to 1.")

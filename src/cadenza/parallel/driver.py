"""One driver for all arrangements of ranks that torch's own tools compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadenza.drivers import FsdpDriver, TensorParallel
from cadenza.drivers.name_patterns import Choice, check_choice, named_matches
from cadenza.drivers.sharding import STAGE, norm_over
from cadenza.errors import DataError
from cadenza.parallel.mesh import Mesh
from cadenza.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


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
        sequence: The dimension along which the tensors of a batch are split over ``context``, such as 1 for (B, T). Tensors of
            fewer dimensions stay whole. Each rank gets the same part of all of them, in the order of torch's
            ``context_parallel``, in which ``scaled_dot_product_attention`` computes over all parts. The length must be
            divisible by twice the ranks. `Mesh.mean` makes the loss a mean over all tokens.
        pipeline: The stages of the model along ``pipeline``; give it to `Trainer` as ``compute_loss`` too. Gradients are
            reduced with each batch.
        experts: The modules with weights that are distributed over ``expert``, chosen like ``shard=``: the first dimension of
            each weight counts the experts, and each rank has some of them. The model sends inputs to the ranks of their
            experts, with a differentiable all-to-all in ``mesh["expert"]``. Their gradients are not averaged over ``expert``.
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
        sequence: int | None = None,
        pipeline: Pipeline | None = None,
        experts: Choice[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a Mesh(data=..., shard=..., ...); got {mesh!r}")
        for name in {"replicas", "tensor_parallel"} & options.keys():
            raise TypeError(f"Parallel takes {name} from the mesh: leave {name}= out, and give the sizes to Mesh(...)")
        _check_use(mesh, {"tensor": tensor, "sequence": sequence, "pipeline": pipeline, "experts": experts})
        has_ranks = {name: size > 1 for name, size in mesh.sizes.items()}  # of a dimension -1, one process has one
        if loss_parallel and tensor is None:
            raise ValueError("loss_parallel=True needs layers that are split over 'tensor'. Give Parallel(tensor=...).")
        if pipeline is not None and not isinstance(pipeline, Pipeline):
            raise TypeError(f"pipeline must be a Pipeline(stages, loss_fn, microbatches=...), or None; got {pipeline!r}")
        if sequence is not None and (isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0):
            raise ValueError(f"sequence must be a dimension of the tensors of a batch, such as 1; got {sequence!r}")
        if experts is not None:
            check_choice(experts, "experts")
        self.mesh: Mesh = mesh
        self.loss_parallel: bool = loss_parallel and has_ranks["tensor"]
        self.experts: Choice[nn.Module] | None = experts if has_ranks["expert"] else None
        self.pipeline: Pipeline | None = pipeline if has_ranks["pipeline"] else None
        self._stages: list[DeviceMesh] = []  # the ranks of each stage
        layers = TensorParallel(tensor, ranks=mesh.sizes["tensor"]) if tensor is not None and has_ranks["tensor"] else None
        super().__init__(device, replicas=mesh.sizes["data"], tensor_parallel=layers, **options)
        self._entered = 0  # how many of the open runs and evaluations have entered the contexts of torch
        self._all = mesh.connect(self.device.type, self._mesh())
        self._with_experts: list[nn.Module] = []
        self._split_attention = ExitStack()  # torch's context, from one batch to the next
        if sequence is not None and has_ranks["context"]:
            self._whole, self._sequence = self.to_device, sequence
            self.to_device: Callable[[Any], Any] = self._part_of

    def _computing_together(self) -> int:
        return self.mesh.together

    @property
    def _data_shape(self) -> tuple[int, ...]:
        sizes = self.mesh.sizes
        ranks = sizes["shard"] * sizes["expert"] * sizes["context"]
        return (ranks,) if sizes["data"] == 1 else (sizes["data"], ranks)

    @property
    def _shape(self) -> tuple[int, ...]:
        tensor = self.mesh.sizes["tensor"]
        return self._data_shape if tensor == 1 else (*self._data_shape, tensor)

    @property
    def _names(self) -> tuple[str, ...]:
        sizes = self.mesh.sizes
        outer = ("data",) if sizes["data"] > 1 else ()
        return (*outer, "shard" if sizes["pipeline"] == 1 else STAGE, *(("tensor",) if sizes["tensor"] > 1 else ()))

    def _mesh(self) -> DeviceMesh:
        stages = self.mesh.sizes["pipeline"]
        if stages == 1:
            return super()._mesh()
        if not self._stages:  # every rank makes all of them
            from torch.distributed.device_mesh import DeviceMesh

            ranks = torch.arange(self.world_size).reshape(*self._data_shape, stages).unbind(-1)
            self._stages = [DeviceMesh(self.device.type, some, mesh_dim_names=self._names) for some in ranks]
        return self._stages[self.rank % stages]

    def _data_mesh(self) -> DeviceMesh:
        outer = self._names[: len(self._data_shape)]
        return self._mesh() if outer == self._names else self._mesh()[outer]

    def _arrangements(self) -> set[tuple[int, ...]]:
        of_experts = tuple(self.mesh.sizes[name] for name in (*self._outer(), "expert"))
        return {*super()._arrangements(), of_experts}

    def _outer(self) -> tuple[str, ...]:
        """The dimensions over which the weights of experts are sharded and replicated."""
        return ("data", "shard") if self.mesh.sizes["data"] > 1 else ("shard",)

    def _split(self, model: nn.Module) -> None:
        super()._split(model)
        if self.pipeline is not None:
            self._keep_stage(model, self.pipeline)
        if self.experts is not None:
            chosen = named_matches(self.experts, dict(model.named_modules()), argument="experts", kind="module")
            self._with_experts = [*chosen.values()]
            for name, module in chosen.items():
                distribute(module, name, self.mesh["expert"])

    def _keep_stage(self, model: nn.Module, pipeline: Pipeline) -> None:
        """Keep the weights of the stage of this rank. Those of others become tensors of other ranks, without memory."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        own = self.mesh["pipeline"].get_local_rank()
        elsewhere = {name: stage for name, stage in pipeline.assign(model, self.mesh["pipeline"]).items() if stage != own}
        made: dict[int, nn.Parameter] = {}
        for name, stage in elsewhere.items():
            weight, (path, _, last) = model.get_parameter(name), name.rpartition(".")
            if id(weight) not in made:
                nothing = torch.empty(0, dtype=weight.dtype, device=self.device)
                layout = [Replicate(), Shard(0)][-len(self._data_shape) :]
                mesh, shape = self._stages[stage], weight.shape
                part = DTensor.from_local(nothing, mesh, layout, run_check=False, shape=shape, stride=weight.stride())
                made[id(weight)] = nn.Parameter(part, requires_grad=weight.requires_grad)
            setattr(model.get_submodule(path), last, made[id(weight)])
        self._elsewhere = {*made.values()}

    def _shard(self, model: nn.Module, chosen: list[nn.Module]) -> None:
        apart = [*chosen, *self._with_experts]
        here = [module for module in apart if not self._elsewhere or not self._elsewhere.issuperset(module.parameters())]
        super()._shard(model, [module for module in model.modules() if module in here])
        for module in self._with_experts:
            sharded: Any = module
            # FSDP averages over the ranks with copies. What the other ranks send to an expert is in its gradient already.
            sharded.set_all_reduce_hook(lambda gradients: gradients.div_(self.mesh.sizes["expert"]))

    def _mesh_of(self, module: nn.Module) -> DeviceMesh:
        return self._all[self._outer()] if module in self._with_experts else super()._mesh_of(module)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return super().no_sync(model) if self.pipeline is None else nullcontext()  # the schedules reduce with each batch

    def total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        norm = super().total_norm(gradients, norm_type)
        return norm if self.pipeline is None else norm_over(self.mesh["pipeline"], norm.double(), norm_type).float()

    @contextmanager
    def watched(self, *arguments: Any, **options: Any) -> Iterator[None]:
        # A run, or an evaluation: forward passes and their backward passes are all in here.
        with super().watched(*arguments, **options), ExitStack() as ending:
            self._entered += 1
            if self._entered == 1:
                ending.callback(self._split_attention.close)
                self._enter(ending)
            try:
                yield
            finally:
                self._entered -= 1

    def _part_of(self, batch: Any) -> Any:
        """Return this rank's part of a batch, on the device. Until the next one, attention computes over all parts."""
        from torch.distributed.tensor.experimental import context_parallel

        self._split_attention.close()
        moved = self._whole(batch)
        leaves, spec = pytree.tree_flatten(moved)
        ranks, dim = self.mesh["context"], self._sequence
        parts = [leaf.clone() if isinstance(leaf, Tensor) and leaf.ndim > dim else leaf for leaf in leaves]
        split = [part for part, leaf in zip(parts, leaves, strict=True) if part is not leaf]
        lengths = {part.shape[dim] for part in split}
        if len(lengths) != 1 or lengths.pop() % (2 * ranks.size()):
            raise DataError(
                f"sequence={dim}: expected tensors in the batch with one length along dimension {dim}, divisible by "
                f"{2 * ranks.size()}, twice the ranks along 'context'; got {[tuple(part.shape) for part in split]}. Pad them."
            )
        self._split_attention.enter_context(
            context_parallel(ranks, buffers=split, buffer_seq_dims=[dim] * len(split), no_restore_buffers={*split})
        )
        return pytree.tree_unflatten(parts, spec)

    def _enter(self, ending: ExitStack) -> None:
        """Enter the contexts in which torch computes layers and losses in parts."""
        from torch.distributed.tensor.parallel import loss_parallel

        if self.loss_parallel:
            context: Any = loss_parallel()
            context.__enter__()
            ending.callback(context.__exit__, None, None, None)  # it would stay entered after an error


def distribute(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Keep on each rank of `mesh` its experts, of the weights of a module, in place. Every rank must call this.

    Raises:
        ValueError: The first dimension of a weight does not divide.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for path, parameter in [*module.named_parameters(name)]:
        experts = parameter.shape[0] if parameter.ndim else 0
        if not experts or experts % mesh.size():
            raise ValueError(
                f"experts=: the first dimension of {path} must be a number of experts that is divisible by "
                f"expert={mesh.size()}; got the shape {tuple(parameter.shape)}."
            )
        owner, _, last = path.removeprefix(f"{name}.").rpartition(".")
        part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)  # all ranks have the same weights
        setattr(module.get_submodule(owner), last, nn.Parameter(part, requires_grad=parameter.requires_grad))


_DIMENSION_OF = {"sequence": "context", "experts": "expert"}
"""The dimensions that have another name than the argument that uses them."""
_APART = (("context", "expert"), ("pipeline", "expert"), ("pipeline", "tensor"))
"""Dimensions that are not supported together."""


def _check_use(mesh: Mesh, uses: Mapping[str, object]) -> None:
    """Raise `ValueError` if a dimension has ranks and nothing uses it, or the other way round."""
    for argument, value in uses.items():
        name = _DIMENSION_OF.get(argument, argument)
        ranks = mesh.sizes[name]
        if value is not None and ranks == 1 and name != mesh.rest:
            raise ValueError(f"{argument}= needs multiple ranks along {name!r}; got {mesh}. Give Mesh({name}=...).")
        if ranks > 1 and value is None:
            raise ValueError(f"{mesh} has {name}={ranks}, and nothing uses it. Give Parallel({argument}=...), or set it to 1.")
    for first, second in _APART:
        if mesh.sizes[first] > 1 and mesh.sizes[second] > 1:
            raise ValueError(f"{first} and {second} are not supported together; got {mesh}. Set one of them to 1.")

"""A shard of the weights and of the data on each rank: torch's FSDP2, ``fully_shard``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.drivers.group import GroupDriver, Limits, check_switches
from cadenza.drivers.meta_tensors import Init, check_can_materialize, empty_tensors, materialize
from cadenza.drivers.name_patterns import Choice, check_choice, named_matches
from cadenza.drivers.sharding import Readable, chunk_of
from cadenza.drivers.tensor_parallel import TensorParallel
from cadenza.drivers.weight_files import is_dcp_folder
from cadenza.errors import DistributedError
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FsdpDriver(GroupDriver):
    """Several processes, on one machine or many, each with a shard of every weight, gradient and optimizer state.

    The weights of a sharded module are whole only while it computes. `Trainer` shards the model in place when a run is set up:
    its parameters become DTensors, so the optimizer must be given as a function of the parameters. All ranks start with the
    weights of rank 0. A model that is already sharded is used unchanged.

    Call the model and its modules, and no other methods of them: the call gathers the weights.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None takes the CUDA device of this rank if there is one.
        shard: The modules that are gathered one at a time: classes such as ``TransformerBlock``, patterns for names such as
            ``"blocks.*"``, or a function ``(name, module) -> bool``. The other parameters belong to the whole model, which is
            always sharded. None: one unit, the whole model.
        param_dtype: ``"bf16"``: the format of gathered weights and of the computation. Weights and updates keep their own.
            None: the format of the weights.
        reduce_dtype: ``"bf16"`` or ``"fp32"``: the format of gradients in their sum over ranks. None: their own.
        checkpoint_activations: Modules, chosen like `shard`, that compute their activations again in the backward pass
            instead of keeping them.
        reshard_after_forward: Free the gathered weights after the forward pass, and gather them again for the backward pass.
            A number: keep shards for groups of so many ranks, such as those of one machine; it divides the number of ranks
            that shard a weight.
        replicas: The number of groups of ranks that each hold the whole model in shards (HSDP). A weight is gathered inside of
            its group, for example the devices of one machine, and gradients are averaged over the groups. The ranks of a group
            are consecutive.
        output_dtype: ``"bf16"`` or ``"fp32"``: the format of what sharded modules return. None: that of the computation.
        cast_forward_inputs: Convert the inputs of sharded modules to `param_dtype`.
        tensor_parallel: Layers that multiple ranks compute together; see `TensorParallel`. `replicas`, and the sharding of
            weights, apply to the other dimensions of the ranks: 8 ranks of which 2 compute together shard weights over 4.
        cpu_offload: Keep the shards of weights, gradients and optimizer states in the memory of the host, where the optimizer
            updates them. With a CUDA device, the memory is pinned. With the device ``"cpu"`` they are there anyway.
        init: For a model that was built on the device ``meta``: a function that is called with each module, children first, and
            sets the tensors that the module holds itself, in place. They are whole during the call. None, and for modules
            that it does not set: their method ``reset_parameters()``.
        weights: For such a model: a safetensors file, an index of several, such as ``model.safetensors.index.json``, or a
            folder of torch's distributed checkpoint. Each rank reads its shards. Other tensors are initialized.
        share_data: Split each loader over the ranks; see `DdpDriver`.
        timeout_s: Seconds to wait for the other ranks, at the start and in each exchange, before an error is raised. A mapping
            sets other limits: ``{"start": 1800, "step": 120, "save": 3600}``. The start ends with the first step of a
            fit, or with the first batch of `Trainer.evaluate` and `Trainer.predict`.
        configure: A function that is called with the sharded model, for other methods of torch's ``FSDPModule``: for example
            ``set_modules_to_forward_prefetch`` of its blocks.

    Raises:
        DistributedError: This process was started alone, or the other ranks cannot be reached.
        TypeError: An argument has a wrong type, such as a `shard` that is no choice of modules.
        ValueError: A format is unknown, `replicas` or the ranks that compute together do not divide the number of ranks, or
            `weights` is no file. When a run starts: a class or pattern matches no module, two modules with a common weight
            would be sharded separately, or nothing sets a tensor on the device ``meta``.

    >>> import torch.distributed as dist
    >>> from cadenza.testing import tiny_run
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs no such line
    >>> run = tiny_run(driver=FsdpDriver("cpu", reduce_dtype="fp32"))
    >>> run.driver.world_size, run.outcome.kind
    (1, 'finished')
    >>> dist.destroy_process_group()
    """

    reduces_later = False
    in_step = True
    shards = True

    def __init__(
        self,
        device: str | None = None,
        *,
        shard: Choice[nn.Module] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        checkpoint_activations: Choice[nn.Module] | None = None,
        reshard_after_forward: bool | int = True,
        replicas: int = 1,
        output_dtype: str | None = None,
        cast_forward_inputs: bool = True,
        tensor_parallel: TensorParallel | None = None,
        cpu_offload: bool = False,
        init: Init | None = None,
        weights: str | os.PathLike[str] | None = None,
        share_data: bool = True,
        timeout_s: Limits = 600,
        configure: Callable[[nn.Module], object] | None = None,
    ) -> None:
        formats = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "output_dtype": output_dtype}
        for name, dtype in formats.items():
            if dtype is not None and dtype not in _DTYPES:
                raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}, or None; got {dtype!r}")
        for name, choice in (("shard", shard), ("checkpoint_activations", checkpoint_activations)):
            if choice is not None:
                check_choice(choice, name)
        check_switches(cast_forward_inputs=cast_forward_inputs, cpu_offload=cpu_offload)
        if tensor_parallel is not None and not isinstance(tensor_parallel, TensorParallel):
            raise TypeError(f"tensor_parallel must be TensorParallel(plan, ranks=...), or None; got {brief(tensor_parallel)}")
        super().__init__(device, share_data=share_data, timeout_s=timeout_s)
        self.shard: Choice[nn.Module] | None = shard
        self.checkpoint_activations: Choice[nn.Module] | None = checkpoint_activations
        self._tensor_parallel, self._ranks = tensor_parallel, None if tensor_parallel is None else tensor_parallel.mesh
        self.tensor_parallel: int = self._computing_together()
        if self._ranks is not None and replicas == 1:
            replicas = self._ranks.size(0) if self._ranks.ndim == 3 else 1
        ranks = self.data_world_size
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
            apart = "" if self.tensor_parallel == 1 else " that do not compute together"
            raise ValueError(f"replicas must divide the number of ranks{apart}, which is {ranks}; got {replicas!r}")
        self.replicas: int = replicas
        self.copies: bool = self.copies and replicas > 1
        if self._ranks is not None and tuple(self._ranks.mesh.shape) != self._shape:
            raise ValueError(f"replicas={replicas} contradicts the mesh of TensorParallel, {self._ranks}. Leave it out.")
        self.param_dtype: str | None = param_dtype
        self.reduce_dtype: str | None = reduce_dtype
        self._policy = {name: None if dtype is None else _DTYPES[dtype] for name, dtype in formats.items()}
        self._cast_forward_inputs = cast_forward_inputs
        if init is not None and not callable(init):
            raise TypeError(f"init must be a function of a module, or None; got {init!r}")
        if weights is not None and not (os.path.isfile(weights) or is_dcp_folder(weights)):
            raise ValueError(
                f"weights must be a safetensors file, a model.safetensors.index.json or a DCP folder; rank {self.rank} "
                f"finds no file {os.fspath(weights)!r}. For a checkpoint, use fit(resume=PATH) or export_weights."
            )
        if configure is not None and not callable(configure):
            raise TypeError(f"configure must be a function of the sharded model, or None; got {configure!r}")
        among = self._data_shape[-1]
        if not isinstance(reshard_after_forward, int) or reshard_after_forward < 0 or among % (reshard_after_forward or 1):
            raise ValueError(
                "reshard_after_forward must be True, False, or a number that divides the ranks which shard a weight, "
                f"{among}; got {reshard_after_forward!r}"
            )
        self.configure: Callable[[nn.Module], object] | None = configure
        self.cpu_offload: bool = cpu_offload
        self.init: Init | None = init
        self.weights: str | os.PathLike[str] | None = weights
        self.reshard_after_forward: bool | int = reshard_after_forward
        self._elsewhere: set[nn.Parameter] = set()  # those of which this rank holds nothing

    def _computing_together(self) -> int:
        ranks = 1 if self._tensor_parallel is None else self._tensor_parallel.ranks
        if self.world_size % ranks:
            raise ValueError(f"TensorParallel(ranks=...) must divide the number of ranks, {self.world_size}; got {ranks}")
        return ranks

    def check(self, *, optimizer: object, precision: str) -> None:
        if not callable(optimizer):
            raise ValueError(
                "with FSDP the parameters become shards when a run starts, and an optimizer made before would hold the old "
                "parameters: give a function of the parameters, such as lambda parameters: torch.optim.AdamW(parameters, 1e-3)"
            )
        if precision == "fp16":
            raise ValueError(
                "precision='fp16' scales the loss, and the scaler does not support sharded gradients; expected 'bf16' or "
                "'fp32' with FSDP. FsdpDriver(param_dtype='bf16') also halves the communication."
            )

    def check_model(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        check_can_materialize(model, self.init, self.weights)
        if not empty_tensors(model) and not isinstance(model, FSDPModule) and (self.init or self.weights):
            raise ValueError(
                f"FsdpDriver({'init' if self.init else 'weights'}=) sets the tensors of a model on the device 'meta', and this "
                'model has none there. Build it inside of `with torch.device("meta"):`, or set its weights before, for example '
                "with cadenza.load_weights."
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule

        self._begin_run()
        if isinstance(model, FSDPModule):
            _check_arrangement(model, self._arrangements())
            began = model._get_fsdp_state()._is_root is not None  # otherwise torch raises AttributeError
            if began and callable(reset := getattr(model, "reset_iter_state", None)):
                reset()  # a failed run may have left a pass unfinished
            return self._materialized(model)
        if next(model.parameters(), None) is None:
            return self._materialized(model).to(self.device)
        chosen = _chosen(self.shard, model, "shard")
        _check_ties(model, chosen)
        self.share_tensors(parameter.detach() for parameter in [*model.parameters(), *model.buffers()] if not parameter.is_meta)
        self._split(model)
        for module in _chosen(self.checkpoint_activations, model, "checkpoint_activations"):
            _checkpoint(module)
        self._shard(model, chosen)
        return self._materialized(model)

    def _most(self, numbers: Tensor, *, of_weights: bool) -> Tensor:
        if not of_weights:
            return super()._most(numbers, of_weights=False)
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._mesh().get_group(self._names[0]))
        return numbers

    def _materialized(self, model: nn.Module) -> nn.Module:
        given: dict[str, Any] = {"init": self.init, "weights": self.weights}
        materialize(model, self.device, self.meeting, parameters_on=self._parameters_on, **given)
        return model

    @property
    def _parameters_on(self) -> torch.device:
        return torch.device("cpu") if self.cpu_offload else self.device

    def _split(self, model: nn.Module) -> None:
        """Split layers over the ranks that compute together."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.apply(model, self._mesh()[self._names[-1]])

    def _mesh_of(self, module: nn.Module) -> DeviceMesh:
        """The ranks over which the weights of a module are sharded, and those over which they are replicated."""
        return self._data_mesh()

    def _arrangements(self) -> set[tuple[int, ...]]:
        """The shapes of the meshes over which weights may be sharded."""
        return {self._data_shape, self._shape}

    def _shard(self, model: nn.Module, chosen: list[nn.Module]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        options: dict[str, Any] = {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(**self._policy, cast_forward_inputs=self._cast_forward_inputs),
            "offload_policy": CPUOffloadPolicy(self.device.type == "cuda") if self.cpu_offload else OffloadPolicy(),
        }
        if self._elsewhere:
            options["ignored_params"] = self._elsewhere
        # Inner modules first; the model last, with the other parameters.
        for module in [*reversed([module for module in chosen if module is not model]), model]:
            fully_shard(module, mesh=self._mesh_of(module), **options)
        sharded: Any = model
        if callable(reduce_all := getattr(sharded, "set_reduce_scatter_unused_params", None)):  # older torch has no such method
            # Otherwise ranks that used different parameters would sum gradients of different parameters without an error.
            reduce_all(True)
        if self.configure is not None:
            self.configure(model)

    @property
    def _shape(self) -> tuple[int, ...]:
        """The ranks: the replicas if there are several, the ranks that shard a weight, and those that compute together."""
        together = () if self._tensor_parallel is None else (self.tensor_parallel,)
        return (*self._data_shape, *together)

    @property
    def _data_shape(self) -> tuple[int, ...]:
        ranks = self.data_world_size // self.replicas
        return (ranks,) if self.replicas == 1 else (self.replicas, ranks)

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if self._ranks is None and len(self._shape) == 1:
            world: Any = dist.group.WORLD
            self._ranks = DeviceMesh.from_group(world, self.device.type)
        elif self._ranks is None:
            self._ranks = init_device_mesh(self.device.type, self._shape, mesh_dim_names=self._names)
        return self._ranks

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the dimensions of `_shape`."""
        given = None if self._ranks is None else self._ranks.mesh_dim_names
        return given or ("replicate", "shard", "tensor")[self.replicas == 1 : 2 + (self._tensor_parallel is not None)]

    def _data_mesh(self) -> DeviceMesh:
        """The ranks over which weights are sharded, and those over which they are replicated."""
        return self._mesh() if self._tensor_parallel is None else self._mesh()[self._names[:-1]]

    def placed(self, stored: Readable) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not stored.shape:
            return stored.read()
        mesh = self._data_mesh()
        rows = chunk_of(stored.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        part = stored.read((rows, *(slice(0, size) for size in stored.shape[1:]))).to(self._parameters_on)
        shape = torch.Size(stored.shape)
        strides = torch.empty(shape, device="meta").stride()
        placements = [Shard(0)] if self.replicas == 1 else [Replicate(), Shard(0)]
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=strides)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        return _held_back(model) if isinstance(model, FSDPModule) else nullcontext()

    def average_gradients(self, parameters: Iterable[Tensor], also: Sequence[float] = ()) -> Sequence[float]:
        from torch.distributed.tensor import DTensor

        # FSDP has reduced the others.
        return super().average_gradients([parameter for parameter in parameters if not isinstance(parameter, DTensor)], also)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        raise DistributedError(
            "a step ended before the batch that reduces its gradients: the loader returned fewer batches than its len() says. "
            "Use a loader with the right len(), or without one."
        )

    def reshard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        # With a number, a module would keep the shards of its forward pass as its parameters.
        for module in () if self.reshard_after_forward is True else model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def _held_back(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _checkpoint(module: nn.Module) -> None:
    # Of torch's functions, this one keeps the names and the structure of the model.
    from torch.distributed._composable.checkpoint_activation import checkpoint

    checkpoint(module)


def _chosen(choice: Choice[nn.Module] | None, model: nn.Module, argument: str) -> list[nn.Module]:
    """Return the chosen modules, outer ones first."""
    if choice is None:
        return []
    return list(named_matches(choice, dict(model.named_modules()), argument=argument, kind="module").values())


def _check_ties(model: nn.Module, chosen: list[nn.Module]) -> None:
    """Raise `ValueError` if one weight belongs to modules that are gathered separately: it would become two weights."""
    owners: dict[int, tuple[str, int]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = [model.get_submodule(module_name.rsplit(".", depth)[0]) for depth in range(module_name.count(".") + 1)]
        owner = id(next((part for part in path if part in chosen), model))
        for name, parameter in module.named_parameters(module_name, recurse=False):
            first, its_owner = owners.setdefault(id(parameter), (name, owner))
            if its_owner != owner:
                raise ValueError(
                    f"{first} and {name} are one weight, and shard= would gather them separately, as two weights. Choose a "
                    "module that holds both, or neither of their modules."
                )


def _check_arrangement(model: nn.Module, expected: set[tuple[int, ...]]) -> None:
    from torch.distributed.tensor import DTensor

    names = " or ".join(sorted(map(str, expected)))
    shapes = {tuple(parameter.device_mesh.shape) for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if shapes - expected:
        raise ValueError(
            f"the model is already sharded over {sorted(map(str, shapes))} ranks; expected {names}. Give a model that is not "
            "sharded, and FsdpDriver(shard=...)."
        )

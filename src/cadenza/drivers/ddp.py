"""The whole model on every rank, and a shard of the data on each: torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cadenza.drivers.group import GroupDriver, Limits, check_above_zero, check_switches
from cadenza.drivers.meta_tensors import materialize
from cadenza.drivers.sharding import is_sharded
from cadenza.drivers.single import is_split
from cadenza.errors import DistributedError
from cadenza.status.formats import counted

# -- batches without a loss ------------------------------------------------------------------------


def backward_of_nothing(parameters: Sequence[Tensor], sparse: set[Tensor]) -> None:
    """Add a gradient of zeros to each parameter, through autograd, so that hooks of the gradients are called.

    Args:
        parameters: The parameters, which require a gradient.
        sparse: Those that have a sparse gradient.
    """
    if parameters:
        marks = [parameter in sparse for parameter in parameters]
        torch.autograd.backward([_Nothing.apply(marks, *parameters)])  # type: ignore[no-untyped-call]


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the tensors without a history to which the gradient of `loss` flows. Numbers are not read."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    ways = [loss.grad_fn]
    while ways:
        node = ways.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.add(leaf)
        ways += [following for following, _ in node.next_functions]
    return found


def sparse_in(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings with sparse gradients."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {embedding.weight for embedding in embeddings if embedding.sparse}


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.sparse, ctx.parameters = sparse, parameters
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *(_zeros(parameter, sparse=sparse) for parameter, sparse in zip(ctx.parameters, ctx.sparse, strict=True))


def _zeros(like: Tensor, *, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(like)
    rows = torch.zeros(1, 0, dtype=torch.long, device=like.device)
    values = like.new_zeros(0, *like.shape[1:])
    return torch.sparse_coo_tensor(rows, values, like.shape, is_coalesced=True, check_invariants=False)


# -- communication hooks ---------------------------------------------------------------------------

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
    calls: dict[int, int] = {}  # by the index of a bucket

    @wraps(hook, assigned=["__name__"], updated=())  # torch rejects annotations that are strings, as in many files
    def called(state, bucket):  # type: ignore[no-untyped-def]
        index = bucket.index()
        calls[index] = count = calls.get(index, 0) + 1
        if count > 1 and not count & (count - 1):  # at calls 2, 4, 8, and so on: a hook may begin late to differ
            _check_same(bucket.parameters(), count)
        return hook(state, bucket)

    del called.__wrapped__
    return state, called


def _check_same(parameters: list[nn.Parameter], call: int) -> None:
    """Raise `DistributedError` if the weights of a bucket differ between ranks. Every rank must call this."""
    lowest = torch.stack([_sum_of_bytes(parameter) for parameter in parameters])
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


class DdpDriver(GroupDriver):
    """Several processes, on one machine or many, each with a whole model: gloo between CPUs, NCCL between CUDA devices.

    An existing process group is used and never destroyed. Otherwise the driver starts one from the variables of torchrun or, if
    they are not set, of SLURM; it ends with the process. Every rank must make a driver.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None takes the CUDA device of this rank if there is one.
        find_unused_parameters: Find after each forward pass the parameters that took no part. Needed if there are any; slower.
        static_graph: Each step uses the same parameters in the same order, which DDP then need not find out anew. Gradients
            are reduced with each batch of an accumulation window, not once a step.
        gradient_as_bucket_view: Gradients are views of the memory in which they are reduced: less memory and one copy less.
        bucket_cap_mb: The size in MiB of the parts in which gradients are reduced. None: torch's default.
        broadcast_buffers: Copy the buffers of rank 0, such as BatchNorm statistics, to all ranks before each forward pass of
            the training. False: they are copied before an evaluation, and by a resume.
        comm_hook: How gradients are reduced: a function ``hook(state, bucket)``, for which `state` is None, or a pair ``(state,
            hook)``; see ``torch.distributed.algorithms.ddp_comm_hooks``. It does not reduce the gradients of a ``step_fn``.
            No checkpoint holds its state, so a run with PowerSGD does not resume bit-identically. It must reduce each gradient
            over all ranks: hooks of local SGD are refused, and weights that differ between ranks are an error.
        process_group: The group of all ranks in which gradients are reduced. None: the default group.
        share_data: Split each loader over the ranks, unless it has a distributed sampler. False: the loaders return
            different shards on each rank, as streams must.
        timeout_s: Seconds to wait for the other ranks, at the start and in each exchange, before an error is raised. A mapping
            sets other limits: ``{"start": 1800, "step": 120, "save": 3600}``. The start ends with the first step of a
            fit, or with the first batch of `Trainer.evaluate` and `Trainer.predict`.

    Raises:
        DistributedError: This process was started alone, or the other ranks cannot be reached.
        TypeError: An argument has a wrong type, such as a `comm_hook` that is no function and no pair.
        ValueError: `process_group` has not all ranks, `comm_hook` is one of local SGD, or a number is not above 0. When a run
            starts: a model on the CPU has SyncBatchNorm layers, or a model is sharded.

    >>> import torch.distributed as dist
    >>> from cadenza.testing import tiny_run
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs no such line
    >>> run = tiny_run(driver=DdpDriver("cpu", find_unused_parameters=True))
    >>> run.driver.world_size, run.outcome.kind
    (1, 'finished')
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        comm_hook: CommHook | tuple[object, CommHook] | None = None,
        process_group: dist.ProcessGroup | None = None,
        share_data: bool = True,
        timeout_s: Limits = 600,
    ) -> None:
        check_switches(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
        )
        if bucket_cap_mb is not None:
            check_above_zero("bucket_cap_mb", bucket_cap_mb, "MiB")
        super().__init__(device, share_data=share_data, timeout_s=timeout_s)
        self.find_unused_parameters = find_unused_parameters
        self.adds_nothing: bool = not static_graph  # which reduces at the end of the first backward pass of the loss
        self._broadcast_buffers, self._comm_hook = broadcast_buffers, state_and_hook(comm_hook)
        self._given = {
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
            "process_group": process_group,
        }
        kinds = (dist.ProcessGroup, int)  # an integer stands for a group without this rank
        if process_group is not None and not isinstance(process_group, kinds):
            raise TypeError(f"process_group must be a group of torch.distributed, or None; got {process_group!r}")
        if process_group is not None and dist.get_world_size(process_group) != self.world_size:
            raise ValueError(
                f"process_group must have all ranks ({self.world_size}), since all train one model; got a group of "
                f"{max(0, dist.get_world_size(process_group))}. Leave it out, or make it with dist.new_group()."
            )
        self._split = False  # whether the model has parts on several devices
        self._wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()

    def prepare(self, model: nn.Module) -> nn.Module:
        self._begin_run()
        self.check_trainable(model)
        if any(map(is_sharded, model.parameters())):
            raise ValueError(
                "DdpDriver needs the whole weights on each rank, and those of this model are shards: FsdpDriver, fully_shard "
                "or parallelize_module was called with it. Use driver='fsdp', or build the model again and load its weights."
            )
        self._split = is_split(model)
        materialize(model, self.device, self.meeting)
        model = model if self._split else model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapper = self._wrappers[id(model)] = _Steady(model, **self._options())
        self._register_hook(wrapper)
        return wrapper

    def renew(self, model: nn.Module) -> None:
        # It waits for the gradients of the parameters that required one when it was made: it would wait forever for parameters
        # that are frozen since, and not reduce those that are trained again. It is made again in place, as others refer to it.
        model = self._wrappers.get(id(model), model)
        if isinstance(model, _Steady):
            training = model.training
            _Steady.__init__(model, model.module, **self._options())
            model.training = training
            self._register_hook(model)

    def _options(self) -> dict[str, Any]:
        options = {"device_ids": [self.device] if self.device.type == "cuda" and not self._split else None, **self._given}
        if not self._broadcast_buffers:
            named = signature(DistributedDataParallel.__init__).parameters
            options["forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers"] = False  # before 2.13
        return {**options, "find_unused_parameters": self.find_unused_parameters}

    def _register_hook(self, wrapper: DistributedDataParallel) -> None:
        if self._comm_hook is not None:
            wrapper.register_comm_hook(*self._comm_hook)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # With a static graph the first backward pass must reduce. All do, so that a run that resumes adds in the same order.
        if isinstance(model, DistributedDataParallel) and not self._given["static_graph"]:
            return model.no_sync()
        return nullcontext()

    def add_no_gradients(self, model: nn.Module, loss: Tensor) -> None:
        if isinstance(model, DistributedDataParallel):
            used = leaves_of(loss) if self.find_unused_parameters else None  # it has seen already which ones are not used
            reduced = [
                parameter
                for name, parameter in model.module.named_parameters()
                if parameter.requires_grad and name not in model.parameters_to_ignore and (used is None or parameter in used)
            ]
            backward_of_nothing(reduced, sparse_in(model.module))

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.average_gradients(parameters)


class _Steady(DistributedDataParallel):
    """DDP with the same buckets of gradients in each step: in the order of the parameters of the model, the last ones first.

    torch has one bucket in the first step, and then makes buckets in the order in which gradients were complete in it. From
    three ranks on, the position in a bucket decides how a sum is rounded. So the first step of a run that resumes would not
    have the bits of the same step in a run that goes on.
    """

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        if callable(push := getattr(self.reducer, "_push_all_rebuilt_params", None)):
            push()
            self.reducer._rebuild_buckets()  # now, and not after the first step

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]

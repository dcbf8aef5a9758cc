"""The common part of the drivers for several processes: start of the process group, and communication between ranks."""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.drivers.base import Driver, Reduction
from cadenza.drivers.collective_check import Comparison
from cadenza.drivers.consensus import Meeting, over_store
from cadenza.drivers.first_error import Failure, Post, Posts, own_client
from cadenza.drivers.rendezvous import (
    MANY,
    NCCL_WAITS_LONGER,
    check_open_files,
    connect_lazily,
    join,
    launched,
    rendezvous_of,
)
from cadenza.errors import DistributedError
from cadenza.loading.batches import Mover
from cadenza.loading.shards import Shard

# -- sums along a tree -----------------------------------------------------------------------------

Combine = Any
"""A function that combines two tensors, and writes the result into its argument ``out``."""
Send = Callable[[Tensor, int], object]
"""Sends a tensor to a rank."""
Receive = Callable[[Tensor, int], object]
"""Waits for a tensor from a rank, and writes it into the given one."""


class Tree:
    """A binary tree of all ranks. Rank r has the children 2r + 1 and 2r + 2, and rank 0 is the root.

    A thread does the sums in the order in which they were started. All ranks must start them in the same order. A sum may
    also be a maximum or a minimum. The thread ends when nothing refers to the tree any more.

    Args:
        rank: The rank of this process.
        ranks: How many there are.
        send: Sends to another rank.
        receive: Receives from another rank.
    """

    def __init__(self, rank: int, ranks: int, send: Send, receive: Receive) -> None:
        self.parent: int | None = (rank - 1) // 2 if rank else None
        self.children: list[int] = [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]
        self._send, self._receive = send, receive
        self._started: SimpleQueue[tuple[Tree, Tensor, Combine, Future[Tensor]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, value: Tensor, combine: Combine = torch.add) -> Callable[[], Tensor]:
        """Start to sum `value` over all ranks; return a function that waits for the sum. Every rank must call this."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._started,), name="cadenza-tree", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._started.put, None)
        sums: Future[Tensor] = Future()
        self._started.put((self, value.clone(memory_format=torch.contiguous_format), combine, sums))

        def arrived() -> Tensor:
            return sums.result()  # not the method: the frame of this function tells that the thread waits for other ranks

        return arrived

    def sum(self, value: Tensor, combine: Combine = torch.add) -> Tensor:
        """Sum `value`, in place, over all ranks."""
        for child in self.children:
            part = value.new_empty(value.shape)
            self._receive(part, child)
            combine(value, part, out=value)
        if self.parent is not None:
            self._send(value, self.parent)
            self._receive(value, self.parent)
        for child in self.children:
            self._send(value, child)
        return value


def _work(started: SimpleQueue[tuple[Tree, Tensor, Combine, Future[Tensor]] | None]) -> None:
    while (work := started.get()) is not None:
        tree, value, combine, sums = work
        try:
            sums.set_result(tree.sum(value, combine))
        except Exception as error:
            sums.set_exception(error)  # the wait for this sum raises it
        del work, tree, value, combine, sums  # the thread does not keep the tree


Limits = float | Mapping[str, float]
"""Seconds to wait for the other ranks; a mapping has other limits for the ``start``, a ``step`` and a ``save``."""
LIMITS = ("start", "step", "save")
_RECORDS = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
_DUMP = "nccl-trace.rank"
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variables of NCCL's flight recorder, by their names in newer and in older versions of torch."""
_TREE_FROM = MANY  # ranks: with fewer, the ring of gloo takes less time than messages that a thread of Python sends
_TREE_UP_TO = 64 * 2**10  # bytes: the ring sends each part of a larger tensor twice, the tree the whole one six times
_LARGEST_EXCHANGE = 64 * 2**20  # bytes: the copies that an exchange needs take no more memory
_SHARED: WeakKeyDictionary[Any, dict[tuple[tuple[float, ...], str], Any]] = WeakKeyDictionary()  # by default group
_SUM = (dist.ReduceOp.SUM, torch.add)
_OPERATIONS = {
    **dict.fromkeys(("mean", "sum", "total"), _SUM),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
}
"""By name, how gloo and the tree reduce."""


class GroupDriver(Driver):
    """One of several processes, on one machine or many: gloo between CPUs, NCCL between CUDA devices.

    An existing process group is used and never destroyed. Otherwise the driver starts one from the variables of torchrun or, if
    they are not set, of SLURM; it ends with the process. Every rank must make a driver. The arguments are those of `DdpDriver`.
    """

    def __init__(self, device: str | None, *, share_data: bool, timeout_s: Limits) -> None:
        self._limits = limits_of(timeout_s)
        check_switches(share_data=share_data)
        kind = type(self).__name__
        if not launched():
            raise DistributedError(
                f"{kind} needs several processes, and this process was started alone: RANK and WORLD_SIZE are not set. Start "
                "it with torchrun --nproc-per-node=2 script.py, or give Trainer(driver='auto')."
            )
        self.share_data: bool = share_data
        self._timeout_s = self._limits["step"]
        at = rendezvous_of()
        self.local_rank: int = at.local_rank if at is not None else int(os.environ.get("LOCAL_RANK", 0))
        self.device: torch.device = _device(device, self.local_rank, kind)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._own: list[Any] = []  # the groups of which this driver sets the time limit
        if dist.is_initialized():
            connect_lazily(dist.get_world_size())
            check_open_files(dist.get_world_size(), 1, serves_store=False, gathers=dist.get_rank() == 0)
        else:
            if at is None:
                raise DistributedError("RANK or WORLD_SIZE is missing: start all processes with torchrun or srun")
            connect_lazily(at.ranks)
            main = at.rank == 0
            check_open_files(at.ranks, 2, serves_store=main and not at.hosted, gathers=main)
            for name, value in _RECORDS.items() if self.device.type == "cuda" else ():
                os.environ.setdefault(name, value)
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            join(at, backend, self._limits["start"], self.device)
            self._own.append(dist.group.WORLD)
            atexit.register(_leave)
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self.reduces: bool = self.world_size > 1
        self.copies: bool = self.reduces and type(self).after_update is Driver.after_update  # which may average now and then
        self._hosts = self._shared("group", self._new_group)
        self._own.append(self._hosts)
        if self._limits["start"] != self._limits["step"]:
            self.after_start: Callable[[], object] | None = partial(self._limit, "step")
        self._tree: Tree | None = self._shared("tree", self._new_tree) if self.world_size >= _TREE_FROM else None
        self._of_data: dict[tuple[int, ...], Any] = {}
        self.to_device: Callable[[Any], Any] = Mover(self.device)
        self._number, self._run = self._count(), 0
        self._failure = Failure(self.rank, self._timeout_s, None if at is None else at.hosted)
        self._failure.enter(0)

    def _begin_run(self) -> None:
        self._run += 1
        if self.after_start is not None:
            self._limit("start")

    def _count(self) -> int:
        """Return the number of drivers that this rank has made in the process group: the same on all ranks."""
        try:
            return int(dist.distributed_c10d._get_default_store().add(f"cadenza/drivers/{self.rank}", 1))
        except (RuntimeError, ValueError):  # a backend without a store
            return 0

    def _shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what all drivers of a process group with one timeout share."""
        shared, key = _SHARED.setdefault(dist.group.WORLD, {}), (tuple(self._limits.values()), name)
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def _new_group(self) -> Any:
        """Return the group in which values are exchanged on the host. Every rank must call this.

        It is not the default group, with which the user's code and the reduction of gradients communicate: no collective of
        theirs can be paired with one of ours. It connects hosts, which does not wait for the device.
        """
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limits["start"]))

    def _limit(self, name: str) -> None:
        """Set how long the ranks wait for each other from now on: as at the start, or as in a step."""
        limit = timedelta(seconds=self._limits[name])
        for group in self._own:
            longer = NCCL_WAITS_LONGER if group is not self._hosts and self.device.type == "cuda" else timedelta()
            dist.distributed_c10d._set_pg_timeout(limit + longer, group)

    def keep_dumps(self, directory: Path) -> None:
        for name in _DUMPS if self.device.type == "cuda" else ():
            if os.environ.get(name, _DUMP).endswith(_DUMP):  # the user has set no other file
                os.environ[name] = str(directory / _DUMP)  # NCCL appends the rank

    def _new_tree(self) -> Tree:
        """Return the tree for small sums: the all-reduce of gloo is a ring."""
        send, receive = partial(dist.send, group=self._hosts), partial(dist.recv, group=self._hosts)
        return Tree(self.rank, self.world_size, send, receive)

    def parcels(self) -> Any:
        return self._shared("parcels", self._new_group)

    def data_group(self, shards: Sequence[int] | None = None) -> Any:
        shards, together = tuple(range(self.data_world_size) if shards is None else shards), self.tensor_parallel
        if len(shards) == self.world_size:
            return None
        if shards not in self._of_data:
            every = [[shard * together + first for shard in shards] for first in range(together)]
            groups = [dist.new_group(ranks, timedelta(seconds=self._timeout_s)) for ranks in every]
            self._of_data[shards] = groups[self.rank % together]
        return self._of_data[shards]

    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        result = value.detach().clone()
        if how == "mean" and not result.is_floating_point():
            result = result.float()
        if how == "sum" and not self.counts:
            result.zero_()
        result = self._reduced(result, how)
        return result / self.world_size if how == "mean" else result

    def _reduced(self, value: Tensor, how: Reduction) -> Tensor:
        """Reduce a tensor of this method's own over all ranks, of which each counts."""
        operation, combine = _OPERATIONS[how]
        if self._tree is not None and value.is_cpu and 0 < value.nbytes <= _TREE_UP_TO:
            return self._tree.start(value, combine)()
        dist.all_reduce(value, operation, group=self._hosts if value.is_cpu else None)
        return value

    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        if self._tree is not None:
            return self._tree.start(value)
        total = value.clone()
        under_way = dist.all_reduce(total, group=self._hosts, async_op=True)

        def arrived() -> Tensor:
            under_way.wait()
            return total

        return arrived

    def any_rank(self, flag: bool) -> bool:
        return bool(self.reduce(torch.tensor(int(flag)), "max"))

    def differing(self, numbers: Tensor, *, of_weights: bool) -> list[int]:
        both = torch.cat([numbers, -numbers])
        most, least = self._most(both, of_weights=of_weights).cpu().chunk(2)
        return (most != -least).nonzero()[:, 0].tolist()

    def _most(self, numbers: Tensor, *, of_weights: bool) -> Tensor:
        """Return the largest of each number over all ranks or, `of_weights`, over those that hold the same weights."""
        return self._reduced(numbers, "max")

    def gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self._hosts)
        return everyone

    def gather_on_main(self, value: Any) -> list[Any]:
        everyone = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, everyone, dst=0, group=self._hosts)
        return everyone or []

    def aside(self) -> Meeting:
        # Through the store: another group would connect each rank with each, and gloo closes a group in which a rank is late.
        meetings = _SHARED.setdefault(dist.group.WORLD, {}).setdefault(
            ((), "meetings"), count()
        )  # their last keys stay in the store
        name = f"cadenza/meetings/{next(meetings)}"
        if (store := self._own_store("save")) is None:
            return self.meeting
        watch = None if (posts := self._failure.posts) is None else posts.watch
        return over_store(store, name, self.rank, self.world_size, watch)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        parcel = [value]
        dist.broadcast_object_list(parcel, src=source, group=self._hosts, device=torch.device("cpu"))
        return value if self.rank == source else parcel[0]

    def barrier(self) -> None:
        self.any_rank(False)

    def check_trainable(self, model: nn.Module) -> None:
        if self.device.type == "cpu" and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise ValueError(
                "SyncBatchNorm trains on GPUs only, and the ranks are on the CPU: expected BatchNorm layers there. Leave out "
                "ConvertSyncBatchNorm and torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
            )

    def data_shard(self) -> Shard:
        return replace(super().data_shard(), share_data=self.share_data)

    def average_gradients(self, parameters: Iterable[Tensor], also: Sequence[float] = ()) -> Sequence[float]:
        held, sparse = list(parameters), self.world_size + 1  # a sum above the number of ranks: sparse on one of them
        if not held and not also:
            return also
        own = [
            sparse if parameter.grad is not None and parameter.grad.is_sparse else parameter.grad is not None
            for parameter in held
        ]
        sums = torch.tensor([*(number * self.counts for number in also), *own], dtype=torch.float64)
        sums = self._reduced(sums, "total")
        dense: list[Tensor] = []
        for parameter, layout in zip(held, sums[len(also) :].tolist(), strict=True):
            if layout and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            if 0 < layout < sparse and gradient is not None:
                dense.append(gradient)
            elif layout >= sparse and gradient is not None:
                parameter.grad = gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
                self._average(gradient)
        exchange_flat(dense, self._average)
        return sums[: len(also)].tolist()

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= self.world_size

    def share_buffers(self, model: nn.Module) -> None:
        self.share_tensors(self.unwrap(model).buffers())

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        exchange_flat(tensors, lambda flat: dist.broadcast(flat, src=0, group=self._hosts if flat.is_cpu else None))

    @contextmanager
    def watched(
        self,
        look: Callable[[], Post],
        also: Callable[[], object] = lambda: None,
        *,
        most_s: float = math.inf,
        summary: Path | None = None,
    ) -> Iterator[None]:
        if self.world_size == 1 or self._failure.posts is not None or (store := self._own_store()) is None:
            yield  # an evaluation in a callback is a part of the run
            return
        name = f"cadenza/posts/{self._number}/{self._run}"
        more: dict[str, Any] = {"most_s": most_s, "waits_seen": self.device.type == "cpu", "summary": summary}
        try:
            with Posts(store, name, self.rank, self.world_size, look, also, **more) as posts:
                self._failure.posts = posts
                yield
        finally:
            self._failure.posts = None

    @contextmanager
    def compared(self, limit_s: float, caller: Callable[[], tuple[str, str]], warn: Callable[[str], object]) -> Iterator[None]:
        if (posts := self._failure.posts) is None:
            yield
            return
        name = f"cadenza/calls/{self._number}/{self._run}"
        limits = {"limit_s": limit_s, "timeout_s": self._timeout_s}
        tree, self._tree = self._tree, None  # its messages are no collectives, which alone are compared
        try:
            with Comparison(self._own_store, name, self._failed, posts, caller, rank=self.rank, warn=warn, **limits).patched():
                yield
        finally:
            self._tree = tree

    @property
    def _failed(self) -> str:
        """The key of the error with which a rank ended the run."""
        return f"cadenza/failed/{self._number}/{self._run}"

    @contextmanager
    def entering(self, where: str) -> Iterator[None]:
        number = self._failure.enter()
        try:
            yield
        except RuntimeError as error:
            if (told := self._failure.absent(error, where, number, self.world_size)) is None:
                raise
            raise told from error

    def error_at_end(self, error: BaseException | None) -> BaseException | None:
        if error is not None:
            self.first_error(error)  # the others read it
        try:
            failed = self.any_rank(error is not None)
        except RuntimeError as lost:
            return error or lost
        return self._failure.told(self._failed) if failed and error is None else error

    def first_error(self, error: BaseException) -> BaseException:
        return self._failure.first_error(error, self._failed)

    def _own_store(self, limit: str = "step") -> Any:
        try:
            return own_client(dist.distributed_c10d._get_default_store(), self._limits[limit])
        except (RuntimeError, ValueError):  # a backend without a store
            return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.device)!r}, rank {self.rank} of {self.world_size})"


def exchange_flat(tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """Call `exchange` with tensors of one dtype and device as one vector, at most 64 MiB at a time; copy the result back.

    Larger tensors are exchanged alone.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        groups = alike.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(group.nbytes for group in groups[-1]) + tensor.nbytes > _LARGEST_EXCHANGE:
            groups.append([])
        groups[-1].append(tensor)
    with torch.no_grad():
        for group in (group for groups in alike.values() for group in groups if group):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            exchange(flat)
            parts = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)])


def _device(device: str | None, local_rank: int, kind: str) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if device != "cuda":
        raise ValueError(f"device must be 'cpu', 'cuda' or None: each rank uses the device of its local rank; got {device!r}")
    if there == 1:  # the launcher shows each process its own, such as srun --gpus-per-task=1; NCCL refuses one that ranks share
        return torch.device("cuda", 0)
    if local_rank >= there:
        raise DistributedError(
            f"local rank {local_rank} has no CUDA device: this machine has {there}. Start as many processes on this machine as "
            f"it has devices, or use {kind}('cpu')."
        )
    return torch.device("cuda", local_rank)


def _leave() -> None:
    if dist.is_initialized():
        time.sleep(0.05)  # its threads need the interpreter to release their last work, and the next call blocks on them
        dist.destroy_process_group()


def limits_of(timeout_s: object) -> dict[str, float]:
    """Return the time limits in seconds, of the start, of a step and of a save.

    Raises:
        TypeError, ValueError: One is no number above 0, or has another name.
    """
    given: Mapping[Any, Any] = timeout_s if isinstance(timeout_s, Mapping) else dict.fromkeys(LIMITS, timeout_s)
    if unknown := [name for name in given if name not in LIMITS]:
        raise ValueError(f"timeout_s has limits for {', '.join(LIMITS)}; got {unknown[0]!r}")
    for name, value in given.items():
        check_above_zero(f"timeout_s[{name!r}]" if isinstance(timeout_s, Mapping) else "timeout_s", value, "seconds")
    return {name: given.get(name, 600.0) for name in LIMITS}


def check_switches(**given: object) -> None:
    """Raise `TypeError` if an argument is neither True nor False: torch takes the text ``"no"`` for True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def check_above_zero(name: str, value: object, unit: str) -> None:
    """Raise `TypeError` if an argument is no number, and `ValueError` if it is not above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of {unit} greater than 0; got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0 {unit}; got {value!r}")

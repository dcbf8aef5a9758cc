"""What the drivers of several processes share: how they meet, and how they talk to each other."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.drivers.base import Driver, Reduction
from cadenza.drivers.joining import join, launched, place_of
from cadenza.errors import DistributedError
from cadenza.loading.batches import Mover
from cadenza.loading.shards import Share

_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class GroupDriver(Driver):
    """One of several processes, on one machine or many: gloo between CPUs, NCCL between CUDA devices.

    A process group that exists is used, and never destroyed. Else one is started from the variables of torchrun or, without
    them, of SLURM, and ends with the process. Every rank must make one. The arguments are those of `DdpDriver`.
    """

    def __init__(self, device: str | None, *, share_data: bool, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0 seconds; got {timeout_s!r}")
        kind = type(self).__name__
        if not launched():
            raise DistributedError(
                f"{kind} needs several processes, and this one was started alone: RANK and WORLD_SIZE are not set. Start it "
                "with torchrun --nproc-per-node=2 script.py, or give Trainer(driver='auto')."
            )
        self.share_data, self._timeout_s = share_data, timeout_s
        place = place_of()
        self.local_rank = place.local_rank if place is not None else int(os.environ.get("LOCAL_RANK", 0))
        self.device = _device(device, self.local_rank, kind)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            if place is None:
                raise DistributedError("RANK or WORLD_SIZE is missing: start all processes with torchrun or srun")
            join(place, "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", timeout_s)
            atexit.register(_leave)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.reduces = self.world_size > 1
        # What the host alone must know goes between the hosts: the device is not waited for.
        self._hosts = None if "gloo" in dist.get_backend_config() else self._new_group()
        self.to_device = Mover(self.device)
        self._run = 0

    def _new_group(self) -> Any:
        """Return another group of all hosts. Every rank must call this."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))

    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        result = value.detach().clone()
        if how == "mean" and not result.is_floating_point():
            result = result.float()
        dist.all_reduce(result, _OPERATIONS[how], group=self._hosts if result.is_cpu else None)
        return result / self.world_size if how == "mean" else result

    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        total = value.clone()
        under_way = dist.all_reduce(total, group=self._hosts, async_op=True)

        def arrived() -> Tensor:
            under_way.wait()
            return total

        return arrived

    def any_rank(self, flag: bool) -> bool:
        return bool(self.reduce(torch.tensor(int(flag)), "max"))

    def gather(self, value: Any) -> list[Any]:
        return self._gathered(value, self._hosts)

    def aside(self) -> Callable[[Any], list[Any]]:
        return partial(self._gathered, group=self._new_group())

    def _gathered(self, value: Any, group: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    def broadcast(self, value: Any) -> Any:
        parcel = [value]
        dist.broadcast_object_list(parcel, src=0, group=self._hosts, device=torch.device("cpu"))
        return value if self.is_main else parcel[0]

    def barrier(self) -> None:
        self.any_rank(False)

    def share(self) -> Share:
        return replace(super().share(), deals=self.share_data)

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        anywhere = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._hosts)
        for parameter, has_one in zip(trained, anywhere.tolist(), strict=True):
            if has_one:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    def share_buffers(self, model: nn.Module) -> None:
        self.share_tensors(self.unwrap(model).buffers())

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._hosts if tensor.is_cpu else None)

    def first_error(self, error: BaseException) -> BaseException:
        if isinstance(error, DistributedError):
            return error
        own = f"rank {self.rank}: {type(error).__name__}: {error}"
        lost_contact = _is_of_contact(error)
        first = self._first_told(own, wait_s=1.0 if lost_contact else 0.0)
        if lost_contact and first == own:
            error.add_note(
                f"rank {self.rank} lost contact with another process, which ended without a word: killed, or crashed"
            )
        if not lost_contact or first == own:
            return error
        cause = first or "why is shown by the process that ended first"
        return DistributedError(f"another process ended, and so does rank {self.rank}. {cause}")

    def _first_told(self, own: str, wait_s: float) -> str | None:
        """Return what the first rank to fail has told: this one's own, if no other came before within `wait_s` seconds."""
        key, deadline = f"cadenza/failed/{self._run}", time.monotonic() + wait_s
        try:
            store = dist.distributed_c10d._get_default_store()
            while time.monotonic() < deadline and not store.check([key]):
                time.sleep(0.05)
            return store.compare_set(key, "", own).decode()
        except (RuntimeError, ValueError):  # the store was kept by a process that is gone
            return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.device)!r}, rank {self.rank} of {self.world_size})"


def _device(device: str | None, local_rank: int, kind: str) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if device != "cuda":
        raise ValueError(f"device must be 'cpu', 'cuda' or None: each rank takes the CUDA device of its number; got {device!r}")
    if local_rank >= there:
        raise DistributedError(
            f"local rank {local_rank} has no CUDA device of its own: there are {there}. Start as many processes on this "
            f"machine as it has devices, or give {kind}('cpu')."
        )
    return torch.device("cuda", local_rank)


def _is_of_contact(error: BaseException) -> bool:
    """Return whether an error says that another process did not answer: torch has no class for what gloo raises."""
    if isinstance(error, dist.DistError):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in told for word in ("gloo", "nccl", "connection", "peer", "timed out"))


def _leave() -> None:
    if dist.is_initialized():
        time.sleep(0.05)  # its threads let go of their last work: they need the interpreter for it, and it will wait for them
        dist.destroy_process_group()

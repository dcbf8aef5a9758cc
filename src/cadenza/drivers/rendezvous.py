"""How a process finds the other ranks: from the variables that torchrun or SLURM set."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # where torch documents them

from cadenza.errors import DistributedError
from cadenza.status.formats import counted


class Rendezvous(NamedTuple):
    """The rank of this process, and the address at which all ranks meet."""

    rank: int
    local_rank: int
    ranks: int
    host: str
    port: int
    hosted: bool
    """Whether the launcher serves the store of this address; otherwise rank 0 does."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started as a rank of a group, which may have one rank."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= environment.keys() or _in_slurm_step(environment)


def rendezvous_of(environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Read the rank and the address from the environment; None if no variable has them.

    Raises:
        DistributedError: A variable is missing or is not a number.

    >>> rendezvous_of({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    ...           "SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "70123"})
    Rendezvous(rank=5, local_rank=1, ranks=8, host='gpu07', port=30123, hosted=False)
    """
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return Rendezvous(
            _number(environment, "RANK"),
            _number(environment, "LOCAL_RANK", "0"),
            _number(environment, "WORLD_SIZE"),
            environment.get("MASTER_ADDR", "127.0.0.1"),
            _number(environment, "MASTER_PORT", "29500"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if not _in_slurm_step(environment):
        return None
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    return Rendezvous(
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_LOCALID", "0"),
        _number(environment, "SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS")),
        environment.get("MASTER_ADDR", _first_host(nodes)),
        # All processes of a job derive the same port; two jobs on one machine derive different ports.
        _number(environment, "MASTER_PORT", str(20000 + _number(environment, "SLURM_JOB_ID", "0") % 20000)),
        hosted=False,
    )


NCCL_WAITS_LONGER = timedelta(seconds=60)
"""NCCL ends a process in which a collective waits too long. Before, the exchange on the hosts names the rank that is late."""


MANY = 16
"""From so many ranks on, connections and sums follow a tree: with fewer, the ring of gloo takes less time."""
_FILES_OF_GROUP = 4  # of gloo, beside a connection to each rank
_OTHER_FILES = 12  # clients of the store, and the files of a checkpoint that is being written


def connect_lazily(ranks: int) -> None:
    """Let gloo connect two of many ranks when they first exchange a value, and not all with all at the start."""
    if ranks >= MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _connections(ranks: int, *, gathers: bool) -> int:
    """Return to how many ranks a group may connect this one: all, or those of rings, trees and broadcasts."""
    lazily = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "t", "true", "y", "yes")
    return min(ranks, 4 * ranks.bit_length()) if lazily and ranks >= MANY and not gathers else ranks


def check_open_files(ranks: int, groups: int, *, serves_store: bool, gathers: bool) -> None:
    """Check that this process may open the files that its connections to the other ranks need.

    Args:
        ranks: The number of ranks.
        groups: The number of process groups that it will make.
        serves_store: Whether each rank connects to its store, with two clients.
        gathers: Whether values of all ranks are brought to this one.

    Raises:
        DistributedError: ``ulimit -n`` is too small.
    """
    try:
        import resource

        limit, there = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # not on this system
        return
    to_each = [_connections(ranks, gathers=gathers and group == 0) for group in range(groups)]
    needed = there + sum(to_each) + groups * _FILES_OF_GROUP + 2 * ranks * serves_store + _OTHER_FILES
    if 0 <= limit < needed:
        raise DistributedError(
            f"this process may have no more than {limit} open files, and needs {needed}: it has {there}, and "
            f"{counted(groups, 'group')} of {counted(ranks, 'rank')} {'keeps' if groups == 1 else 'keep'} {sum(to_each)} "
            f"connections to other ranks. Raise it before the start, as with ulimit -n {2 * needed}."
        )


def join(at: Rendezvous, backend: str, timeout_s: float, device: torch.device | None = None) -> None:
    """Start the process group of all ranks. With a CUDA device, NCCL connects them now, and not in the first step.

    Raises:
        DistributedError: The other ranks cannot be reached within `timeout_s` seconds.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        keeps = at.rank == 0 and not at.hosted
        store = TCPStore(at.host, at.port, at.ranks, keeps, timeout, wait_for_workers=False)
        prefixed = PrefixStore(f"cadenza/{_meeting(store, at, timeout_s)}", store)
        limit = timeout if backend == "gloo" else timeout + NCCL_WAITS_LONGER
        of_device: dict[str, Any] = {"device_id": device} if device is not None and device.type == "cuda" else {}
        dist.init_process_group(backend, store=prefixed, rank=at.rank, world_size=at.ranks, timeout=limit, **of_device)
    except (RuntimeError, ValueError, TimeoutError) as error:  # torch's own errors of distribution are of the first kind
        raise DistributedError(
            f"rank {at.rank} of {at.ranks} could not reach the other ranks at {at.host}:{at.port} within {timeout_s:g} "
            f"s: {error}. Check that all processes were started, that MASTER_ADDR and MASTER_PORT name a machine and a free "
            "port that every machine can reach, and that no firewall blocks the port."
        ) from error


def _meeting(store: Store, at: Rendezvous, timeout_s: float) -> str:
    """Return a name that only the processes of this start have.

    After a restart the launcher's store still holds the addresses of processes that have ended.
    ``TORCHELASTIC_RESTART_COUNT`` does not distinguish the starts: each machine has its own count, and does not count a restart
    that followed the failure of another machine. Rank 0 therefore draws a name and sends it to every process that has arrived.
    Processes that have ended may be among these; they do not answer.
    """
    arrivals = PrefixStore("cadenza/arrivals", store)
    if at.rank == 0:
        return _welcomed(arrivals, at.ranks - 1, timeout_s)
    own = uuid.uuid4().hex
    arrivals.set(f"number {arrivals.add('came', 1)}", own)
    name: str = arrivals.get(f"welcome {own}").decode()
    arrivals.add(f"answered {name}", 1)
    return name


def _welcomed(arrivals: Store, others: int, timeout_s: float) -> str:
    """Send a new name to all other ranks, and return it when all have answered.

    Raises:
        TimeoutError: A rank did not answer in time.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    read: int = arrivals.add("read", 0)  # an earlier rank 0 has answered those before; all of them have ended
    while (answered := arrivals.add(f"answered {name}", 0)) < others:
        arrived = [f"number {number}" for number in range(read + 1, arrivals.add("came", 0) + 1)]
        if arrived and arrivals.check(arrived):  # one that has just come sets its number a moment later
            welcomes = [f"welcome {own.decode()}" for own in arrivals.multi_get(arrived)]
            cast("Any", arrivals).multi_set(welcomes, [name] * len(welcomes))
            read = arrivals.add("read", len(welcomes))
        elif time.monotonic() > deadline:
            raise TimeoutError(f"{answered} of {others} other processes arrived")
        else:
            time.sleep(0.005)
    return name


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    # The shell of a batch script has SLURM_PROCID too; only processes that srun starts belong to a step.
    return {"SLURM_PROCID", "SLURM_STEP_ID"} <= environment.keys() and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes, such as ``gpu[07-09],big1``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "127.0.0.1" if found is None else f"{found[1]}{found[2] or ''}{found[3] or ''}"


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise DistributedError(
            f"{name} must be a whole number when several processes are started; got {text!r}. Use torchrun or srun."
        ) from None

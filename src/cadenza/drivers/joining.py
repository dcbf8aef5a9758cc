"""How a process finds the others: from the variables that torchrun or SLURM set."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # where torch documents them

from cadenza.errors import DistributedError


class Place(NamedTuple):
    """This process among all, and where they meet."""

    rank: int
    local_rank: int
    ranks: int
    host: str
    port: int
    hosted: bool
    """Whether the launcher keeps the place where they meet; else rank 0 does."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started as one of several, or of what may be several."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= environment.keys() or _in_slurm_step(environment)


def place_of(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place by its environment; None if nobody says.

    Raises:
        DistributedError: A variable is missing, or is no number.

    >>> place_of({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    ...           "SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "70123"})
    Place(rank=5, local_rank=1, ranks=8, host='gpu07', port=30123, hosted=False)
    """
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return Place(
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
    return Place(
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_LOCALID", "0"),
        _number(environment, "SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS")),
        environment.get("MASTER_ADDR", _first_host(nodes)),
        # All processes of a job think of the same port, and two jobs on a machine of another one.
        _number(environment, "MASTER_PORT", str(20000 + _number(environment, "SLURM_JOB_ID", "0") % 20000)),
        hosted=False,
    )


def join(place: Place, backend: str, timeout_s: float) -> None:
    """Start the process group of all processes.

    Raises:
        DistributedError: The others cannot be reached within `timeout_s` seconds.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        keeps = place.rank == 0 and not place.hosted
        store = TCPStore(place.host, place.port, place.ranks, keeps, timeout, wait_for_workers=False)
        prefixed = PrefixStore(f"cadenza/{_meeting(store, place, timeout_s)}", store)
        dist.init_process_group(backend, store=prefixed, rank=place.rank, world_size=place.ranks, timeout=timeout)
    except (RuntimeError, ValueError, TimeoutError) as error:  # torch's own errors of distribution are of the first kind
        raise DistributedError(
            f"rank {place.rank} of {place.ranks} could not meet the others at {place.host}:{place.port} within {timeout_s:g} "
            f"s: {error}. Check that all processes were started, that MASTER_ADDR and MASTER_PORT name a machine and a free "
            "port that every machine can reach, and that no firewall is between them."
        ) from error


def _meeting(store: Store, place: Place, timeout_s: float) -> str:
    """Return a name that exactly the processes of this start have in common.

    After a restart the launcher's store still holds the addresses of processes that are gone, and
    ``TORCHELASTIC_RESTART_COUNT`` does not tell the starts apart: each machine counts for itself, and does not count that it
    was started again because another one failed. So rank 0 draws a name and welcomes whoever has come. Processes that are
    gone may be among them; they do not answer.
    """
    arrivals = PrefixStore("cadenza/arrivals", store)
    if place.rank == 0:
        return _welcomed(arrivals, place.ranks - 1, timeout_s)
    own = uuid.uuid4().hex
    arrivals.set(f"number {arrivals.add('came', 1)}", own)
    name: str = arrivals.get(f"welcome {own}").decode()
    arrivals.add(f"answered {name}", 1)
    return name


def _welcomed(arrivals: Store, others: int, timeout_s: float) -> str:
    """Return the name that all others were told.

    Raises:
        TimeoutError: Some did not come.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    read: int = arrivals.add("read", 0)  # those before were welcomed by a rank 0 that is gone, as they are
    while (answered := arrivals.add(f"answered {name}", 0)) < others:
        if arrivals.check([f"number {read + 1}"]):
            read = arrivals.add("read", 1)
            arrivals.set(f"welcome {arrivals.get(f'number {read}').decode()}", name)
        elif time.monotonic() > deadline:
            raise TimeoutError(f"{answered} of {others} other processes came")
        else:
            time.sleep(0.005)
    return name


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    # The shell of a batch script has SLURM_PROCID too; only what srun starts belongs to a step.
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
            f"{name} must be a whole number where several processes are started; got {text!r}. Use torchrun or srun."
        ) from None

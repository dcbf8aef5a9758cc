"""Log the memory and load of the device, the process and the machine."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cadenza.errors import MissingExtraError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic

if TYPE_CHECKING:
    from cadenza.run import Run

_GIB = 1 << 30


class DeviceStats(Callback):
    """Log the memory and load of the device and of this process, on the main rank. It does not wait for the device.

    It logs, in GiB and percent:

    - on CUDA, ``device/memory_allocated_gib``, ``device/memory_reserved_gib`` and ``device/memory_peak_gib`` of the allocator
      of torch, and ``device/allocation_retries``: how often it freed its cache because memory was short. Peak and retries count
      from the last time, so the peak of torch is reset. With pynvml, ``device/utilization_percent``, if the driver reports it;
    - on MPS, ``device/memory_allocated_gib`` and ``device/memory_driver_gib``;
    - on every device, ``process/memory_gib``, the resident memory of this process without its workers, or
      ``process/memory_peak_gib`` on systems that report only the peak; and ``process/cpu_percent`` since the last time,
      where one busy core is 100;
    - with `machine`, ``machine/memory_percent`` and ``machine/cpu_percent`` since the last time, where all cores are 100.

    With multiple ranks: measures only the device, process and machine of the main process; it does not communicate.

    Args:
        every: The interval: ``50`` (steps), ``"1 epoch"``, ``"30 s"``.
        machine: Log the whole machine too. This needs psutil.

    Raises:
        MissingExtraError: `machine` is True and psutil is not installed.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[DeviceStats("2 steps")], steps=4)
    >>> run.history.names, [step for step, _ in run.history["process/memory_gib"]]
    (['process/memory_gib', 'process/cpu_percent'], [2, 4])
    """

    def __init__(self, every: Interval = "50 steps", *, machine: bool = False) -> None:
        if machine and find_spec("psutil") is None:
            raise MissingExtraError("psutil", needed_by="DeviceStats(machine=True)", extra="stats")
        self.every: Schedule = Schedule.parse(every)
        self.machine: bool = machine
        self._mark = (0.0, 0.0)
        self._has_utilization = False
        self._retries = 0

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, self.log)]

    def on_fit_start(self, run: Run) -> None:
        self._mark = (time.perf_counter(), time.process_time())
        if run.device.type == "cuda":
            self._retries = _retries(run.device)
        if self.machine:
            _of_machine()  # psutil measures the load since the last call
        self._has_utilization = run.device.type == "cuda" and _has_utilization(run)

    def log(self, run: Run) -> None:
        """Log now."""
        if not run.is_main:
            return
        run.log(dict(_of_device(run.device)))
        if run.device.type == "cuda":
            before, self._retries = self._retries, _retries(run.device)
            run.log("device/allocation_retries", self._retries - before)
        if self._has_utilization:
            run.log("device/utilization_percent", torch.cuda.utilization(run.device))
        run.log(dict(_of_process()))
        (began, used), now = self._mark, (time.perf_counter(), time.process_time())
        self._mark = now
        run.log("process/cpu_percent", 100 * (now[1] - used) / max(now[0] - began, 1e-9))
        if self.machine:
            run.log(dict(_of_machine()))


def _of_device(device: torch.device) -> dict[str, float]:
    match device.type:
        case "cuda":
            sizes = {
                "allocated": torch.cuda.memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "peak": torch.cuda.max_memory_allocated(device),
            }
            torch.cuda.reset_peak_memory_stats(device)
        case "mps":
            sizes = {"allocated": torch.mps.current_allocated_memory(), "driver": torch.mps.driver_allocated_memory()}
        case _:
            sizes = {}
    return {f"device/memory_{name}_gib": size / _GIB for name, size in sizes.items()}


def _retries(device: torch.device) -> int:
    """Return how often the allocator of torch has freed its cache because memory was short."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _of_process() -> dict[str, float]:
    # Linux reports pages. Elsewhere psutil reports bytes; without psutil only the peak is available.
    statm = Path("/proc/self/statm")
    if statm.exists():
        return {"process/memory_gib": int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB}
    if find_spec("psutil") is not None:
        import psutil

        return {"process/memory_gib": psutil.Process().memory_info().rss / _GIB}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    return {"process/memory_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _GIB}  # bytes on macOS


def _of_machine() -> dict[str, float]:
    import psutil

    return {"machine/memory_percent": psutil.virtual_memory().percent, "machine/cpu_percent": psutil.cpu_percent()}


def _has_utilization(run: Run) -> bool:
    if find_spec("pynvml") is None:
        return False
    try:
        torch.cuda.utilization(run.device)
    except Exception as error:  # NVML's own classes; a part of a GPU (MIG) has no utilization
        run.warn(f"DeviceStats leaves out the utilization of {run.device}, because it cannot be read: {error!r}")
        return False
    return True

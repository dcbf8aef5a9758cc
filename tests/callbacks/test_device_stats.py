"""DeviceStats: what the system says of this very process and machine."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import DeviceStats
from cadenza.callbacks.device_stats import _of_device
from cadenza.errors import MissingExtraError, ScheduleError
from cadenza.testing import tiny_run

GIB = 1 << 30


def test_the_memory_of_the_process_is_what_psutil_says_and_grows_with_a_tensor() -> None:
    kept: list[torch.Tensor] = []

    @on(Callback.on_step_end, at=2)
    def fill(run: Run) -> None:
        kept.append(torch.ones(64 << 20, dtype=torch.uint8))

    run = tiny_run(callbacks=[fill, DeviceStats("1 step")], steps=2)
    (_, before), (_, after) = run.history["process/memory_gib"]
    assert after - before == pytest.approx(1 / 16, rel=0.2)
    assert after == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.2)


def test_a_process_that_works_is_busy() -> None:
    @on(Callback.on_step_start)
    def work(run: Run) -> None:
        sum(range(300_000))

    run = tiny_run(callbacks=[work, DeviceStats("2 steps")], steps=4)
    assert [step for step, _ in run.history["process/cpu_percent"]] == [2, 4]
    assert all(value > 0 for _, value in run.history["process/cpu_percent"])


def test_on_request_the_whole_machine_is_looked_at() -> None:
    run = tiny_run(callbacks=[DeviceStats("1 step", machine=True)], steps=2)
    assert run.history.names == [
        "process/memory_gib",
        "process/cpu_percent",
        "machine/memory_percent",
        "machine/cpu_percent",
    ]
    assert 0 < run.history.latest["machine/memory_percent"] <= 100
    assert 0 <= run.history.latest["machine/cpu_percent"] <= 100


def test_without_psutil_the_process_is_logged_and_the_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert tiny_run(callbacks=[DeviceStats("1 step")], steps=1).history.names == ["process/memory_gib", "process/cpu_percent"]
    with pytest.raises(MissingExtraError, match=r"needs the package 'psutil'.*pip install 'cadenza\[stats\]'"):
        DeviceStats(machine=True)


@pytest.mark.parametrize(("psutil_there", "name"), [(True, "process/memory_gib"), (False, "process/memory_peak_gib")])
def test_without_proc_the_next_best_value_is_logged(monkeypatch: pytest.MonkeyPatch, psutil_there: bool, name: str) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    if not psutil_there:
        monkeypatch.setitem(sys.modules, "psutil", None)
    assert tiny_run(callbacks=[DeviceStats("1 step")], steps=1).history.names == [name, "process/cpu_percent"]


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert _of_device(torch.device("cpu")) == {}


# -- devices that this machine may not have: what is made of the numbers ------------------------------


def test_on_cuda_the_numbers_of_the_allocator_are_logged_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("memory_allocated", 1), ("memory_reserved", 2), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size * GIB)
    assert _of_device(torch.device("cuda", 1)) == {
        "device/memory_allocated_gib": 1,
        "device/memory_reserved_gib": 2,
        "device/memory_peak_gib": 3,
    }


def test_on_mps_the_available_numbers_are_logged_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    assert _of_device(torch.device("mps")) == {"device/memory_allocated_gib": 1, "device/memory_driver_gib": 2}


def test_a_cadence_that_is_none_is_an_error() -> None:
    with pytest.raises(ScheduleError):
        DeviceStats("often")

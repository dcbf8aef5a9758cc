"""The benchmarks work, and the one of the peers refuses what ends elsewhere. No time is asserted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.testing import launch
from tests import forked

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def worker(module: Callable[[str], Any]) -> Any:
    return module("peers.worker")


def test_the_command_measures_cadenza_beside_the_loop_by_hand(tmp_path: Path) -> None:
    columns = ["sgd", "evaluation"]
    choice = ["--only", "Cadenza", "--workloads", *columns, "--results", str(tmp_path)]
    assert "| Cadenza |" in forked.run(BENCHMARKS / "peers.py", "--quick", *choice, folder=tmp_path)
    cells = json.loads((tmp_path / "performance.json").read_text(encoding="utf-8"))["rows"]["Cadenza"]
    assert set(cells) == set(columns)
    assert all(cell["ratio"] > 0 for cell in cells.values())  # none was refused


@pytest.mark.parametrize("row", ["Cadenza", "Cadenza, optimizer instance"])
@pytest.mark.parametrize("name", ["adamw", "defaults", "log", "accumulate_4", "epochs_of_10", "heard_10", "idle_50", "middle"])
def test_every_training_ends_with_the_weights_of_the_loop_by_hand(worker: Any, row: str, name: str) -> None:
    cell = worker.measured(row, worker.WORKLOADS[name], rounds=1, steps=20)
    assert "refused" not in cell
    assert cell["apart"] < 1e-6
    if row != "Cadenza" or name not in ("adamw", "middle"):  # there the optimizer may be fused
        assert cell["apart"] == 0


def test_each_flipped_bit_is_found_and_a_clean_step_is_not_reported(module: Callable[[str], Any]) -> None:
    replay_check = module("replay_check")
    assert replay_check.found(["gradient"], 5) == (5, 5, True)
    assert replay_check.alarms(5) == (5, 0)
    assert replay_check.cost(40, 8)[1] > 0


def test_loops_of_ones_own_end_with_the_weights_of_the_loop_by_hand(module: Callable[[str], Any]) -> None:
    own_loops = module("own_loops")
    assert own_loops.measured(rounds=1, steps=100).keys() == own_loops.LOOPS.keys()  # raises if a loop ends elsewhere


@pytest.mark.parametrize("workload", ["sgd", "evaluation"])
def test_a_training_without_the_last_batch_and_an_evaluation_with_another_loss_are_refused(
    worker: Any, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = importlib.import_module("peers.with_hands")

    def train_less(job: Any) -> None:
        hands.train(replace(job, batches=job.batches[:-1]))
        job.model(job.batches[-1][0])  # the forward pass is timed like the others

    others = {
        "sgd": worker.Peer(train_less, hands.evaluate),
        "evaluation": worker.Peer(hands.train, lambda job: hands.evaluate(job) + 0.001),
    }
    monkeypatch.setattr(worker, "peer_of", {**hands.PEERS, "other": others[workload]}.__getitem__)
    assert "elsewhere" in worker.measured("other", worker.WORKLOADS[workload], rounds=1, steps=20)["refused"]


def test_the_benchmark_of_the_report_writes_runs_that_the_report_reads(module: Callable[[str], Any], tmp_path: Path) -> None:
    benchmark = module("report")
    used, busy, size = benchmark.measured(benchmark.Case(runs=3, metrics=3, records=40), tmp_path)
    assert min(used, busy) > 0
    assert size == (tmp_path / "report.html").stat().st_size
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure data-chart=") == 3
    assert "optimizer.lr" in page
    assert "watched by Checkpoint" in page


def test_the_benchmark_of_several_ranks_does_both_jobs_in_each_way(module: Callable[[str], Any], tmp_path: Path) -> None:
    benchmark = module("distributed")
    chosen = [key for key in benchmark.ways() if key[1].startswith(("by hand", "Cadenza"))]  # the others import for seconds

    def work() -> Any:  # raises if a way ends with other weights
        return benchmark.measured(chosen, "tiny", rounds=1, steps=51, place=tmp_path)

    times = launch(work)[0]
    assert times.keys() == set(chosen)
    assert "| tiny | usual | by hand | " in "\n".join(benchmark.rows(times, "tiny"))


def test_the_table_of_a_gpu_has_a_row_for_each_way_and_the_stall_of_a_save(module: Callable[[str], Any]) -> None:
    """On the CPU: the columns that a GPU has are empty."""
    rows = module("gpu").measured("mlp", 1, 12, torch.device("cpu"), 1.0, small=True)
    assert [row.split(" | ")[1] for row in rows] == [
        *("by hand", "by hand, again", "Cadenza", "Cadenza, usual callbacks"),
        "stall of a save",
    ]
    assert all(float(row.split(" | ")[2]) > 0 for row in rows[:4])

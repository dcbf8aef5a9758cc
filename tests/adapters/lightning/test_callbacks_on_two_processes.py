"""The callbacks of Lightning on two processes: one launch for all of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ThroughputMonitor, Timer
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch.optim.lr_scheduler import ExponentialLR

from cadenza.callbacks import Checkpoint, Evaluate, LearningRate
from cadenza.testing import launch
from tests.adapters.lightning.home import Recorder
from tests.distributed.parts import judged, loader, own_rank, trainer


class Talk(pl.Callback):
    """Uses the methods that communicate."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        strategy.barrier()
        own = torch.tensor([float(rank)])
        self.found = [
            (rank, trainer.local_rank, trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.is_global_zero),
            strategy.broadcast(rank),
            strategy.broadcast(rank, src=1),
            [strategy.reduce(own, reduce_op=way).item() for way in ("mean", "sum", "max")],
            strategy.all_gather(own).tolist(),
            [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)],
        ]


class StopOnOne(pl.Callback):
    """Stops in the fourth step, on the second process alone."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4:
            trainer.should_stop = True


def ran(*callbacks: Any, every: str = "1 epoch", **arguments: Any) -> Any:
    evaluate = Evaluate(loader(8, shuffle=False), compute=judged, every=every)
    return trainer(callbacks=[evaluate, *callbacks], **{"max_epochs": 3, **arguments}).fit()


def on_two(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    warnings.filterwarnings("ignore", "When using the `ThroughputMonitor`")
    talk, recorder, stop = Talk(), Recorder(), EarlyStopping("val_loss", patience=1, min_delta=100.0)
    found["steps"] = ran(talk, recorder, stop, max_epochs=9).progress.step
    found["talk"], found["hooks"], found["waited"] = talk.found, recorder.calls, stop.wait_count
    found["stopped on one"] = ran(StopOnOne(), every="1 step").progress.step
    found["stopped inside"] = ran(StopOnOne()).progress.step

    monitor = LearningRateMonitor("step")
    schedule: Any = LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5))
    throughput, stats = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2), DeviceStatsMonitor()
    run = ran(schedule, monitor, throughput, stats, max_epochs=1)
    found["rates"] = (monitor.lrs, run.history["lr-SGD"])
    found["names"] = sorted(name for name in run.history.names if "_percent" in name or "per_sec" in name)
    found["timer"] = ran(Timer(duration={"seconds": 0}, verbose=False)).progress.step
    ran(SpikeDetection(warmup=100, exclude_batches_path=folder), max_epochs=1)

    def resumed(steps: int, resume: Any = False) -> Any:
        stop = EarlyStopping("val_loss", patience=2, min_delta=100.0)
        settings: dict[str, Any] = {"directory": f"{folder}/run", "max_epochs": None, "max_steps": steps}
        run = trainer(
            callbacks=[Evaluate(loader(8, shuffle=False), compute=judged), stop, Checkpoint(every=1)], **settings
        ).fit(resume=resume)
        return run.progress.step, stop.wait_count

    found["cut"], found["resumed"] = resumed(6), resumed(30, "auto")
    found["rank"] = own_rank()
    return found


def test_callbacks_of_lightning_on_two_processes(tmp_path: Any) -> None:
    first, second = launch(lambda: on_two(str(tmp_path)), timeout_s=120)
    assert (first["rank"], second["rank"]) == (0, 1)
    # 24 samples in batches of 4 make 3 steps an epoch on two processes.
    for found in (first, second):
        assert (found["steps"], found["waited"]) == (6, 1)
        assert (found["stopped on one"], found["stopped inside"]) == (4, 5)  # all ranks log in step 4 of the first
        assert found["rates"] == first["rates"]
        assert found["rates"][0] == {"lr-SGD": [0.05, 0.025, 0.0125]}
        assert [value for _, value in found["rates"][1]] == [0.05, 0.025, 0.0125]
        assert found["timer"] == 0
        assert (found["cut"], found["resumed"]) == ((6, 1), (9, 2))
    own = [call[:-1] if isinstance(call[-1], float) else call for call in first["hooks"]]
    assert own == [call[:-1] if isinstance(call[-1], float) else call for call in second["hooks"]]
    assert own[-1][0] == "teardown"
    assert {name.partition("/")[0] for name in first["names"]} >= {"train", "DeviceStatsMonitor.on_train_batch_start"}
    assert first["talk"] == [(0, 0, 2, 2, 1, True), 0, 1, [0.5, 1.0, 1.0], [[0.0], [1.0]], [False, True]]
    assert second["talk"] == [(1, 1, 2, 2, 1, False), 0, 1, [0.5, 1.0, 1.0], [[0.0], [1.0]], [False, True]]

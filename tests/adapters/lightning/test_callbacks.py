"""The callbacks of Lightning have the effect that they have in Lightning's own trainer, on one process and on two."""

from __future__ import annotations

import csv
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ExponentialLR

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate
from cadenza.sinks import ProgressBar
from cadenza.testing import launch
from tests.adapters.lightning.home import (
    Lit,
    Recorder,
    at_home,
    batches_of,
    by_lightning,
    loader_of,
    model_of,
    native,
    native_trainer,
    optimizer_of,
)
from tests.distributed.parts import judged, loader, own_rank, trainer

STOPS: list[dict[str, Any]] = [
    {"monitor": "val_loss", "patience": 1, "min_delta": 0.01},
    {"monitor": "val_loss", "stopping_threshold": 0.9},
    {"monitor": "val_loss", "divergence_threshold": 0.1},
    {"monitor": "val_loss", "mode": "max", "patience": 2},
    {"monitor": "train_loss", "patience": 1, "min_delta": 0.3, "check_on_train_epoch_end": True},
    {"monitor": "missing", "strict": False},
]


@pytest.mark.parametrize("every", ["1 epoch", "2 steps"])
@pytest.mark.parametrize("arguments", STOPS, ids=str)
def test_early_stopping_stops_at_the_same_step(tmp_path: Path, arguments: dict[str, Any], every: str) -> None:
    home, here = EarlyStopping(**arguments), EarlyStopping(**arguments)
    interval: dict[str, Any] = {} if every == "1 epoch" else {"val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = at_home([home], tmp_path, max_epochs=6, **interval)
    run = native([here], max_epochs=6, every=every)
    assert run.progress.step == trainer.global_step
    own, theirs = here.state_dict(), home.state_dict()
    torch.testing.assert_close(own.pop("best_score"), theirs.pop("best_score"), check_device=False)
    assert own == theirs
    if run.outcome is not None and run.outcome.kind == "stopped":
        assert [one.who for one in run.decisions if one.what == "stopped"] == ["EarlyStopping"]


def test_early_stopping_stops_for_a_value_that_is_not_finite() -> None:
    here = EarlyStopping("val_loss", check_finite=True)

    class Spoil(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics["val_loss"] = torch.tensor(math.nan)

    run = native([Spoil(), here], max_epochs=5)
    assert (run.progress.epoch, here.stopping_reason.name) == (1, "NON_FINITE_METRIC")


def test_a_monitor_that_is_missing_gives_lightnings_message_with_our_names() -> None:
    with pytest.raises(RuntimeError, match=r"`val_acc` which is not available.*`eval/loss`, `val_loss`, `train_loss`"):
        native([EarlyStopping("val_acc")])


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_the_learning_rate_monitor_logs_the_same_values(tmp_path: Path, per: str, interval: Any) -> None:
    class Scheduled(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": per}}

    home, here = (LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True) for _ in range(2))
    logger = CSVLogger(tmp_path)
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "callbacks": [home]}
    trainer = by_lightning(Scheduled(), loader_of(3), loader_of(2, 2), **settings)
    run = native([LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5), per=per), here])  # type: ignore[arg-type]
    assert here.lrs == home.lrs
    assert here.last_momentum_values == home.last_momentum_values
    assert here.last_weight_decay_values == home.last_weight_decay_values
    logger.save()
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    rates = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
    # Lightning writes the step before the update, a native run the step that is complete after it.
    assert [value for _, value in run.history["lr-SGD"]] == pytest.approx(rates[-len(run.history["lr-SGD"]) :])
    assert {"lr-SGD-momentum", "lr-SGD-weight_decay"} <= set(run.history.names)
    assert torch.is_tensor(trainer.callback_metrics["lr-SGD"])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_timer_stops_the_run(tmp_path: Path, interval: str) -> None:
    class Late(Timer):
        def time_elapsed(self, stage: str = "train") -> float:
            return 10.0 if self.trainer.global_step >= 2 else 0.0

        def on_fit_start(self, trainer: Any, *values: Any, **keywords: Any) -> None:
            self.trainer = trainer
            super().on_fit_start(trainer, *values, **keywords)

    home, here = (Late(duration={"seconds": 5}, interval=interval, verbose=False) for _ in range(2))
    assert native([here], max_epochs=5).progress.step == at_home([home], tmp_path, max_epochs=5).global_step
    assert here.start_time() is not None
    assert here.end_time() is not None
    assert here.start_time("validate") is not None


def test_monitors_log_to_the_records_of_the_run() -> None:
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        run = native([throughput, DeviceStatsMonitor()])
    names = set(run.history.names)
    assert {"train/device/samples_per_sec", "validate/device/batches_per_sec"} <= names
    assert dict(run.history["train/samples"])[6] == 24
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in names
    assert len(run.history["DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"]) == 6


def test_spike_detection_ends_the_run_and_writes_the_batches(tmp_path: Path) -> None:
    batches = batches_of(5)
    batches[3] = (batches[3][0] * 1e6, batches[3][1])
    detection = SpikeDetection(warmup=2, rtol=10.0, exclude_batches_path=str(tmp_path / "skip.json"))
    trainer = native_trainer([detection], valid=0)
    trainer.loader = batches
    with pytest.raises(RuntimeError, match="spike detected in batch 3"):
        trainer.fit()
    assert (tmp_path / "skip.json").read_text().split() == ["[", "2,", "3", "]"]


@pytest.mark.parametrize("make", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_replaces_the_native_one(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(model_of(0), optimizer_of, batches_of(3), _loss, max_epochs=2, callbacks=[make()])
    assert not any(isinstance(one, ProgressBar) for one in trainer.callbacks)
    trainer.fit()
    shown = capsys.readouterr()
    assert "Epoch 1" in shown.out + shown.err
    assert "3/3" in shown.out + shown.err


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def test_summaries_show_the_layers_of_the_model(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        Trainer(model, optimizer_of, batches_of(1), _loss, max_epochs=1, callbacks=[ModelSummary(), RichModelSummary()]).fit()
    assert "Linear | 8" in caplog.text
    assert "11" in caplog.text  # parameters in all
    assert "Linear" in capsys.readouterr().out


def test_a_lambda_callback_calls_its_functions() -> None:
    found: list[tuple[str, int]] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: found.append(("start", trainer.global_step)),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: found.append(("batch", index)),
        on_train_end=lambda trainer, module: found.append(("end", trainer.global_step)),
    )
    native([callback], max_epochs=1)
    assert found == [("start", 0), ("batch", 0), ("batch", 1), ("batch", 2), ("end", 3)]


# -- two processes: one launch for all ---------------------------------------------------------------------


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
        callbacks = [Evaluate(loader(8, shuffle=False), compute=judged), stop, Checkpoint(every=1)]
        run = trainer(callbacks=callbacks, **settings).fit(resume=resume)
        return run.progress.step, stop.wait_count

    found["cut"], found["resumed"] = resumed(6), resumed(30, "auto")
    found["rank"] = own_rank()
    return found


def test_callbacks_of_lightning_on_two_processes(tmp_path: Path) -> None:
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

"""The callbacks of Lightning have the effect that they have in Lightning's own trainer, on one process and on two.

They write the same checkpoint files; weights are read from those, and nothing in them is executed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import os
import pickle
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ThroughputMonitor, Timer
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate
from cadenza.compat.lightning import checkpoint_facts, load_weights, predict
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from cadenza.sinks import ProgressBar
from cadenza.testing import launch
from tests.compat.lightning import home as pair
from tests.compat.lightning.home import CPU, Lit, Net, Recorder, batches_of, loader, loader_of, sgd
from tests.compat.lightning.module.home import Regression, batches, trained_alike
from tests.distributed import parts

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
    trainer = pair.at_home([home], tmp_path, max_epochs=6, **interval)
    run = pair.native([here], max_epochs=6, every=every)
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

    run = pair.native([Spoil(), here], max_epochs=5)
    assert (run.progress.epoch, here.stopping_reason.name) == (1, "NON_FINITE_METRIC")


def test_a_monitor_that_is_missing_gives_lightnings_message_with_our_names() -> None:
    with pytest.raises(RuntimeError, match=r"`val_acc` which is not available.*`eval/loss`, `val_loss`, `train_loss`"):
        pair.native([EarlyStopping("val_acc")])


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_the_learning_rate_monitor_logs_the_same_values(tmp_path: Path, per: str, interval: Any) -> None:
    class Scheduled(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.model.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": per}}

    home, here = (LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True) for _ in range(2))
    logger = CSVLogger(tmp_path)
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "callbacks": [home]}
    trainer = pair.by_lightning(Scheduled(), loader_of(3), loader_of(2, 2), **settings)
    run = pair.native([LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5), every=f"1 {per}"), here])  # type: ignore[arg-type]
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
    assert pair.native([here], max_epochs=5).progress.step == pair.at_home([home], tmp_path, max_epochs=5).global_step
    assert here.start_time() is not None
    assert here.end_time() is not None
    assert here.start_time("validate") is not None


def test_monitors_log_to_the_records_of_the_run() -> None:
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        run = pair.native([throughput, DeviceStatsMonitor()])
    names = set(run.history.names)
    assert {"train/device/samples_per_sec", "validate/device/batches_per_sec"} <= names
    assert dict(run.history["train/samples"])[6] == 24
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in names
    assert len(run.history["DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"]) == 6


def test_spike_detection_ends_the_run_and_writes_the_batches(tmp_path: Path) -> None:
    batches = batches_of(5)
    batches[3] = (batches[3][0] * 1e6, batches[3][1])
    detection = SpikeDetection(warmup=2, rtol=10.0, exclude_batches_path=str(tmp_path / "skip.json"))
    trainer = pair.native_trainer([detection], valid=0)
    trainer.loader = batches
    with pytest.raises(RuntimeError, match="spike detected in batch 3"):
        trainer.fit()
    assert (tmp_path / "skip.json").read_text().split() == ["[", "2,", "3", "]"]


@pytest.mark.parametrize("make", [pl_callbacks.TQDMProgressBar, pl_callbacks.RichProgressBar])
def test_a_progress_bar_replaces_the_native_one(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pair.native_trainer([make()], valid=0, progress=True)
    assert not any(isinstance(one, ProgressBar) for one in trainer.callbacks)
    trainer.fit()
    shown = capsys.readouterr()
    assert "Epoch 1" in shown.out + shown.err
    assert "3/3" in shown.out + shown.err


def test_summaries_show_the_layers_of_the_model(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        pair.native(
            [pl_callbacks.ModelSummary(), pl_callbacks.RichModelSummary()], batches=1, valid=0, max_epochs=1, model=model
        )
    assert "Linear | 8" in caplog.text
    assert "11" in caplog.text  # parameters in all
    assert "Linear" in capsys.readouterr().out


def test_a_lambda_callback_calls_its_functions() -> None:
    found: list[tuple[str, int]] = []
    callback = pl_callbacks.LambdaCallback(
        on_train_start=lambda trainer, module: found.append(("start", trainer.global_step)),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: found.append(("batch", index)),
        on_train_end=lambda trainer, module: found.append(("end", trainer.global_step)),
    )
    pair.native([callback], max_epochs=1)
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
    evaluate = Evaluate(parts.loader(8, shuffle=False), compute=parts.judged, every=every)
    return parts.trainer(callbacks=[evaluate, *callbacks], **{"max_epochs": 3, **arguments}).fit()


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
        callbacks = [Evaluate(parts.loader(8, shuffle=False), compute=parts.judged), stop, Checkpoint(every=1)]
        run = parts.trainer(callbacks=callbacks, **settings).fit(resume=resume)
        return run.progress.step, stop.wait_count

    found["cut"], found["resumed"] = resumed(6), resumed(30, "auto")
    found["rank"] = parts.own_rank()
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


# -- files that callbacks write ----------------------------------------------------------------------------


class Breaks(pl_callbacks.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("broken")


MANY: dict[str, Any] = {"save_top_k": -1}
CASES: dict[str, dict[str, Any]] = {
    "the last epoch": {},
    "without validation": {},
    "the best two and the last": {
        "monitor": "val_loss",
        "save_top_k": 2,
        "filename": "{epoch}-{val_loss:.3f}",
        "save_last": True,
    },
    "every two steps": {**MANY, "every_n_train_steps": 2},
    "every step of five batches": {**MANY, "every_n_train_steps": 1},
    "every two epochs": {**MANY, "every_n_epochs": 2},
    "weights only": {**MANY, "every_n_epochs": 2, "save_last": True, "save_weights_only": True},
    "the largest training loss": {"monitor": "train_loss", "mode": "max"},
    "steps with the last validation": {"monitor": "val_loss", "every_n_train_steps": 2, "save_top_k": 2},
    "by time": {**MANY, "train_time_interval": timedelta(0)},
    "after validation": {**MANY, "save_on_train_epoch_end": False, "monitor": "val_loss"},
    "a limit of steps": {**MANY, "save_last": "link"},
    "a name of its own": {"filename": "e{epoch:02d}-l{val_loss:.2f}", "auto_insert_metric_name": False, "monitor": "val_loss"},
}
"""Arguments of ModelCheckpoint."""
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without validation": ({"valid": False}, {"valid": False}),
    "every step of five batches": ({"accumulate_grad_batches": 5}, {"accumulate": 5}),
    "a limit of steps": ({"max_steps": 7}, {"max_steps": 7}),
}
"""Arguments of Lightning's trainer, and of the native one."""


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("*"))


def content(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files of a folder by name, read without unpickling."""
    return {one.name: torch.load(one, weights_only=True) for one in sorted(folder.glob("*.ckpt"))}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def loops(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of the training loop that a resumed run of Lightning reads."""
    fit = checkpoint["loops"]["fit_loop"]
    return {name: value for name, value in fit.items() if "val_loop" not in name and "_batches_that" not in str(value)}


@pytest.mark.parametrize("name", CASES)
def test_model_checkpoint_writes_the_files_of_lightning(name: str, tmp_path: Path) -> None:
    given, (of_lightning, of_cadenza) = CASES[name], TRAINERS.get(name, ({}, {}))
    home = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / "home", **given)
    here = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / "here", **given)
    pair.net_at_home(Net(), [home], tmp_path, **of_lightning)
    pair.natively(Net(), [here], **of_cadenza)

    expected, written = content(tmp_path / "home"), content(tmp_path / "here")
    assert list(written) == list(expected)
    for file, checkpoint in expected.items():
        own = written[file]
        assert list(own) == list(checkpoint)
        assert (own["epoch"], own["global_step"]) == (checkpoint["epoch"], checkpoint["global_step"])
        assert alike(own["state_dict"], checkpoint["state_dict"])
        assert alike(own.get("optimizer_states"), checkpoint.get("optimizer_states"))
        assert loops(own) == loops(checkpoint)
    for attribute in ("best_model_path", "last_model_path", "kth_best_model_path"):
        assert Path(getattr(here, attribute)).name == Path(getattr(home, attribute)).name
    for score in ("best_model_score", "kth_value"):
        assert getattr(here, score) == pytest.approx(getattr(home, score))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_lightning_continues_from_a_file_of_a_native_run(tmp_path: Path) -> None:
    native = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / "here", save_top_k=-1)
    pair.natively(Net(), [native], max_epochs=2)
    whole, continued = Net(), Net()
    pair.net_at_home(whole, [], tmp_path)
    trainer = pair.net_at_home(continued, [], tmp_path, max_epochs=0)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(continued, loader(), loader(6, 1), ckpt_path=str(tmp_path / "here" / "epoch=1-step=10.ckpt"))
    assert trainer.global_step == 15
    assert alike(dict(continued.state_dict()), dict(whole.state_dict()))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_file_is_written_after_an_error(tmp_path: Path) -> None:
    def train(folder: str) -> None:
        late = pl_callbacks.OnExceptionCheckpoint(tmp_path / folder, filename="late")
        model = pl_callbacks.ModelCheckpoint(tmp_path / folder, save_on_exception=True, save_top_k=-1)
        callbacks = [late, model, Breaks()]
        with pytest.raises(RuntimeError, match="broken"):
            pair.net_at_home(Net(), callbacks, tmp_path) if folder == "home" else pair.natively(Net(), callbacks)

    train("home")
    train("here")
    expected, written = content(tmp_path / "home"), content(tmp_path / "here")
    assert list(written) == list(expected)
    assert all(alike(written[file]["state_dict"], expected[file]["state_dict"]) for file in expected)


def test_a_file_on_exception_goes_with_a_good_end(tmp_path: Path) -> None:
    late = pl_callbacks.OnExceptionCheckpoint(tmp_path)
    Path(late.ckpt_path).write_bytes(b"of an earlier run")
    pair.natively(Net(), [late])
    assert not Path(late.ckpt_path).exists()


# -- values of a LightningModule ---------------------------------------------------------------------------


class LogsLate(Regression):
    """Logs at the end of an epoch, in the hook of the module."""

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))


class Notes(pl_callbacks.Callback):
    """Logs at the end of an epoch too, and notes which files there are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[list[str]]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("noted", -float(trainer.current_epoch))  # type: ignore[attr-defined]  # Lightning sets it
        self.files.append(names_in(self.folder))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.files.append(names_in(self.folder))


def callbacks_in(folder: Path) -> list[Any]:
    late = pl_callbacks.ModelCheckpoint(
        folder, "{epoch}-{late:.0f}-{noted:.0f}", monitor="late", save_top_k=2, save_on_train_epoch_end=True
    )
    often = pl_callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    stop = pl_callbacks.EarlyStopping("late", patience=2, check_on_train_epoch_end=True)
    return [late, stop, often, Notes(folder)]


def test_a_callback_monitors_what_the_module_logs_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    home, here = callbacks_in(tmp_path / "home"), callbacks_in(tmp_path / "here")
    trained_alike(
        LogsLate, batches(20), max_epochs=9, home={"callbacks": home, "enable_checkpointing": True}, here={"callbacks": here}
    )
    assert here[1].stopped_epoch == home[1].stopped_epoch == 2
    assert names_in(tmp_path / "here") == names_in(tmp_path / "home") != []
    assert here[3].files == home[3].files  # each file is written after the hooks of the other callbacks


# -- predictions -------------------------------------------------------------------------------------------


class Writes(pl_callbacks.BasePredictionWriter):
    """Records what it is to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *rest: Any) -> None:
        indices, _, number, loader_index = rest
        self.written.append((prediction.tolist(), indices, number, loader_index))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append(([one.tolist() for one in predictions], batch_indices))


def test_a_writer_gets_the_predictions_and_the_indices_of_their_samples(tmp_path: Path) -> None:
    home, here, plain = Writes(), Writes(), Writes()
    trainer = pair.net_at_home(Net(), [home], tmp_path, max_epochs=0)
    trainer.predict(Net(), loader(5))
    pair.trainer_of(Net(), [here]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    pair.trainer_of(nn.Sequential(*Net().children()), [plain]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    own = Writes()
    predict(Trainer.from_lightning(Net(), loader(), callbacks=[own], max_epochs=1, **CPU), loader(5))
    assert len(home.written) == 4
    assert own.written == home.written
    assert here.written == home.written
    assert plain.written == home.written


# -- files that are read -----------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, width: int = 2, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


def written(module: Module, folder: Path) -> Path:
    """Return a checkpoint that Lightning's trainer wrote after two steps."""
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    trainer = pair.by_lightning(module, data, max_epochs=1, default_root_dir=folder)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def test_other_shapes_change_nothing(tmp_path: Path) -> None:
    path = written(Module(), tmp_path)
    module = Module(width=3)
    before = module.layer.weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"layer\.weight has shape"):
        load_weights(module, path)
    assert torch.equal(module.layer.weight, before)
    assert load_weights(module, path, strict=False) == ["layer.weight has shape (1, 2), the model's (1, 3)"]


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"names": ["a", None]}, {"names": ["a", None]}),
        (argparse.Namespace(rate=0.1), "<argparse.Namespace, not loaded>"),
        (
            {"optimizer": partial(torch.optim.Adam, lr=0.1), "at": [Path("x")]},
            {"optimizer": "<functools.partial, not loaded>", "at": ["<pathlib.PosixPath, not loaded>"]},
        ),
        (nn.functional.relu, "<torch.nn.functional.relu, not loaded>"),
    ],
)
def test_weights_and_facts_are_read_and_a_pickled_object_is_only_named(extra: Any, shown: Any, tmp_path: Path) -> None:
    path = written(trained := Module(extra=extra), tmp_path)
    assert load_weights(module := Module(), path) == []
    assert torch.equal(module.layer.weight, trained.layer.weight)
    facts = checkpoint_facts(path)
    assert (facts["epoch"], facts["global_step"]) == (1, 2)
    assert facts["hyper_parameters"] == {"width": 2, "extra": shown}


class Named(dict[str, Any]):
    """A class of which no object can be made without its code."""


def test_what_cannot_be_read_without_code_is_refused(tmp_path: Path) -> None:
    path = written(Module(extra=Named(rate=0.1)), tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"Named.*add_safe_globals.*save_hyperparameters"):
        load_weights(Module(), path)


def test_a_call_in_a_pickle_is_not_made(tmp_path: Path) -> None:
    torch.save({"state_dict": Module().state_dict(), "epoch": Hostile(tmp_path, eval)}, path := tmp_path / "hostile.ckpt")
    assert load_weights(Module(), path) == []
    assert checkpoint_facts(path)["epoch"] == "<builtins.eval, not loaded>"


class Hostile:
    def __init__(self, path: Path, call: Any = os.mkdir) -> None:
        self.path, self.call = path, call

    def __reduce__(self) -> Any:
        return self.call, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_code_is_not_executed(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "executed"
    content = {"state_dict": Module().state_dict(), "callbacks": Hostile(mark)}
    torch.save(content, path := tmp_path / "hostile.ckpt", _use_new_zipfile_serialization=zipped)
    for read in (checkpoint_facts, lambda one: load_weights(Module(), one)):
        with pytest.raises(CheckpointFormatError, match=r"posix\.mkdir"):
            read(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))  # the test would see it
    assert mark.exists()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "sharded.ckpt").mkdir()
    torch.save(Module().state_dict(), tmp_path / "plain.pt")
    (tmp_path / "text.ckpt").write_text("epoch: 3")
    whole = written(Module(), tmp_path).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    kinds: list[tuple[str, type[Exception], str]] = [
        ("none.ckpt", CheckpointError, "there is no checkpoint file"),
        ("sharded.ckpt", CheckpointFormatError, r"sharded checkpoint of Lightning.*consolidate_checkpoint"),
        ("plain.pt", CheckpointFormatError, r"expected a dict with 'state_dict'.*layer\.weight"),
        ("text.ckpt", CheckpointDamagedError, "no checkpoint"),
        ("cut.ckpt", CheckpointDamagedError, "damaged"),
    ]
    for name, kind, message in kinds:
        with pytest.raises(kind, match=message):
            checkpoint_facts(tmp_path / name)


def test_on_load_checkpoint_may_rename_weights(tmp_path: Path) -> None:
    class Renamed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.layer
            del self.layer

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.replace("layer.", "head."): one for name, one in weights.items()}

    path = written(trained := Module(), tmp_path)
    assert load_weights(module := Renamed(), path) == []
    assert torch.equal(module.head.weight, trained.layer.weight)

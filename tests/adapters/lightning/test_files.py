"""Callbacks of Lightning that write checkpoint files: the same files as in Lightning, with the same content."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch import callbacks as pl_callbacks

from cadenza import Trainer
from cadenza.callbacks import Checkpoint
from cadenza.compat.lightning import predict
from tests.adapters.lightning.at_home import CPU, Net, at_home, loader, natively, trainer_of
from tests.adapters.lightning.module.home import Regression, batches, trained_alike


class Breaks(pl_callbacks.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("broken")


MANY: dict[str, Any] = {"save_top_k": -1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # arguments of ModelCheckpoint, of Lightning's trainer, and of the native one
    "the last epoch": ({}, {}, {}),
    "without validation": ({}, {"valid": False}, {"valid": False}),
    "the best two and the last": (
        {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.3f}", "save_last": True},
        {},
        {},
    ),
    "every two steps": ({**MANY, "every_n_train_steps": 2}, {}, {}),
    "every step of five batches": ({**MANY, "every_n_train_steps": 1}, {"accumulate_grad_batches": 5}, {"accumulate": 5}),
    "every two epochs": ({**MANY, "every_n_epochs": 2}, {}, {}),
    "weights only": ({**MANY, "every_n_epochs": 2, "save_last": True, "save_weights_only": True}, {}, {}),
    "the largest training loss": ({"monitor": "train_loss", "mode": "max"}, {}, {}),
    "steps with the last validation": ({"monitor": "val_loss", "every_n_train_steps": 2, "save_top_k": 2}, {}, {}),
    "by time": ({**MANY, "train_time_interval": timedelta(0)}, {}, {}),
    "after validation": ({**MANY, "save_on_train_epoch_end": False, "monitor": "val_loss"}, {}, {}),
    "a limit of steps": ({**MANY, "save_last": "link"}, {"max_steps": 7}, {"max_steps": 7}),
    "a name of its own": (
        {"filename": "e{epoch:02d}-l{val_loss:.2f}", "auto_insert_metric_name": False, "monitor": "val_loss"},
        {},
        {},
    ),
}


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
    given, of_lightning, of_cadenza = CASES[name]
    home = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / "home", **given)
    here = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / "here", **given)
    at_home(Net(), [home], tmp_path, **of_lightning)
    natively(Net(), [here], **of_cadenza)

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
    natively(Net(), [native], max_epochs=2)
    whole, continued = Net(), Net()
    at_home(whole, [], tmp_path)
    trainer = at_home(continued, [], tmp_path, max_epochs=0)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(continued, loader(), loader(6, 1), ckpt_path=str(tmp_path / "here" / "epoch=1-step=10.ckpt"))
    assert trainer.global_step == 15
    assert alike(dict(continued.state_dict()), dict(whole.state_dict()))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_top_k_survives_a_resume(tmp_path: Path) -> None:
    def run(folder: str, *others: Any) -> Any:
        best = pl_callbacks.ModelCheckpoint(dirpath=tmp_path / folder / "files", monitor="train_loss", save_top_k=2)
        trainer = trainer_of(Net(), [best, *others, Checkpoint("1 step")], directory=tmp_path / folder)
        trainer.fit(resume="auto")
        return best

    whole = run("whole")
    with pytest.raises(RuntimeError, match="broken"):
        run("parts", Breaks())
    continued = run("parts")
    best = [{Path(path).name: score for path, score in one.best_k_models.items()} for one in (continued, whole)]
    assert best[0] == best[1]
    assert list(content(tmp_path / "parts" / "files")) == list(content(tmp_path / "whole" / "files"))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_file_is_written_after_an_error(tmp_path: Path) -> None:
    def train(folder: str) -> None:
        late = pl_callbacks.OnExceptionCheckpoint(tmp_path / folder, filename="late")
        model = pl_callbacks.ModelCheckpoint(tmp_path / folder, save_on_exception=True, save_top_k=-1)
        callbacks = [late, model, Breaks()]
        with pytest.raises(RuntimeError, match="broken"):
            at_home(Net(), callbacks, tmp_path) if folder == "home" else natively(Net(), callbacks)

    train("home")
    train("here")
    expected, written = content(tmp_path / "home"), content(tmp_path / "here")
    assert list(written) == list(expected)
    assert all(alike(written[file]["state_dict"], expected[file]["state_dict"]) for file in expected)


def test_a_file_on_exception_goes_with_a_good_end(tmp_path: Path) -> None:
    late = pl_callbacks.OnExceptionCheckpoint(tmp_path)
    Path(late.ckpt_path).write_bytes(b"of an earlier run")
    natively(Net(), [late])
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
        self.log("noted", -float(trainer.current_epoch))
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


class Plain(nn.Module):
    """The same task without Lightning."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.backbone, self.head = net.backbone, net.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.backbone(inputs))
        return outputs


def test_a_writer_gets_the_predictions_and_the_indices_of_their_samples(tmp_path: Path) -> None:
    home, here, plain = Writes(), Writes(), Writes()
    trainer = at_home(Net(), [home], tmp_path, max_epochs=0)
    trainer.predict(Net(), loader(5))
    trainer_of(Net(), [here]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    trainer_of(Plain(), [plain]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    own = Writes()
    predict(Trainer.from_lightning(Net(), loader(), callbacks=[own], max_epochs=1, **CPU), loader(5))
    assert len(home.written) == 4
    assert own.written == home.written
    assert here.written == home.written
    assert plain.written == home.written

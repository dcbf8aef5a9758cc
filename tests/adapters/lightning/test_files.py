"""Checkpoint files of Lightning: callbacks write the same ones, weights are read from them, and nothing in them is executed."""

from __future__ import annotations

import argparse
import os
import pickle
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer
from cadenza.compat.lightning import checkpoint_facts, load_weights, predict
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from tests.adapters.lightning.home import CPU, Net, by_lightning, loader, natively, net_at_home, trainer_of
from tests.adapters.lightning.module.home import Regression, batches, trained_alike

# -- files that callbacks write ----------------------------------------------------------------------------


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
    net_at_home(Net(), [home], tmp_path, **of_lightning)
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
    net_at_home(whole, [], tmp_path)
    trainer = net_at_home(continued, [], tmp_path, max_epochs=0)
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
            net_at_home(Net(), callbacks, tmp_path) if folder == "home" else natively(Net(), callbacks)

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
    trainer = net_at_home(Net(), [home], tmp_path, max_epochs=0)
    trainer.predict(Net(), loader(5))
    trainer_of(Net(), [here]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    trainer_of(nn.Sequential(*Net().children()), [plain]).predict(loader(5), compute=lambda model, batch: model(batch[0]))
    own = Writes()
    predict(Trainer.from_lightning(Net(), loader(), callbacks=[own], max_epochs=1, **CPU), loader(5))
    assert len(home.written) == 4
    assert own.written == home.written
    assert here.written == home.written
    assert plain.written == home.written


# -- files that are read -----------------------------------------------------------------------------------

lightning = pytest.importorskip("lightning", reason="reads checkpoints that Lightning writes")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
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
    trainer = by_lightning(module, data, max_epochs=1, default_root_dir=folder)
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

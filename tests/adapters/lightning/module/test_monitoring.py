"""Callbacks of Lightning that monitor a value: when they are called, as in Lightning's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.lightning.module.home import Regression, at_home, batches, lightning, native

pl_callbacks = pytest.importorskip("lightning.pytorch.callbacks", reason="lightning is not installed")


class LogsLate(Regression):
    """Logs at the end of an epoch, in the hook of the module."""

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))


class Notes(lightning.Callback):  # type: ignore[misc]
    """Logs at the end of an epoch too, and notes which files there are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[list[str]]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("noted", -float(trainer.current_epoch))
        self.files.append(names_in(self.folder))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.files.append(names_in(self.folder))


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("*"))


def callbacks_in(folder: Path) -> list[Any]:
    late = pl_callbacks.ModelCheckpoint(
        folder, "{epoch}-{late:.0f}-{noted:.0f}", monitor="late", save_top_k=2, save_on_train_epoch_end=True
    )
    often = pl_callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    stop = pl_callbacks.EarlyStopping("late", patience=2, check_on_train_epoch_end=True)
    return [late, stop, often, Notes(folder)]


def test_a_callback_monitors_what_the_module_logs_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    home, here = callbacks_in(tmp_path / "home"), callbacks_in(tmp_path / "here")
    at_home(LogsLate, batches(20), callbacks=home, enable_checkpointing=True, max_epochs=9)
    native(LogsLate, batches(20), callbacks=here, max_epochs=9)
    assert here[1].stopped_epoch == home[1].stopped_epoch == 2
    assert names_in(tmp_path / "here") == names_in(tmp_path / "home") != []
    assert here[3].files == home[3].files  # each file is written after the hooks of the other callbacks

"""The state of callbacks of Lightning is part of the checkpoints of a run, and there before the run goes on."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer

from cadenza.callbacks import Checkpoint
from tests.adapters.lightning.home import Recorder, native_trainer


def pickled(count: int) -> dict[str, Any]:
    """Return values that Lightning pickles in its checkpoints."""
    return {"kinds": {1, 2}, "mean": numpy.full(2, count), "last": deque([count], maxlen=2), "path": Path("a")}


class Entries(pl.Callback):
    """Has a state and an entry of its own in the checkpoint."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((2,), float(self.count)), "pickled": pickled(self.count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert repr(state_dict["pickled"]) == repr(pickled(state_dict["count"]))
        self.found.append(("load_state_dict", state_dict["count"], state_dict["tensor"].tolist()))
        self.count = state_dict["count"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] == trainer.global_step
        assert checkpoint["state_dict"].keys() == pl_module.state_dict().keys()
        checkpoint["mine"] = {"at": trainer.global_step, "pickled": pickled(3)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert repr(checkpoint["mine"]["pickled"]) == repr(pickled(3))
        self.found.append(("on_load_checkpoint", checkpoint["mine"]["at"], checkpoint["global_step"]))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(("on_fit_start", trainer.global_step))


class Attributes(pl.Callback):
    """Has no ``state_dict``."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def cut(tmp_path: Path, make: Any, steps: int = 4, **arguments: Any) -> tuple[Any, Any]:
    """Stop after `steps` steps, and continue with new callbacks. Return those, and the run."""
    settings: dict[str, Any] = {"directory": tmp_path / "run", **arguments}
    native_trainer([*make(), Checkpoint(every=1)], max_steps=steps, **settings).fit()
    callbacks = make()
    run = native_trainer([*callbacks, Checkpoint(every=1)], max_steps=8, **settings).fit(resume="auto")
    return callbacks, run


def test_states_are_loaded_before_the_fit_starts(tmp_path: Path) -> None:
    (entries, attributes), run = cut(tmp_path, lambda: [Entries(), Attributes()])
    order = [("on_load_checkpoint", 4, 4), ("load_state_dict", 4, [4.0, 4.0]), ("on_fit_start", 4)]
    assert entries.found == order
    assert entries.count == 8
    assert attributes.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.progress.step == 8


@pytest.mark.parametrize("every", ["1 epoch", "2 steps"])
def test_early_stopping_continues_to_the_same_step(tmp_path: Path, every: str) -> None:
    def fit(steps: int, **settings: Any) -> tuple[int, dict[str, Any]]:
        stop = EarlyStopping("val_loss", patience=2, min_delta=1.0, strict=False)
        callbacks = [stop, Checkpoint(every=1)] if settings else [stop]
        run = native_trainer(callbacks, max_steps=steps, every=every, **settings).fit(resume="auto" if settings else False)
        return run.progress.step, {**stop.state_dict(), "best_score": 0}

    whole = fit(12)
    for steps in (1, 2, 3, 4):
        directory = tmp_path / f"cut at {steps}"
        fit(steps, directory=directory)
        assert fit(12, directory=directory) == whole


def test_a_timer_counts_the_time_before(tmp_path: Path) -> None:
    [timer], _ = cut(tmp_path, lambda: [Timer(duration={"days": 1})])
    assert timer._offset > 0
    assert timer.time_elapsed() > timer._offset


def test_a_state_of_other_arguments_is_not_loaded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"directory": tmp_path / "run"}
    native_trainer([EarlyStopping("val_loss", min_delta=9.0), Checkpoint(every=1)], max_steps=6, **settings).fit()
    other = EarlyStopping("val_loss", mode="max")
    with pytest.warns(UserWarning, match="starts without state"):
        native_trainer([other, Checkpoint(every=1)], max_steps=7, **settings).fit(resume="auto")
    assert other.wait_count == 0


def test_a_continued_epoch_has_no_second_start(tmp_path: Path) -> None:
    [recorder], _ = cut(tmp_path, lambda: [Recorder()])
    names = recorder.names()
    again = len(names) - names[::-1].index("on_train_start")
    assert names[again] == "on_train_batch_start"
    assert [call[1] for call in recorder.calls if call[0] == "on_train_epoch_start"][-1] == 2

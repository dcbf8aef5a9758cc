"""A run with Keras callbacks continues exactly, from inside an epoch and between epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.loading import TensorBatches
from cadenza.testing import prove_resume
from tests.adapters.keras.parts import INPUTS, TARGETS, K, native_trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Counts(K.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps values that a checkpoint holds in another form, and objects that are made again at the start of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.names: set[str] = set()
        self.array = numpy.zeros(3)
        self.epochs_begun = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.means = []
        self.model.optimizer.learning_rate = 0.3  # as at home, where a warm-up may begin so
        self.model.set_weights([0 * one for one in self.model.get_weights()])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.open = object()
        self.epochs_begun += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.open
        self.means.append(logs["loss"])
        self.names.update(logs)
        self.array[batch % 3] += logs["loss"]


def trainer(directory: Path, seen: list[Any] | None = None) -> Trainer:
    callbacks = [
        Counts(),
        K.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        K.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.01),
        K.EarlyStopping(patience=5, restore_best_weights=True),
        K.ModelCheckpoint(directory / "best.keras", save_best_only=True),
        K.CSVLogger(directory / "rows.csv"),
        history := K.History(),
    ]
    if seen is not None:
        seen.append([history, *callbacks])
    return native_trainer(
        callbacks,
        loader=TensorBatches(INPUTS, TARGETS, batch_size=3, shuffle=True),
        max_epochs=6,
        directory=directory,
        seed=3,
        rate=0.4,
    )


def test_weights_rates_and_states_continue_bit_for_bit() -> None:
    prove_resume(trainer, at=[1, 4, 6, 8], in_process=True)


def cut(directory: Path, steps: int) -> tuple[Run, list[Any]]:
    """Save after so many steps, fail in the next one, and continue; return the run and its callbacks."""

    @on(Callback.on_step_start)
    def fail(run: Run) -> None:
        if run.progress.step == steps + 1:
            raise ZeroDivisionError

    first, seen = trainer(directory), list[Any]()
    first.callbacks.extend([Checkpoint(every=f"{steps} steps"), fail])
    with pytest.raises(ZeroDivisionError):
        first.fit()
    second = trainer(directory, seen)
    second.callbacks.append(Checkpoint())
    return second.fit(resume="auto"), seen[0]


def test_history_and_files_are_those_of_a_run_without_a_cut(tmp_path: Path) -> None:
    seen: list[Any] = []
    whole = trainer(tmp_path / "whole", seen).fit()
    (history, counts, *_) = seen[0]
    for steps in (4, 7, 9):
        folder = tmp_path / f"cut at {steps}"
        run, (other, others, *_) = cut(folder, steps)
        assert other.history == history.history
        assert others.means == counts.means
        assert others.names == counts.names == {"loss"}
        assert numpy.array_equal(others.array, counts.array)
        assert others.epochs_begun == counts.epochs_begun == 6
        assert torch.equal(run.model.get_parameter("weight"), whole.model.get_parameter("weight"))
        assert (folder / "rows.csv").read_text() == (tmp_path / "whole" / "rows.csv").read_text()
        both = [torch.load(path / "best.keras", weights_only=True)["model"] for path in (folder, tmp_path / "whole")]
        assert torch.equal(both[0]["weight"], both[1]["weight"])


def test_an_evaluation_by_steps_is_in_the_logs_of_its_epoch(tmp_path: Path) -> None:
    history = K.History()
    evaluations = [
        Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=5), every="3 steps", name="val"),
        Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=5), every="2 epochs", name="test"),
    ]
    run = native_trainer([history, *evaluations], validate=False).fit()
    assert len(history.history["val_loss"]) == 3
    assert history.history["val_loss"] == [run.history["val/loss"][index][1] for index in (0, 1, 3)]
    assert history.history["test_loss"] == [run.history["test/loss"][0][1]]

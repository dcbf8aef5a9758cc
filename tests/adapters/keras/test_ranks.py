"""Keras callbacks on two processes: they decide alike, and files are written once."""

from __future__ import annotations

import csv
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.drivers.sharding import whole
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.adapters.keras.parts import INPUTS, TARGETS, keras_package, native_model

if TYPE_CHECKING:
    import keras
else:
    keras = keras_package()

K: Any = keras.callbacks


class Rows(K.CSVLogger):  # type: ignore[misc]  # Keras has no types
    """A subclass: the main process alone calls it too."""


def work(folder: str) -> dict[str, Any]:
    """Train on all ranks with every class that runs; return what this rank saw."""
    torch.set_num_threads(1)
    model, seen = native_model(), list[Any]()
    callbacks = [
        stop := K.EarlyStopping(patience=2, restore_best_weights=True),
        plateau := K.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.5),
        K.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        K.ModelCheckpoint(Path(folder) / "{epoch}.weights.h5", save_weights_only=True),
        K.BackupAndRestore(Path(folder) / "backup", delete_checkpoint=False),
        Rows(Path(folder) / "rows.csv"),
        K.ProgbarLogger(),
        K.RemoteMonitor(root="http://127.0.0.1:9"),
        K.TerminateOnNaN(),
        K.SwapEMAWeights(),
        K.CallbackList([K.Callback()]),
        K.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))),
        history := K.History(),
    ]
    run = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.55),
        TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=2),
        supervised(nn.functional.mse_loss),
        max_epochs=15,
        driver="ddp",
        device="cpu",
        progress=False,
        callbacks=[Ema(0.5), *callbacks, Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=3))],
    ).fit()
    return {
        "epochs": history.epoch,
        "history": history.history,
        "stopped": (stop.stopped_epoch, stop.best_epoch, plateau.wait),
        "rate": run.optimizers[0].param_groups[0]["lr"],
        "weights": run.model.get_parameter("weight").tolist(),
        "best": stop.best_weights[0].tolist(),
        "batches": seen,
        "who": [(one.who, one.what) for one in run.decisions if one.what == "stopped"],
    }


def sharded(folder: str) -> dict[str, Any]:
    """Train a sharded model, of which each rank has a part of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
    callbacks = [
        stop := K.EarlyStopping(patience=1, restore_best_weights=True),
        K.ModelCheckpoint(Path(folder) / "new" / "{epoch}.weights.h5", save_weights_only=True),
        K.BackupAndRestore(Path(folder) / "sharded"),
        history := K.History(),
    ]
    run = Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, 0.4),
        TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=2),
        supervised(nn.functional.mse_loss),
        max_epochs=4,
        driver="fsdp",
        device="cpu",
        progress=False,
        callbacks=[*callbacks, Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=3))],
    ).fit()
    weights = [whole(one).tolist() for one in run.model.parameters()]
    return {"history": history.history, "weights": weights, "best": [one.tolist() for one in stop.best_weights]}


def resumed(folder: str, fail_at: int | None, *, resume: bool = False) -> dict[str, Any]:
    """Train with a checkpoint after each step; fail in one of them, or continue."""

    @on(Callback.on_step_start)
    def fail(run: Run) -> None:
        if run.progress.step == fail_at:
            raise ZeroDivisionError

    model = native_model()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.2),
        TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=1),
        supervised(nn.functional.mse_loss),
        max_epochs=2,
        driver="ddp",
        device="cpu",
        progress=False,
        directory=folder,
        seed=1,
        callbacks=[history := K.History(), Checkpoint(every="1 step"), fail],
    )
    try:
        trainer.fit(resume="auto" if resume else False)
    except ZeroDivisionError:
        return {}
    return {"history": history.history, "weights": model.weight.tolist()}


def all_of(folder: str) -> list[dict[str, Any]]:
    """Do the work of all tests of this file, in one start of the processes."""
    results = [work(f"{folder}/plain"), sharded(f"{folder}/plain"), resumed(f"{folder}/whole", None)]
    resumed(f"{folder}/cut", 6)
    return [*results, resumed(f"{folder}/cut", None, resume=True)]


@pytest.mark.filterwarnings("ignore:Could not reach RemoteMonitor")
def test_all_ranks_decide_alike_and_the_main_process_writes() -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = f"{top}/plain"
        Path(folder).mkdir()
        (one, parts, uncut, continued), (other, others, *_) = launch(partial(all_of, top))
        assert parts == others
        assert parts["weights"] == parts["best"]
        assert (Path(folder) / "new" / "1.weights.h5").exists()
        assert not (Path(folder) / "sharded").exists()
        assert continued == uncut
        shutil.rmtree(f"{folder}/new")
        names = sorted(path.name for path in Path(folder).iterdir())
        rows = list(csv.DictReader((Path(folder) / "rows.csv").read_text().splitlines()))
        saved = torch.load(Path(folder) / "1.weights.h5", weights_only=True)
    batches = one.pop("batches"), other.pop("batches")
    assert one.pop("who")[0] == other.pop("who")[0] == ("EarlyStopping", "stopped")
    assert one == other
    assert [index for index, _ in batches[0]] == [index for index, _ in batches[1]] == [0, 1] * len(one["epochs"])
    assert batches[0] == batches[1]  # the logs of a batch are those of all ranks
    epochs = len(one["epochs"])
    assert epochs == one["stopped"][0] + 1 < 15
    assert one["history"]["loss"][-1] == pytest.approx(batches[0][-1][1])
    assert one["weights"] == one["best"]
    assert names == sorted([*(f"{epoch + 1}.weights.h5" for epoch in range(epochs)), "backup", "rows.csv"])
    assert [int(row["epoch"]) for row in rows] == one["epochs"]
    assert [float(row["loss"]) for row in rows] == one["history"]["loss"]
    assert set(saved) == {"model", "optimizers"}

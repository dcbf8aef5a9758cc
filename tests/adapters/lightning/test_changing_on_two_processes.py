"""Callbacks of Lightning that write files or change the run, on two processes: as on one process with batches of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch import callbacks as pl_callbacks

from cadenza import Callback, Trainer
from cadenza.callbacks import Checkpoint
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.errors import AdapterError, DistributedError
from cadenza.run import Run
from cadenza.testing import launch
from tests.adapters.lightning.at_home import CPU, BreaksAt, Net, loader, mean_error, trainer_of
from tests.adapters.lightning.test_changing import EpochAverage, HeadFirst

Make = Callable[[Path], Any]
RESUMED = ("ModelCheckpoint", "StochasticWeightAveraging", "WeightAveraging", "BackboneFinetuning", "ModelPruning")

CASES: dict[str, Make] = {
    "ModelCheckpoint": lambda folder: pl_callbacks.ModelCheckpoint(
        folder / "files", monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=3
    ),
    "OnExceptionCheckpoint": lambda folder: pl_callbacks.OnExceptionCheckpoint(folder / "files"),
    "StochasticWeightAveraging": lambda folder: pl_callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2),
    "WeightAveraging": lambda folder: pl_callbacks.WeightAveraging(),
    "WeightAveraging, by epoch": lambda folder: EpochAverage(),
    "EMAWeightAveraging": lambda folder: pl_callbacks.EMAWeightAveraging(decay=0.8),
    "BaseFinetuning": lambda folder: HeadFirst(),
    "BackboneFinetuning": lambda folder: pl_callbacks.BackboneFinetuning(1, lambda epoch: 1.5),
    "ModelPruning": lambda folder: pl_callbacks.ModelPruning("l1_unstructured", amount=0.3),
    "GradientAccumulationScheduler": lambda folder: pl_callbacks.GradientAccumulationScheduler({0: 4, 2: 1}),
}


def train(folder: Path, make: Make, *others: Any, norm: bool = False, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the weights at the end, and the names of the files."""
    module, saves = Net(norm), Checkpoint("3 steps")
    trainer = trainer_of(module, [make(folder), *others, saves], directory=folder / "run", max_epochs=3, **arguments)
    trainer.fit(resume="auto")
    return dict(module.state_dict()), sorted(one.name for one in (folder / "files").glob("*"))


class BreaksOn(Callback):
    """Raises an error on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
        if run.progress.batch == 3 and run.driver.rank == self.rank:
            raise RuntimeError("broken")


def after_an_error(folder: Path, rank: int) -> None:
    """Train until one rank raises an error."""
    arguments: dict[str, Any] = {"loader": loader(16), "driver": DdpDriver("cpu"), "device": None}
    model = pl_callbacks.ModelCheckpoint(folder / "files", save_on_exception=True, save_last=True, filename="broken")
    with pytest.raises((RuntimeError, DistributedError), match="broken"):
        train(folder, lambda _: pl_callbacks.OnExceptionCheckpoint(folder / "files"), model, BreaksOn(rank), **arguments)


def sharded(folder: Path, arguments: dict[str, Any]) -> list[str]:
    """Write a file of a sharded model; callbacks that need whole weights are refused."""
    for name in ("StochasticWeightAveraging", "EMAWeightAveraging", "ModelPruning"):
        with pytest.raises(AdapterError, match="needs the whole weights, but with this driver each rank has a shard"):
            train(folder / "refused", CASES[name], **arguments)
    return train(folder, lambda _: pl_callbacks.ModelCheckpoint(folder / "files", save_top_k=-1), **arguments)[1]


class Apart(Net):
    """Logs other values on each rank."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", mean_error(self, batch) + 10 * self.global_rank)


def own_monitors(folder: Path, *others: Any) -> list[str]:
    """Train a LightningModule, each rank of which monitors its own values; return the names of the files."""
    best = pl_callbacks.ModelCheckpoint(folder / "files", monitor="val_loss", save_top_k=2)
    arguments: dict[str, Any] = {"driver": DdpDriver("cpu"), "directory": folder / "run", "progress": False, "seed": 1}
    callbacks, data = [*others, best, Checkpoint("1 step")], (loader(16), loader(16, 1))
    Trainer.from_lightning(Apart(), data, callbacks=callbacks, max_epochs=4, **arguments).fit(resume="auto")
    return sorted(one.name for one in (folder / "files").glob("*"))


def on_both(folder: Path) -> dict[str, Any]:
    """Return the result of each case; some of them break, continue and must end alike."""
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {"loader": loader(16), "driver": DdpDriver("cpu"), "device": None}
    for name, make in CASES.items():
        whole = found[name] = train(folder / name / "whole", make, **arguments)
        if name not in RESUMED:
            continue
        with pytest.raises(RuntimeError, match="broken"):
            train(folder / name / "parts", make, BreaksAt(8), **arguments)
        again = train(folder / name / "parts", make, **arguments)
        assert all(torch.equal(whole[0][key], again[0][key]) for key in again[0]), name
        assert again[1] == whole[1], name
    whole_files = own_monitors(folder / "own" / "whole")
    with pytest.raises(RuntimeError, match="broken"):
        own_monitors(folder / "own" / "parts", BreaksAt(9))
    assert own_monitors(folder / "own" / "parts") == whole_files
    found["sharded"] = sharded(folder / "sharded", {**arguments, "driver": FsdpDriver("cpu")})
    swa = CASES["StochasticWeightAveraging"]
    found["BatchNorm"] = train(folder / "norm", swa, norm=True, **arguments)
    return found


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    first, second = launch(lambda: on_both(tmp_path / "both"))
    one: dict[str, Any] = {"loader": loader(16, batch_size=4), "driver": CPU["driver"]}
    for name, make in CASES.items():
        weights, files = first[name]
        assert all(torch.equal(weights[key], second[name][0][key]) for key in weights), name
        expected, expected_files = train(tmp_path / "one" / name, make, **one)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, msg=f"{name}: {key}")
        assert files == expected_files, name
    assert first["sharded"] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    file = torch.load(tmp_path / "both" / "sharded" / "files" / first["sharded"][-1], weights_only=True)
    expected, _ = train(tmp_path / "whole", CASES["OnExceptionCheckpoint"], **one)
    for key, value in expected.items():
        torch.testing.assert_close(file["state_dict"][key], value, msg=key)
    weights, others = first["BatchNorm"][0], second["BatchNorm"][0]
    assert all(torch.equal(weights[key], others[key]) for key in weights if "running" not in key)


@pytest.mark.parametrize("rank", [0, 1])
def test_files_are_written_after_an_error_on_one_rank(rank: int, tmp_path: Path) -> None:
    """The processes end with the error, so each rank has a launch of its own."""
    launch(lambda: after_an_error(tmp_path, rank), timeout_s=60)
    assert sorted(one.name for one in (tmp_path / "files").glob("*")) == ["broken.ckpt", "last.ckpt", "on_exception.ckpt"]

"""Callbacks of Lightning that change the run or write files, on one process and on two.

Each has the effect that it has in Lightning's own trainer, and a run with it resumes to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch import callbacks as pl_callbacks

from cadenza import Callback, Trainer
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.errors import AdapterError, DistributedError
from cadenza.run import Run
from cadenza.testing import launch
from tests.compat.lightning.home import CPU, BreaksAt, Net, loader, mean_error, net_at_home, same, trainer_of

SWA = pl_callbacks.StochasticWeightAveraging
Make = Callable[[Path], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The provided params to be frozen"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class EpochAverage(pl_callbacks.WeightAveraging):
    """Averages after each epoch, as the documentation shows."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


class HeadFirst(pl_callbacks.BaseFinetuning):
    """Trains the backbone from the second epoch on, in a parameter group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


# -- one process -------------------------------------------------------------------------------------------


class Seen(pl_callbacks.Callback):
    """Records what a validation sees: the sum of the weights, and the learning rates; and the masks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            weights = float(sum(one.double().sum() for one in pl_module.parameters()))
            self.seen.append((trainer.global_step, weights, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def pruning_after_validation(folder: Path) -> Any:
    by_norm: dict[str, Any] = {"pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
    late: dict[str, Any] = {"prune_on_train_epoch_end": False, "make_pruning_permanent": False}
    return pl_callbacks.ModelPruning("ln_structured", amount=0.3, parameter_names=["weight"], **by_norm, **late)


def lottery_ticket(folder: Path) -> Any:
    return pl_callbacks.ModelPruning("l1_unstructured", amount=lambda epoch: 0.2, use_lottery_ticket_hypothesis=True)


def best_and_last(folder: Path) -> Any:
    return pl_callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=3)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "StochasticWeightAveraging": (lambda folder: SWA(0.02, swa_epoch_start=0.5, annealing_epochs=2), {}),
    "StochasticWeightAveraging, linear": (lambda folder: SWA([0.02], swa_epoch_start=2, annealing_strategy="linear"), {}),
    "StochasticWeightAveraging, BatchNorm": (lambda folder: SWA(0.02, swa_epoch_start=2), {"norm": True}),
    "StochasticWeightAveraging, a schedule": (lambda folder: SWA(0.02, swa_epoch_start=2), {"schedule": halved}),
    "WeightAveraging": (lambda folder: pl_callbacks.WeightAveraging(), {"norm": True}),
    "WeightAveraging, by epoch": (lambda folder: EpochAverage(), {}),
    "EMAWeightAveraging": (lambda folder: pl_callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=2), {}),
    "BaseFinetuning": (lambda folder: HeadFirst(), {}),
    "BackboneFinetuning": (lambda folder: pl_callbacks.BackboneFinetuning(1, lambda epoch: 1.5), {"norm": True}),
    "ModelPruning": (lambda folder: pl_callbacks.ModelPruning("l1_unstructured", amount=0.3), {}),
    "ModelPruning, after validation": (pruning_after_validation, {}),
    "ModelPruning, lottery ticket": (lottery_ticket, {}),
    "GradientAccumulationScheduler": (lambda folder: pl_callbacks.GradientAccumulationScheduler({0: 5, 2: 1}), {}),
    "ModelCheckpoint": (best_and_last, {}),
}
"""Each callback, made for a folder of files, and the arguments of its model."""
OF_MODULES = ("StochasticWeightAveraging, a schedule", "StochasticWeightAveraging", "BackboneFinetuning")
"""Those that `Trainer.from_lightning` trains with as well."""
CUTS = dict.fromkeys(("BaseFinetuning", "BackboneFinetuning", "ModelPruning"), (10, 13))
"""The batches before which a run breaks; others break inside of the second and of the third epoch."""
EPOCHS = 3


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in (folder / "files").glob("*"))


def trained(name: str, directory: Path, *others: Any, module: bool) -> tuple[Net, list[Any], list[str]]:
    """Train natively, or continue; return the model, what a validation saw, and the names of the files."""
    (directory / "files").mkdir(parents=True, exist_ok=True)
    make, given = CASES[name]
    net, seen = Net(**given), Seen()
    callbacks = [*others, make(directory / "files"), seen, Checkpoint("11 steps", on_exception=True)]
    settings: dict[str, Any] = {"directory": directory, "max_epochs": EPOCHS, "seed": 1}
    if module:
        trainer = Trainer.from_lightning(net, (loader(), loader(6, 1)), callbacks=callbacks, **settings, **CPU)
    else:
        rates = [LearningRate(given["schedule"], every="1 epoch")] if "schedule" in given else []
        trainer = trainer_of(net, [*rates, *callbacks], **settings)
    trainer.fit(resume="auto")
    return net, rounded(seen.seen), names_in(directory)


def rounded(seen: list[Any]) -> list[Any]:
    return [[float(f"{value:.5g}") for value in row] for row in seen]


@pytest.mark.parametrize(
    ("name", "module"),
    [*((name, False) for name in CASES), *((name, True) for name in OF_MODULES)],
    ids=lambda value: ("model", "module")[value] if isinstance(value, bool) else value,
)
def test_a_callback_has_its_effect_and_resumes_to_the_same_bits(name: str, module: bool, tmp_path: Path) -> None:
    (tmp_path / "home" / "files").mkdir(parents=True)
    make, given = CASES[name]
    expected, seen_at_home = Net(**given), Seen()
    net_at_home(expected, [make(tmp_path / "home" / "files"), seen_at_home], tmp_path, max_epochs=EPOCHS)

    whole, *others = trained(name, tmp_path / "whole", module=module)
    assert same(whole, expected)
    assert others == [rounded(seen_at_home.seen), names_in(tmp_path / "home")]
    for batch in CUTS.get(name, (7, 13)):
        with pytest.raises(RuntimeError, match="broken"):
            trained(name, tmp_path / "parts", BreaksAt(batch), module=module)
    continued, *again = trained(name, tmp_path / "parts", module=module)
    assert same(continued, whole)
    assert again == others


@pytest.mark.parametrize("name", ["BatchSizeFinder", "LearningRateFinder"])
def test_a_callback_that_runs_the_loops_of_lightning_is_refused(name: str) -> None:
    kind = getattr(pl_callbacks, name)
    for made in (kind(), type("Own", (kind,), {})()):
        with pytest.raises(AdapterError, match=r"does not work in a native run.*cadenza\.callbacks\.Find") as caught:
            trainer_of(Net(), [made])
        assert type(made).__name__ in str(caught.value)


def test_accumulation_is_set_in_one_place() -> None:
    scheduler = pl_callbacks.GradientAccumulationScheduler({0: 1, 1: 5})
    trainer = trainer_of(Net(), [scheduler])
    assert str(trainer.accumulate) == "1 batch, 5 from 1 epoch on"
    assert trainer.fit().progress.step == 5 + 1 + 1
    with pytest.raises(ValueError, match=r"Scheduler sets the batches in a step.*Keep Trainer\(accumulate="):
        trainer_of(Net(), [scheduler], accumulate=2)


def test_a_finetuning_callback_freezes_once(tmp_path: Path) -> None:
    class Counts(HeadFirst):
        frozen = 0

        def freeze_before_training(self, pl_module: Any) -> None:
            self.frozen += 1
            super().freeze_before_training(pl_module)

    theirs, ours = Counts(), Counts()
    net_at_home(Net(), [theirs], tmp_path, max_epochs=1)
    trainer = trainer_of(Net(), [ours], max_epochs=1)
    trainer.fit()
    assert ours.frozen == theirs.frozen == 1
    trainer.fit()
    assert ours.frozen == 2


# -- two processes: as on one with the batches of both -----------------------------------------------------

SAME = (
    *("ModelCheckpoint", "StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "BackboneFinetuning"),
    *("ModelPruning", "GradientAccumulationScheduler"),
)
ON_TWO: dict[str, Make] = {
    "OnExceptionCheckpoint": pl_callbacks.OnExceptionCheckpoint,
    **{name: CASES[name][0] for name in SAME},
}
RESUMED = ("ModelCheckpoint", "StochasticWeightAveraging", "ModelPruning")


def train(folder: Path, make: Make, *others: Any, norm: bool = False, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the weights at the end, and the names of the files."""
    module, saves = Net(norm), Checkpoint("6 steps")
    callbacks = [make(folder / "files"), *others, saves]
    trainer_of(module, callbacks, directory=folder / "run", max_epochs=3, **arguments).fit(resume="auto")
    return dict(module.state_dict()), names_in(folder)


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
        train(folder, pl_callbacks.OnExceptionCheckpoint, model, BreaksOn(rank), **arguments)


def sharded(folder: Path, arguments: dict[str, Any]) -> list[str]:
    """Write a file of a sharded model; callbacks that need whole weights are refused."""
    for name in ("StochasticWeightAveraging", "EMAWeightAveraging", "ModelPruning"):
        with pytest.raises(AdapterError, match="needs the whole weights, but with this driver each rank has a shard"):
            train(folder / "refused", ON_TWO[name], **arguments)
    return train(folder, lambda files: pl_callbacks.ModelCheckpoint(files, save_top_k=-1), **arguments)[1]


class Apart(Net):
    """Logs other values on each rank."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", mean_error(self, batch) + 10 * self.global_rank)


def own_monitors(folder: Path, *others: Any) -> list[str]:
    """Train a LightningModule, each rank of which monitors its own values; return the names of the files."""
    best = pl_callbacks.ModelCheckpoint(folder / "files", monitor="val_loss", save_top_k=2)
    arguments: dict[str, Any] = {"driver": DdpDriver("cpu"), "directory": folder / "run", "progress": False, "seed": 1}
    callbacks, data = [*others, best, Checkpoint("3 steps")], (loader(16), loader(16, 1))
    Trainer.from_lightning(Apart(), data, callbacks=callbacks, max_epochs=4, **arguments).fit(resume="auto")
    return names_in(folder)


def on_both(folder: Path) -> dict[str, Any]:
    """Return the result of each case; some of them break, continue and must end alike."""
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {"loader": loader(16), "driver": DdpDriver("cpu"), "device": None}
    for name, make in ON_TWO.items():
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
    swa = ON_TWO["StochasticWeightAveraging"]
    found["BatchNorm"] = train(folder / "norm", swa, norm=True, **arguments)
    return found


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    first, second = launch(lambda: on_both(tmp_path / "both"))
    one: dict[str, Any] = {"loader": loader(16, batch_size=4), "driver": "single"}
    for name, make in ON_TWO.items():
        weights, files = first[name]
        assert all(torch.equal(weights[key], second[name][0][key]) for key in weights), name
        expected, expected_files = train(tmp_path / "one" / name, make, **one)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, msg=f"{name}: {key}")
        assert files == expected_files, name
    assert first["sharded"] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    file = torch.load(tmp_path / "both" / "sharded" / "files" / first["sharded"][-1], weights_only=True)
    expected, _ = train(tmp_path / "whole", ON_TWO["OnExceptionCheckpoint"], **one)
    for key, value in expected.items():
        torch.testing.assert_close(file["state_dict"][key], value, msg=key)
    weights, others = first["BatchNorm"][0], second["BatchNorm"][0]
    assert all(torch.equal(weights[key], others[key]) for key in weights if "running" not in key)


@pytest.mark.parametrize("rank", [0, 1])
def test_files_are_written_after_an_error_on_one_rank(rank: int, tmp_path: Path) -> None:
    """The processes end with the error, so each rank has a launch of its own."""
    launch(lambda: after_an_error(tmp_path, rank), timeout_s=60)
    assert names_in(tmp_path) == ["broken.ckpt", "last.ckpt", "on_exception.ckpt"]

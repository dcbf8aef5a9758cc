"""The callbacks that Keras exports: each has on one and on two processes the effect that it has in ``model.fit``.

On two processes with uneven data, all callbacks act alike or are an error, and the main process writes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LearningRate, Warmup
from cadenza.compat.keras import classes
from cadenza.drivers.sharding import whole
from cadenza.errors import AdapterError
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.compat.keras.parts import INPUTS, TARGETS, K, acting, fit_at_home, fit_natively, native_trainer
from tests.compat.receiver import receiver

# Keras converts variables with torch's ``__array__``, for which newer releases of NumPy warn.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# -- every class, in fit and in native runs ----------------------------------------------------------------


class Events(K.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps the number and the logs of each batch and of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((epoch, dict(logs)))


class Rows(K.CSVLogger):  # type: ignore[misc]
    """A subclass: the main process alone calls it too."""


class Sends(K.RemoteMonitor):  # type: ignore[misc]
    """Sends to a server that runs as long as the training."""

    def __init__(self) -> None:
        super().__init__(send_as_json=True)
        self.received: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.server = receiver()
        self.root, self.received = self.server.__enter__()

    def on_train_end(self, logs: Any = None) -> None:
        self.server.__exit__(None, None, None)


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


def rows(folder: Path) -> list[dict[str, float]]:
    lines = csv.DictReader((folder / "rows.csv").read_text().splitlines())
    return [{name: float(value) for name, value in one.items()} for one in lines]


@dataclass
class Case:
    """One class: how to make it, and what shows its effect beside the history and the weights."""

    make: Callable[[Path], Any]
    shows: Callable[[Any, Path], Any] = lambda callback, folder: None
    rate: float = 0.55
    epochs: int = 4
    by_main: bool = False
    """Whether only the main process shows the effect."""
    at_home: dict[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer of ``fit``, which puts averages in at its end: the weights are not compared."""
    beside: Callable[[], list[Any]] = list
    """Native callbacks beside it."""


def stopping(rate: float = 0.55, **arguments: Any) -> Case:
    def shows(callback: Any, folder: Path) -> Any:
        return callback.stopped_epoch, callback.best_epoch, callback.wait, float(callback.best)

    return Case(lambda folder: K.EarlyStopping(**arguments), shows, rate, epochs=8)


def plateau(rate: float, **arguments: Any) -> Case:
    def shows(callback: Any, folder: Path) -> Any:
        return callback.wait, callback.cooldown_counter, float(callback.best)

    return Case(lambda folder: K.ReduceLROnPlateau(patience=1, factor=0.3, cooldown=1, **arguments), shows, rate, epochs=8)


def checkpoints(folder: Path) -> Any:
    best = K.ModelCheckpoint(folder / "{epoch:02d}-{val_loss:.2f}.weights.h5", save_best_only=True, save_weights_only=True)
    often = K.ModelCheckpoint(folder / "batches" / "{epoch}-{batch}-{loss:.2f}.keras", save_freq=3)
    return K.CallbackList([best, often])


def touching(folder: Path) -> Any:
    def touch(*number: int, logs: Any) -> None:
        (folder / f"{number}-{sorted(logs)}").touch()

    return K.LambdaCallback(
        on_train_batch_end=lambda batch, logs: touch(batch, logs=logs),
        on_epoch_end=lambda epoch, logs: touch(epoch, logs=logs),
        on_test_end=lambda logs: touch(logs=logs),
    )


CASES = {
    "Callback": Case(lambda folder: Events(), lambda callback, folder: callback.seen),
    "CallbackList": Case(lambda folder: K.CallbackList([Events()]), lambda callback, folder: callback.callbacks[0].seen),
    "LambdaCallback": Case(touching, lambda callback, folder: files(folder)),
    "EarlyStopping": stopping(patience=1, min_delta=1e-3, restore_best_weights=True),
    "EarlyStopping, later": stopping(0.75, patience=2, restore_best_weights=True),
    "EarlyStopping, a baseline": stopping(0.75, patience=1, baseline=0.0, restore_best_weights=True),
    "EarlyStopping, from an epoch on": stopping(patience=0, start_from_epoch=4, min_delta=0.01),
    "EarlyStopping, the largest loss": stopping(monitor="loss", patience=1, mode="max"),
    "ReduceLROnPlateau": plateau(0.55, monitor="loss", min_delta=0.5),
    "ReduceLROnPlateau, validated": plateau(0.5, min_delta=0.05),
    "LearningRateScheduler": Case(
        lambda folder: K.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch % 2 else rate), rate=0.3
    ),
    "History": Case(lambda folder: K.History(), lambda callback, folder: (callback.epoch, callback.history)),
    "CSVLogger": Case(lambda folder: Rows(folder / "rows.csv"), lambda callback, folder: rows(folder), by_main=True),
    "RemoteMonitor": Case(lambda folder: Sends(), lambda callback, folder: callback.received, by_main=True),
    "ProgbarLogger": Case(
        lambda folder: K.ProgbarLogger(),
        lambda callback, folder: (callback.seen, callback.target, callback.epochs),
        by_main=True,
    ),
    "ModelCheckpoint": Case(
        checkpoints, lambda callback, folder: (files(folder), float(callback.callbacks[0].best)), by_main=True
    ),
    "BackupAndRestore": Case(
        lambda folder: K.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        lambda callback, folder: files(folder),
        by_main=True,
    ),
    "SwapEMAWeights": Case(
        lambda folder: K.SwapEMAWeights(),
        rate=0.3,
        at_home={"use_ema": True, "ema_momentum": 0.5},
        beside=lambda: [Ema(0.5)],
    ),
    "TerminateOnNaN": Case(lambda folder: K.CallbackList([K.TerminateOnNaN(), Events()]), rate=1e30),
}
REFUSED = {"TensorBoard": r"cadenza.sinks.TensorBoard\(\)", "OrbaxCheckpoint": r"Add Checkpoint\(...\) to callbacks"}


def natively(name: str, folder: Path, *, ranks: int = 1) -> Any:
    """Train on this rank; return the history, the epochs, the weights and what the case shows."""
    case, history = CASES[name], K.History()
    folder.mkdir(parents=True, exist_ok=True)
    callback = case.make(folder)
    run = fit_natively(
        [*case.beside(), callback, history, Evaluate(TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=3))],
        loader=TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=4 // ranks),
        rate=case.rate,
        max_epochs=case.epochs,
        validate=False,
        driver="auto" if ranks == 1 else "ddp",
        device="cpu",
    )
    shown = None if case.by_main and not run.is_main else case.shows(callback, folder)
    weights = None if case.at_home else run.model.get_parameter("weight")[0].tolist()
    return history.history, history.epoch, weights, shown


def at_home(name: str, folder: Path) -> Any:
    case, history = CASES[name], K.History()
    folder.mkdir(parents=True, exist_ok=True)
    callback = case.make(folder)
    model = fit_at_home([callback, history], epochs=case.epochs, rate=case.rate, samples=8, batch_size=4, **case.at_home)
    weights = None if case.at_home else model.get_weights()[0].ravel().tolist()
    return history.history, history.epoch, weights, case.shows(callback, folder)


def assert_close(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other), where
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_close(first, second, f"{where}[{index}]")
    else:
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-6, nan_ok=True) if isinstance(one, float) else other), where


def test_no_class_is_missing() -> None:
    exported = {name for name in dir(K) if name[0].isupper()}
    assert {*(name.partition(",")[0] for name in CASES), *REFUSED} == exported


@pytest.mark.parametrize("name", CASES)
def test_the_effect_is_that_of_fit(name: str, tmp_path: Path, on_two: Any) -> None:
    home = at_home(name, tmp_path / "home")
    one = natively(name, tmp_path / "one")
    main, other = (cases[name] for cases, _ in on_two)
    assert_close(one, home, "on one process")
    assert_close(main, home, "on two processes")
    alike = 3 if CASES[name].by_main else 4
    assert repr(other[:alike]) == repr(main[:alike])  # bit for bit; NaN differs from itself


# -- what native runs add ----------------------------------------------------------------------------------


def test_a_class_that_cannot_run_names_its_replacement_and_why_before_the_first_step(tmp_path: Path) -> None:
    for name, replacement in REFUSED.items():
        with pytest.raises(AdapterError, match=replacement):
            classes.check(getattr(K, name))
    with pytest.raises(AdapterError, match=r"needs the package tensorboard alone"):
        fit_natively([K.TensorBoard(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_rates_of_groups_keep_their_ratio_and_a_warmup_is_a_factor() -> None:
    trainer = native_trainer([K.LearningRateScheduler(lambda epoch: 0.01), Warmup("8 steps")], max_epochs=1, validate=False)
    model = trainer.model
    trainer.optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    run = trainer.fit()
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.01, 0.02]
    assert "learning rate set" in [one.what for one in run.decisions if one.who == "LearningRateScheduler"]


def test_two_that_set_the_rate_of_one_optimizer_are_an_error() -> None:
    schedule = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(AdapterError, match="ReduceLROnPlateau and LearningRate set the learning rate of the same"):
        fit_natively([schedule, K.ReduceLROnPlateau()])

    sets = acting("Sets", on_epoch_end=lambda self, epoch, logs=None: self.model.optimizer.learning_rate.assign(0.5))
    with pytest.raises(AdapterError, match=r"Sets sets model.optimizer.learning_rate, but LearningRate sets the rate"):
        fit_natively([schedule, sets])


def test_a_checkpoint_holds_the_weights_and_the_rate(tmp_path: Path) -> None:
    save = K.ModelCheckpoint(tmp_path / "{epoch:02d}-{val_loss:.3f}.weights.h5", save_weights_only=True)
    run = fit_natively([save], rate=0.55)
    content = torch.load(max(tmp_path.iterdir()), weights_only=True)
    assert set(content) == {"model", "optimizers"}
    assert torch.equal(content["model"]["weight"], run.model.get_parameter("weight"))
    assert content["optimizers"][0]["param_groups"][0]["lr"] == 0.55


def diverging(callbacks: list[Any]) -> Run:
    loader = [(INPUTS[:2], TARGETS[:2]), (INPUTS[:2] * float("nan"), TARGETS[:2]), (INPUTS[:2], TARGETS[:2])]
    return fit_natively(callbacks, loader=loader, validate=False)


def test_a_loss_of_nan_ends_the_run_or_raises(capsys: pytest.CaptureFixture[str]) -> None:
    run = diverging([K.TerminateOnNaN()])
    assert (run.progress.step, run.why("stopped")[:25]) == (2, "stopped by TerminateOnNaN")
    assert "Batch 1: Invalid loss, terminating training" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="at batch 1"):
        diverging([K.TerminateOnNaN(raise_error=True)])


def test_a_progress_bar_shows_epochs_and_replaces_that_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = native_trainer([K.ProgbarLogger()], max_epochs=2)
    trainer.fit()
    shown = capsys.readouterr().out
    assert "Epoch 1/2" in shown
    assert "4/4" in shown
    assert "val_loss" in shown
    assert trainer.callbacks[0].shows_progress


def test_weights_are_swapped_only_with_an_ema() -> None:
    with pytest.raises(AdapterError, match=r"Add Ema\(...\) to callbacks"):
        fit_natively([K.SwapEMAWeights()])


def test_a_backup_continues_an_interrupted_training(tmp_path: Path) -> None:
    class Interrupts(K.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    whole = fit_natively([K.History()], max_epochs=4, validate=False)
    with pytest.raises(KeyboardInterrupt):
        fit_natively([K.BackupAndRestore(tmp_path / "backup"), Interrupts()], max_epochs=4, validate=False)
    assert sorted(one.name for one in (tmp_path / "backup").iterdir()) == ["latest.weights.h5", "training_metadata.json"]
    history = K.History()
    run = fit_natively([K.BackupAndRestore(tmp_path / "backup"), history], max_epochs=4, validate=False)
    assert history.epoch == [2, 3]
    assert torch.equal(run.model.get_parameter("weight"), whole.model.get_parameter("weight"))
    assert not (tmp_path / "backup").exists()


# -- two processes with uneven data ------------------------------------------------------------------------


def fit(callbacks: list[Any], *, targets: torch.Tensor = TARGETS, **arguments: Any) -> dict[str, Any]:
    """Train on batches of 3, 3, 3 and 1 samples, and evaluate on 5 batches."""
    history, evaluate = K.History(), Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=2))
    loader = TensorBatches(INPUTS, targets, batch_size=3)
    settings = {"loader": loader, "driver": "ddp", "device": "cpu", "validate": False, **arguments}
    run = fit_natively([*callbacks, history, evaluate], **settings)
    weights, rate = [whole(one).tolist() for one in run.model.parameters()], run.optimizers[0].param_groups[0]["lr"]
    return {"history": history.history, "weights": weights, "rate": rate, "steps": run.progress.step, "why": run.outcome}


def rate_by_loss(folder: Path) -> dict[str, Any]:
    """Set the rate after each batch from its logs, and the weights from the first loss."""
    seen: list[float] = []

    def follow(self: Any, batch: int, logs: Any = None) -> None:
        seen.append(logs["loss"])
        self.model.optimizer.learning_rate.assign(logs["loss"] * 0.02)
        if len(seen) == 1:
            self.model.set_weights([one * logs["loss"] for one in self.model.get_weights()])

    return {**fit([acting("Follows", on_train_batch_end=follow)]), "seen": seen}


def nan_on_one_rank(folder: Path) -> dict[str, Any]:
    """Give rank 1 a target that is NaN in the fourth batch, which is its second one."""
    targets = TARGETS.clone()
    targets[9] = float("nan")
    seen: list[int] = []
    notes = K.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    return {**fit([K.TerminateOnNaN(), notes], targets=targets), "seen": seen}


def stop_on_one_rank(folder: Path) -> dict[str, Any]:
    """Stop in the first batch of the second epoch, on rank 1 alone."""
    rank = torch.distributed.get_rank()

    def stop(self: Any, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = rank == 1 and epoch == 1

    return fit([acting("Stops", on_epoch_begin=stop)])


def set_by_rank(act: Callable[[Any, int], None]) -> str:
    """Set another value on each rank; return the error."""
    rank = torch.distributed.get_rank()
    with pytest.raises(AdapterError) as error:
        fit([acting("Differs", on_train_batch_end=lambda self, batch, logs=None: act(self.model, rank))])
    return str(error.value)


def rate_of_rank(model: Any, rank: int) -> None:
    model.optimizer.learning_rate = 0.1 / (rank + 1)


def weights_of_rank(model: Any, rank: int) -> None:
    if rank:
        model.set_weights([one + 1 for one in model.get_weights()])


def backup(folder: Path) -> dict[str, Any]:
    """Fail in the third epoch, and continue from the backup; the same without a failure."""

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise ZeroDivisionError

    uncut = fit([], max_epochs=4)
    with suppress(ZeroDivisionError):
        fit([K.BackupAndRestore(folder / "backup"), K.LambdaCallback(on_epoch_begin=fail)], max_epochs=4)
    continued = fit([K.BackupAndRestore(folder / "backup")], max_epochs=4)
    return {"uncut": uncut["weights"], "continued": continued["weights"], "epochs": len(continued["history"]["loss"])}


def evaluated_on_one(folder: Path) -> list[Any]:
    """Evaluate and predict in a hook on the main process alone."""
    seen: list[Any] = []

    def evaluate(self: Any, epoch: int, logs: Any = None) -> None:
        if torch.distributed.get_rank() == 0:
            self.model.predict(INPUTS.numpy(), verbose=0)
            seen.append((self.model.evaluate(INPUTS.numpy(), TARGETS.numpy(), verbose=0), logs["val_loss"]))

    fit([acting("Evaluates", on_epoch_end=evaluate)])
    return seen


def swapped(folder: Path) -> dict[str, Any]:
    """Swap the averages in at the end of each epoch, and save them."""
    saves = K.ModelCheckpoint(folder / "swapped" / "{epoch:02d}-{val_loss:.2f}.weights.h5", save_weights_only=True)
    return fit([Ema(0.5), K.SwapEMAWeights(swap_on_epoch=True), saves])


def sharded(folder: Path) -> dict[str, Any]:
    """Train a sharded model, of which each rank has a part of the weights."""
    torch.manual_seed(0)
    stop = K.EarlyStopping(patience=1, restore_best_weights=True)
    save = K.ModelCheckpoint(folder / "sharded" / "{epoch}.weights.h5", save_weights_only=True)
    found = fit(
        [stop, save, K.BackupAndRestore(folder / "sharded" / "backup")],
        model=nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.4),
        loader=TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=2),
        max_epochs=4,
        driver="fsdp",
    )
    return {**found, "best": [one.tolist() for one in stop.best_weights]}


def resumed(folder: Path) -> Any:
    """Train with a checkpoint after each step, whole, and cut in the seventh step and continued."""

    def train(directory: Path, fail_at: int | None, *, resume: Any = False) -> dict[str, Any]:
        @on(Callback.on_step_start)
        def fail(run: Run) -> None:
            if run.progress.step == fail_at:
                raise ZeroDivisionError

        loader = TensorBatches(INPUTS[:8], TARGETS[:8], batch_size=1)
        settings: dict[str, Any] = {"loader": loader, "max_epochs": 2, "directory": directory, "seed": 1, "rate": 0.2}
        return fit([Checkpoint(every="1 step"), fail], resume=resume, **settings)

    uncut = train(folder / "uncut", None)
    with suppress(ZeroDivisionError):
        train(folder / "cut", 6)
    return uncut, train(folder / "cut", None, resume="auto")


WORK: dict[str, Callable[[Path], Any]] = {
    "rate": rate_by_loss,
    "nan": nan_on_one_rank,
    "stop": stop_on_one_rank,
    "rates": lambda folder: set_by_rank(rate_of_rank),
    "weights": lambda folder: set_by_rank(weights_of_rank),
    "evaluated": evaluated_on_one,
    "backup": backup,
    "swap": swapped,
    "sharded": sharded,
    "resumed": resumed,
}


def on_rank(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what this rank has of each class and of each work."""
    torch.set_num_threads(1)
    cases = {name: natively(name, folder / "cases" / name, ranks=2) for name in CASES}
    return cases, {name: work(folder) for name, work in WORK.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Any:
    """Return the results of two processes, which are started once."""
    return launch(partial(on_rank, folder))


@pytest.fixture
def results(on_two: Any) -> Any:
    return [works for _, works in on_two]


@pytest.mark.parametrize("name", ["rate", "nan", "stop", "rates", "backup", "swap", "sharded", "resumed"])
def test_both_ranks_have_the_same_results(name: str, results: Any) -> None:
    one, other = results
    assert repr(one[name]) == repr(other[name])


def test_rates_follow_the_logs_of_all_ranks(results: Any) -> None:
    one, _ = results
    assert one["rate"]["rate"] == one["rate"]["seen"][-1] * 0.02


def test_a_stop_on_one_rank_is_one_of_all(results: Any) -> None:
    one, _ = results
    assert len(one["nan"]["seen"]) == one["nan"]["steps"] == 2
    assert one["stop"]["steps"] == 4  # what one rank requests takes effect one step later
    assert list(map(len, one["stop"]["history"].values())) == [2, 2]  # the loss and the val_loss of two epochs


def test_different_rates_and_weights_are_errors_that_name_the_callback(results: Any) -> None:
    one, _ = results
    where = "at the end of an epoch"
    assert f"different learning rates {where}: [0.1] on rank 0, [0.05] on rank 1. Differs set them" in one["rates"]
    assert f"different weights {where}. Differs set them" in one["weights"]


def test_one_rank_may_evaluate_and_predict(results: Any) -> None:
    one, other = results
    assert [own for own, _ in one["evaluated"]] == pytest.approx([logged for _, logged in one["evaluated"]])
    assert (len(one["evaluated"]), other["evaluated"]) == (3, [])


def test_runs_continue_from_a_backup_and_from_a_checkpoint(results: Any) -> None:
    one, _ = results
    assert one["backup"]["uncut"] == one["backup"]["continued"]
    assert one["backup"]["epochs"] == 2
    uncut, continued = one["resumed"]
    assert continued == uncut


def test_files_have_the_names_of_all_ranks_values(results: Any, folder: Path) -> None:
    losses = results[0]["swap"]["history"]["val_loss"]
    assert files(folder / "swapped") == [f"{epoch + 1:02d}-{loss:.2f}.weights.h5" for epoch, loss in enumerate(losses)]


def test_a_sharded_model_has_whole_weights_in_callbacks_and_files(results: Any, folder: Path) -> None:
    found = results[0]["sharded"]
    assert found["weights"] == found["best"]
    assert "1.weights.h5" in files(folder / "sharded")
    assert "backup" not in files(folder / "sharded")

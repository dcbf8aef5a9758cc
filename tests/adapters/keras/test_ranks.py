"""Keras callbacks on two processes with uneven data: they act alike or are an error, and the main process writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.drivers.sharding import whole
from cadenza.errors import AdapterError
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.adapters.keras.parts import INPUTS, TARGETS, K, fit_natively

Lambda: Any = K.LambdaCallback
Results = tuple[dict[str, Any], dict[str, Any]]


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

    class Follows(K.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])
            self.model.optimizer.learning_rate.assign(logs["loss"] * 0.02)
            if len(seen) == 1:
                self.model.set_weights([one * logs["loss"] for one in self.model.get_weights()])

    return {**fit([Follows()]), "seen": seen}


def nan_on_one_rank(folder: Path) -> dict[str, Any]:
    """Give rank 1 a target that is NaN in the fourth batch, which is its second one."""
    targets = TARGETS.clone()
    targets[9] = float("nan")
    seen: list[int] = []
    notes = Lambda(on_train_batch_end=lambda batch, logs: seen.append(batch))
    return {**fit([K.TerminateOnNaN(), notes], targets=targets), "seen": seen}


def stop_on_one_rank(folder: Path) -> dict[str, Any]:
    """Stop in the first batch of the second epoch, on rank 1 alone."""
    rank = torch.distributed.get_rank()

    class Stops(K.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = rank == 1 and epoch == 1

    return fit([Stops()])


def set_by_rank(act: Callable[[Any, int], None]) -> str:
    """Set another value on each rank; return the error."""
    rank = torch.distributed.get_rank()

    class Differs(K.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            act(self.model, rank)

    try:
        fit([Differs()])
    except AdapterError as error:
        return str(error)
    return "no error"


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
        fit([K.BackupAndRestore(folder / "backup"), Lambda(on_epoch_begin=fail)], max_epochs=4)
    continued = fit([K.BackupAndRestore(folder / "backup")], max_epochs=4)
    return {"uncut": uncut["weights"], "continued": continued["weights"], "epochs": len(continued["history"]["loss"])}


def evaluated_on_one(folder: Path) -> list[Any]:
    """Evaluate and predict in a hook on the main process alone."""
    seen: list[Any] = []

    class Evaluates(K.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if torch.distributed.get_rank() == 0:
                self.model.predict(INPUTS.numpy(), verbose=0)
                seen.append((self.model.evaluate(INPUTS.numpy(), TARGETS.numpy(), verbose=0), logs["val_loss"]))

    fit([Evaluates()])
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


def all_of(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: work(folder) for name, work in WORK.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Return what each of two processes has of all works, in one start of the processes."""
    one, other = launch(partial(all_of, folder))
    return one, other


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["rate", "nan", "stop", "rates", "backup", "swap", "sharded", "resumed"])
def test_both_ranks_have_the_same_results(name: str, results: Results) -> None:
    one, other = results
    assert repr(one[name]) == repr(other[name])


def test_rates_follow_the_logs_of_all_ranks(results: Results) -> None:
    one, _ = results
    assert one["rate"]["rate"] == one["rate"]["seen"][-1] * 0.02


def test_a_stop_on_one_rank_is_one_of_all(results: Results) -> None:
    one, _ = results
    assert len(one["nan"]["seen"]) == one["nan"]["steps"] == 2
    assert one["stop"]["steps"] == 4  # what one rank requests takes effect one step later
    assert list(map(len, one["stop"]["history"].values())) == [2, 2]  # the loss and the val_loss of two epochs


def test_different_rates_and_weights_are_errors_that_name_the_callback(results: Results) -> None:
    one, _ = results
    where = "at the end of an epoch"
    assert f"different learning rates {where}: [0.1] on rank 0, [0.05] on rank 1. Differs set them" in one["rates"]
    assert f"different weights {where}. Differs set them" in one["weights"]


def test_one_rank_may_evaluate_and_predict(results: Results) -> None:
    one, other = results
    assert [own for own, _ in one["evaluated"]] == pytest.approx([logged for _, logged in one["evaluated"]])
    assert (len(one["evaluated"]), other["evaluated"]) == (3, [])


def test_runs_continue_from_a_backup_and_from_a_checkpoint(results: Results) -> None:
    one, _ = results
    assert one["backup"]["uncut"] == one["backup"]["continued"]
    assert one["backup"]["epochs"] == 2
    uncut, continued = one["resumed"]
    assert continued == uncut


def test_files_have_the_names_of_all_ranks_values(results: Results, folder: Path) -> None:
    losses = results[0]["swap"]["history"]["val_loss"]
    assert files(folder / "swapped") == [f"{epoch + 1:02d}-{loss:.2f}.weights.h5" for epoch, loss in enumerate(losses)]


def test_a_sharded_model_has_whole_weights_in_callbacks_and_files(results: Results, folder: Path) -> None:
    found = results[0]["sharded"]
    assert found["weights"] == found["best"]
    assert "1.weights.h5" in files(folder / "sharded")
    assert "backup" not in files(folder / "sharded")

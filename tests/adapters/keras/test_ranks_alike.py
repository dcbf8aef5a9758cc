"""Callbacks that act on what a rank sees: on two processes with uneven data, they act alike or are an error."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Ema, Evaluate
from cadenza.errors import AdapterError
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.adapters.keras.parts import INPUTS, TARGETS, keras_package, native_model

if TYPE_CHECKING:
    import keras
else:
    keras = keras_package()

K: Any = keras.callbacks
Lambda: Any = K.LambdaCallback


def fit(callbacks: list[Any], targets: torch.Tensor = TARGETS, **arguments: Any) -> dict[str, Any]:
    """Train on batches of 3, 3, 3 and 1 samples, and evaluate on 5 batches."""
    model, history = native_model(), K.History()
    run = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        TensorBatches(INPUTS, targets, batch_size=3),
        supervised(nn.functional.mse_loss),
        driver="ddp",
        device="cpu",
        progress=False,
        callbacks=[*callbacks, history, Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=2))],
        **({"max_epochs": 3} | arguments),
    ).fit()
    weights, rate = model.weight.tolist(), run.optimizers[0].param_groups[0]["lr"]
    return {"history": history.history, "weights": weights, "rate": rate, "steps": run.progress.step, "why": run.outcome}


def rate_by_loss() -> dict[str, Any]:
    """Set the rate after each batch from its logs, and the weights from the first loss."""
    seen: list[float] = []

    class Follows(K.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])
            self.model.optimizer.learning_rate.assign(logs["loss"] * 0.02)
            if len(seen) == 1:
                self.model.set_weights([one * logs["loss"] for one in self.model.get_weights()])

    return {**fit([Follows()]), "seen": seen}


def nan_on_one_rank() -> dict[str, Any]:
    """Give rank 1 a target that is NaN in the fourth batch, which is its second one."""
    targets = TARGETS.clone()
    targets[9] = float("nan")
    seen: list[int] = []
    return {
        **fit([K.TerminateOnNaN(), Lambda(on_train_batch_end=lambda batch, logs: seen.append(batch))], targets),
        "seen": seen,
    }


def stop_on_one_rank() -> dict[str, Any]:
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


def backup(folder: str) -> dict[str, Any]:
    """Fail in the third epoch, and continue from the backup; the same without a failure."""

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise ZeroDivisionError

    whole = fit([], max_epochs=4)
    with suppress(ZeroDivisionError):
        fit([K.BackupAndRestore(Path(folder) / "backup"), Lambda(on_epoch_begin=fail)], max_epochs=4)
    continued = fit([K.BackupAndRestore(Path(folder) / "backup")], max_epochs=4)
    return {"whole": whole["weights"], "continued": continued["weights"], "epochs": len(continued["history"]["loss"])}


def evaluated_on_one() -> list[Any]:
    """Evaluate and predict in a hook on the main process alone."""
    seen: list[Any] = []

    class Evaluates(K.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if torch.distributed.get_rank() == 0:
                self.model.predict(INPUTS.numpy(), verbose=0)
                seen.append((self.model.evaluate(INPUTS.numpy(), TARGETS.numpy(), verbose=0), logs["val_loss"]))

    fit([Evaluates()])
    return seen


def all_of(folder: str) -> dict[str, Any]:
    """Do the work of all tests, in one start of the processes."""
    torch.set_num_threads(1)
    saves = K.ModelCheckpoint(folder + "/{epoch:02d}-{val_loss:.2f}.weights.h5", save_weights_only=True)
    return {
        "rate": rate_by_loss(),
        "nan": nan_on_one_rank(),
        "stop": stop_on_one_rank(),
        "rates": set_by_rank(rate_of_rank),
        "weights": set_by_rank(weights_of_rank),
        "evaluated": evaluated_on_one(),
        "backup": backup(folder),
        "swap": fit([Ema(0.5), K.SwapEMAWeights(swap_on_epoch=True), saves]),
    }


def test_ranks_act_alike_or_the_error_names_the_callback() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = launch(partial(all_of, folder))
        files = sorted(path.name for path in Path(folder).iterdir())
    assert repr(one["rate"]) == repr(other["rate"])
    assert one["rate"]["rate"] == one["rate"]["seen"][-1] * 0.02
    assert len(one["nan"]["seen"]) == one["nan"]["steps"] == 2
    assert repr(one["nan"]) == repr(other["nan"])
    assert one["stop"]["steps"] == other["stop"]["steps"] == 4  # what one rank requests takes effect one step later
    assert one["stop"]["history"] == other["stop"]["history"]
    assert list(map(len, one["stop"]["history"].values())) == [2, 2]  # the loss and the val_loss of two epochs
    assert one["rates"] == other["rates"]
    assert (
        "different learning rates at the end of an epoch: [0.1] on rank 0, [0.05] on rank 1. Differs set them" in one["rates"]
    )
    assert "different weights at the end of an epoch. Differs set them" in one["weights"]
    assert [own for own, _ in one["evaluated"]] == pytest.approx([logged for _, logged in one["evaluated"]])
    assert (len(one["evaluated"]), other["evaluated"]) == (3, [])
    assert one["backup"] == other["backup"]
    assert one["backup"]["whole"] == one["backup"]["continued"]
    assert one["backup"]["epochs"] == 2
    assert repr(one["swap"]) == repr(other["swap"])
    assert files == [f"{epoch + 1:02d}-{loss:.2f}.weights.h5" for epoch, loss in enumerate(one["swap"]["history"]["val_loss"])]

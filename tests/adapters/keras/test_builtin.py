"""The callbacks that Keras exports have the effect in a native run that they have in ``model.fit``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Ema, LearningRate, Warmup
from cadenza.errors import AdapterError
from tests.adapters.keras.parts import (
    INPUTS,
    TARGETS,
    fit_at_home,
    fit_natively,
    keras_package,
    native_trainer,
)

if TYPE_CHECKING:
    import keras
else:
    keras = keras_package()

# Keras converts variables with torch's ``__array__``, for which newer releases of NumPy warn.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
EPOCHS = 12
K: Any = keras.callbacks


def both(make: Callable[[], Any], *, rate: float = 0.3, epochs: int = EPOCHS) -> tuple[Any, Any, Any, Run]:
    """Return the callback and the model of ``fit``, and those of a native run, each with its History."""
    home, native = make(), make()
    model = fit_at_home([home, home_history := K.History()], epochs=epochs, rate=rate)
    run = fit_natively([native, history := K.History()], max_epochs=epochs, rate=rate)
    assert history.epoch == home_history.epoch
    assert list(history.history) == list(home_history.history)
    for name, values in history.history.items():
        assert values == pytest.approx(home_history.history[name], rel=1e-4), name
    assert run.model.get_parameter("weight")[0].tolist() == pytest.approx(model.get_weights()[0].ravel().tolist(), rel=1e-4)
    return home, model, native, run


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 2, "restore_best_weights": True},
        {"patience": 1, "baseline": 0.0, "restore_best_weights": True},
        {"patience": 0, "start_from_epoch": 4, "min_delta": 0.01},
        {"monitor": "loss", "patience": 1, "mode": "max"},
    ],
)
def test_early_stopping_ends_in_the_same_epoch_with_the_same_weights(arguments: dict[str, Any]) -> None:
    home, _, native, run = both(lambda: K.EarlyStopping(**arguments), rate=0.55)
    assert (native.stopped_epoch, native.best_epoch, native.wait) == (home.stopped_epoch, home.best_epoch, home.wait)
    assert run.progress.epoch == (home.stopped_epoch + 1 if home.stopped_epoch else EPOCHS)


def test_the_rates_of_a_scheduler_are_those_of_fit_and_those_of_the_optimizer() -> None:
    _, model, _, run = both(lambda: K.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch % 2 else rate))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(float(model.optimizer.learning_rate))
    assert "learning rate set" in [one.what for one in run.decisions if one.who == "LearningRateScheduler"]


def test_a_plateau_reduces_the_rate_in_the_same_epochs() -> None:
    home, _, native, _ = both(lambda: K.ReduceLROnPlateau(patience=1, factor=0.3, cooldown=1, min_delta=0.05), rate=0.5)
    assert (native.wait, native.cooldown_counter) == (home.wait, home.cooldown_counter)
    assert native.best == pytest.approx(home.best, rel=1e-4)


def test_rates_of_groups_keep_their_ratio_and_a_warmup_is_a_factor() -> None:
    trainer = native_trainer([K.LearningRateScheduler(lambda epoch: 0.01), Warmup("8 steps")], max_epochs=1, validate=False)
    model = trainer.model
    trainer.optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    run = trainer.fit()
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.01, 0.02]


def test_two_that_set_the_rate_of_one_optimizer_are_an_error() -> None:
    schedule = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(AdapterError, match="ReduceLROnPlateau and LearningRate set the learning rate of the same"):
        fit_natively([schedule, K.ReduceLROnPlateau()])

    class Sets(K.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(0.5)

    with pytest.raises(AdapterError, match=r"Sets sets model.optimizer.learning_rate, but LearningRate sets the rate"):
        fit_natively([schedule, Sets()])


def test_checkpoints_appear_under_the_names_of_the_template(tmp_path: Path) -> None:
    at_home, native = tmp_path / "home", tmp_path / "native"

    def of(folder: Path) -> list[Any]:
        return [
            K.ModelCheckpoint(folder / "all" / "{epoch:02d}-{val_loss:.3f}.weights.h5", save_weights_only=True),
            K.ModelCheckpoint(folder / "best-{epoch}.keras", save_best_only=True),
            K.ModelCheckpoint(folder / "batches" / "{epoch}-{batch}-{loss:.2f}.keras", save_freq=3),
        ]

    fit_at_home(of(at_home), rate=0.55, epochs=4)
    run = fit_natively(of(native), rate=0.55, max_epochs=4)
    assert [str(one.relative_to(native)) for one in sorted(native.rglob("*"))] == [
        str(one.relative_to(at_home)) for one in sorted(at_home.rglob("*"))
    ]
    content = torch.load(max((native / "all").iterdir()), weights_only=True)
    assert torch.equal(content["model"]["weight"], run.model.get_parameter("weight"))
    assert content["optimizers"][0]["param_groups"][0]["lr"] == 0.55


def test_the_rows_of_a_csv_logger_are_those_of_fit(tmp_path: Path) -> None:
    fit_at_home([K.CSVLogger(tmp_path / "home.csv")])
    fit_natively([K.CSVLogger(tmp_path / "native.csv")])
    rows = [list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("native.csv", "home.csv")]
    assert len(rows[0]) == 3
    for native, home in zip(*rows, strict=True):
        assert list(native) == list(home) == ["epoch", "loss", "val_loss"]
        assert list(map(float, native.values())) == pytest.approx(list(map(float, home.values())), rel=1e-5)


@contextmanager
def server() -> Iterator[tuple[str, list[Any]]]:
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    served = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=served.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}", received
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


def test_a_remote_monitor_sends_each_epoch() -> None:
    with server() as (root, received):
        fit_natively([K.RemoteMonitor(root=root, send_as_json=True)], max_epochs=2)
    assert [(path, sorted(content), content["epoch"]) for path, content in received] == [
        ("/publish/epoch/end/", ["epoch", "loss", "val_loss"], epoch) for epoch in (0, 1)
    ]


def diverging(callbacks: list[Any], **arguments: Any) -> Run:
    loader = [(INPUTS[:2], TARGETS[:2]), (INPUTS[:2] * float("nan"), TARGETS[:2]), (INPUTS[:2], TARGETS[:2])]
    return fit_natively(callbacks, loader=loader, validate=False, **arguments)


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


def test_a_list_of_callbacks_passes_events_on() -> None:
    history, stop = K.History(), K.EarlyStopping(patience=0, monitor="loss", mode="max")
    run = fit_natively([K.CallbackList([stop, history])], validate=False)
    assert (history.epoch, run.progress.epoch) == ([0, 1], 2)


def test_ema_weights_are_swapped_in_for_the_evaluation() -> None:
    ema = Ema(0.5)
    seen: list[float] = []

    @on(Callback.on_eval_end)
    def note(run: Run, evaluation: Any) -> None:
        seen.append(evaluation.results["eval/loss"])

    run = fit_natively([K.SwapEMAWeights(), ema, note])
    expected: list[float] = []

    @on(Callback.on_eval_end)
    def again(run: Run, evaluation: Any) -> None:
        expected.append(evaluation.results["eval/loss"])

    from cadenza.callbacks import Evaluate
    from cadenza.loading import TensorBatches

    plain = fit_natively(
        [Ema(0.5), again, Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=4), weights="ema")], validate=False
    )
    assert seen == expected
    assert torch.equal(run.model.get_parameter("weight"), plain.model.get_parameter("weight"))
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


def test_a_class_that_cannot_run_says_why_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"needs the package tensorboard alone"):
        fit_natively([K.TensorBoard(tmp_path)])
    assert list(tmp_path.iterdir()) == []

"""Every class that ``keras.callbacks`` exports has on one and on two processes the effect of ``model.fit``."""

from __future__ import annotations

import csv
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.adapters.keras import classes
from cadenza.callbacks import Ema, Evaluate
from cadenza.errors import AdapterError
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.adapters.keras.parts import INPUTS, TARGETS, fit_at_home, keras_package, native_model

if TYPE_CHECKING:
    import keras
else:
    keras = keras_package()

K: Any = keras.callbacks
INPUTS, TARGETS = INPUTS[:8], TARGETS[:8]


class Events(K.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps the number and the logs of each batch and of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((epoch, dict(logs)))


@contextmanager
def server() -> Iterator[tuple[str, list[Any]]]:
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
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


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


def rows(folder: Path) -> list[dict[str, float]]:
    lines = csv.DictReader((folder / "rows.csv").read_text().splitlines())
    return [{name: float(value) for name, value in one.items()} for one in lines]


@dataclass
class Case:
    """One class: how to make it, and what shows its effect."""

    make: Callable[[Path], Any]
    shows: Callable[[Any, Path], Any]
    rate: float = 0.55
    by_main: bool = False
    """Whether only the main process shows the effect."""
    at_home: dict[str, Any] = field(default_factory=dict)
    beside: Callable[[], list[Any]] = list
    """Native callbacks beside it."""


def nothing(callback: Any, folder: Path) -> None:
    """Show no more than the history."""


def last(callback: Any, folder: Path) -> Any:
    return len(callback.callbacks[1].seen), callback.callbacks[1].seen[-1][0]


CASES = {
    "Callback": Case(lambda folder: Events(), lambda callback, folder: callback.seen),
    "CallbackList": Case(lambda folder: K.CallbackList([Events()]), lambda callback, folder: callback.callbacks[0].seen),
    "LambdaCallback": Case(
        lambda folder: K.LambdaCallback(on_epoch_end=lambda epoch, logs: (folder / f"{epoch}-{sorted(logs)}").touch()),
        lambda callback, folder: files(folder),
    ),
    "EarlyStopping": Case(
        lambda folder: K.EarlyStopping(patience=1, min_delta=1e-3, restore_best_weights=True),
        lambda callback, folder: (callback.stopped_epoch, callback.best_epoch, callback.best_weights[0].ravel().tolist()),
    ),
    "ReduceLROnPlateau": Case(
        lambda folder: K.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.3, cooldown=1, min_delta=0.5),
        lambda callback, folder: (callback.wait, callback.cooldown_counter),
    ),
    "LearningRateScheduler": Case(
        lambda folder: K.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch % 2 else rate), nothing
    ),
    "History": Case(lambda folder: K.History(), lambda callback, folder: (callback.epoch, callback.history)),
    "CSVLogger": Case(lambda folder: K.CSVLogger(folder / "rows.csv"), lambda callback, folder: rows(folder)),
    "RemoteMonitor": Case(lambda folder: Sends(), lambda callback, folder: callback.received, by_main=True),
    "ProgbarLogger": Case(
        lambda folder: K.ProgbarLogger(),
        lambda callback, folder: (callback.seen, callback.target, callback.epochs),
        by_main=True,
    ),
    "ModelCheckpoint": Case(
        lambda folder: K.CallbackList(
            [
                K.ModelCheckpoint(
                    folder / "{epoch:02d}-{val_loss:.2f}.weights.h5", save_best_only=True, save_weights_only=True
                ),
                K.ModelCheckpoint(folder / "{epoch}-{batch}-{loss:.2f}.keras", save_freq=3),
            ]
        ),
        lambda callback, folder: (files(folder), float(callback.callbacks[0].best)),
        by_main=True,
    ),
    "BackupAndRestore": Case(
        lambda folder: K.BackupAndRestore(folder / "backup", delete_checkpoint=False), lambda callback, folder: files(folder)
    ),
    "SwapEMAWeights": Case(
        lambda folder: K.SwapEMAWeights(),
        nothing,
        rate=0.3,
        at_home={"use_ema": True, "ema_momentum": 0.5},
        beside=lambda: [Ema(0.5)],
    ),
    "TerminateOnNaN": Case(
        lambda folder: K.CallbackList([K.TerminateOnNaN(), Events()]), lambda callback, folder: None, rate=1e30
    ),
}
REFUSED = {"TensorBoard": r"cadenza.sinks.TensorBoard\(\)", "OrbaxCheckpoint": r"Add Checkpoint\(...\) to callbacks"}
EXPORTED = {name for name in dir(K) if name[0].isupper()}


class Sends(K.RemoteMonitor):  # type: ignore[misc]
    """Sends to a server that runs as long as the training."""

    def __init__(self) -> None:
        super().__init__(send_as_json=True)
        self.received: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.server = server()
        self.root, self.received = self.server.__enter__()

    def on_train_end(self, logs: Any = None) -> None:
        self.server.__exit__(None, None, None)


def natively(name: str, folder: Path, *, ranks: int = 1) -> Any:
    """Train on this rank; return the history, the weights and what the case shows."""
    case, model = CASES[name], native_model()
    folder.mkdir(parents=True, exist_ok=True)
    callback, history = case.make(folder), K.History()
    run = Trainer(
        model,
        torch.optim.SGD(model.parameters(), case.rate),
        TensorBatches(INPUTS, TARGETS, batch_size=4 // ranks),
        supervised(nn.functional.mse_loss),
        max_epochs=4,
        driver="auto" if ranks == 1 else "ddp",
        device="cpu",
        progress=False,
        callbacks=[*case.beside(), callback, history, Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=3))],
    ).fit()
    shown = None if case.by_main and not run.is_main else case.shows(callback, folder)
    return history.history, history.epoch, shown


def at_home(name: str, folder: Path) -> Any:
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    callback, history = case.make(folder), K.History()
    fit_at_home([callback, history], epochs=4, rate=case.rate, samples=8, batch_size=4, **case.at_home)
    return history.history, history.epoch, case.shows(callback, folder)


def rank(folder: str) -> list[Any]:
    torch.set_num_threads(1)
    return [natively(name, Path(folder) / name, ranks=2) for name in CASES]


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


@pytest.fixture(scope="module")
def on_two() -> Iterator[list[list[Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield launch(partial(rank, folder))


def test_no_class_is_missing() -> None:
    assert {*CASES, *REFUSED} == EXPORTED


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_effect_is_that_of_fit(name: str, tmp_path: Path, on_two: list[list[Any]]) -> None:
    home = at_home(name, tmp_path / "home")
    one = natively(name, tmp_path / "one")
    main, other = (results[[*CASES].index(name)] for results in on_two)
    assert_close(one, home, "on one process")
    assert_close(main, home, "on two processes")
    assert repr(other[:2]) == repr(main[:2])  # bit for bit; NaN differs from itself


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_run_names_its_replacement(name: str) -> None:
    with warnings.catch_warnings(), pytest.raises(AdapterError, match=REFUSED[name]):
        classes.check(getattr(K, name))

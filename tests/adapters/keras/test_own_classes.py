"""Classes as in Keras's guide "Writing your own callbacks" see and do in a native run what they see and do in ``model.fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from cadenza.callbacks import Checkpoint
from tests.adapters.keras.parts import INPUTS, TARGETS, K, Recorder, fit_at_home, fit_natively, keras, native_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Sees(K.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


class Prints(Sees):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"Up to batch {batch}, the average loss is {logs['loss']:7.2f}.")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"Up to batch {batch}, the average loss is {logs['loss']:7.2f}.")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(f"The average loss for epoch {epoch} is {logs['loss']:7.2f}, {list(logs)}")


class StopsAtMinimum(Sees):
    best: float = numpy.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if numpy.less(logs.get("loss"), self.best):
            self.best, self.best_weights = logs.get("loss"), self.model.get_weights()
        else:
            self.model.stop_training = True
            self.model.set_weights(self.best_weights)
        self.seen += [epoch, *(float(one.sum()) for one in self.model.get_weights())]


class Schedules(Sees):
    def on_train_begin(self, logs: Any = None) -> None:
        self.rate = self.model.optimizer.learning_rate  # not a copy
        self.seen.append((self.params["steps"], self.params["epochs"], logs))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = float(keras.ops.convert_to_numpy(self.rate)) * 0.5
        self.seen += [float(self.rate), self.rate.numpy().dtype, self.rate.dtype]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rate.assign(self.rate * 0.9)
        self.rate.assign_add(0.001)
        self.seen += [
            float(self.rate),
            float(1 / self.rate),
            bool(self.rate < 0.02),
            int(self.model.optimizer.iterations.value),
        ]


class Predicts(Sees):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        inputs, targets = INPUTS.numpy().astype("float64"), TARGETS.numpy()
        outputs = [self.model.predict(inputs, batch_size=3, verbose=0), self.model.predict_on_batch(inputs)]
        self.seen += [(one.shape, one.dtype.name, float(one.sum())) for one in outputs]
        self.seen += [float(self.model(inputs).sum()), float(self.model(INPUTS, training=False).sum())]
        self.seen += [self.model.evaluate(inputs, targets, verbose=0)]
        self.seen += [self.model.evaluate(inputs, targets, batch_size=4, verbose=0, return_dict=True)["loss"]]


class Inspects(Sees):
    def on_train_begin(self, logs: Any = None) -> None:
        lines: list[str] = []
        self.model.summary(print_fn=lambda line, **others: lines.append(line))
        self.seen += [bool(lines), self.model.count_params(), self.model.metrics_names, self.model.compiled]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen += [self.model.history.epoch[:], {name: len(one) for name, one in self.model.history.history.items()}]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            self.seen += [(len(layer.get_weights()), layer.count_params(), layer.trainable)]
            self.seen += [float(numpy.linalg.norm(numpy.asarray(one))) for one in layer.trainable_weights]


class Gradients(Sees):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for one in self.model.trainable_variables:
            self.seen += [one.ndim, float(keras.ops.norm(one)), float(torch.norm(one)), float((one * one).sum())]
            self.seen += [float(numpy.abs(one.numpy()).max()), float(one.value.grad.norm())]


class Stops(Recorder):
    """Sets ``stop_training`` in one event, and keeps what follows."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.event = event

    def see(self, name: str, number: int | None, logs: dict[str, Any]) -> None:
        self.seen.append((name, number, list(logs), bool(self.model.stop_training)))
        if name == self.event and (number == 1 or name == "on_train_begin"):
            self.model.stop_training = True


EVENTS = ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end"]


class Hesitates(Sees):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)
        self.model.stop_training = True
        self.model.stop_training = epoch == 1


def flat(value: Any) -> list[Any]:
    return [inner for one in value for inner in flat(one)] if isinstance(value, list | tuple) else [value]


def close(values: list[Any]) -> list[Any]:
    return [pytest.approx(one, rel=1e-4) if isinstance(one, float) else one for one in flat(values)]


@pytest.mark.parametrize(
    ("kinds", "rate"),
    [([Prints, Predicts, Inspects, Gradients], 0.1), ([StopsAtMinimum], 0.9), ([Schedules], 0.1), ([Hesitates], 0.1)],
    ids=["looks", "stops", "schedules", "hesitates"],
)
def test_a_class_of_ones_own_sees_what_it_sees_in_fit(kinds: list[Any], rate: float) -> None:
    home, native = [kind() for kind in kinds], [kind() for kind in kinds]
    fit_at_home(home, rate=rate)
    fit_natively(native, rate=rate, model=nn.Sequential(native_model()))
    for one, other in zip(native, home, strict=True):
        assert one.seen
        assert flat(one.seen) == close(other.seen)


@pytest.mark.parametrize("event", EVENTS)
def test_a_stop_takes_effect_after_the_batch_and_the_epoch_is_evaluated(event: str) -> None:
    home, native = Stops(event), Stops(event)
    fit_at_home([home])
    run = fit_natively([native])
    assert native.seen == home.seen
    assert run.why("stopped").startswith("stopped by Stops at epoch ")


class History(Sees):
    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append((self.model.history.epoch, self.model.history.history))


def test_a_run_that_a_limit_cut_continues_as_if_it_was_whole(tmp_path: Path) -> None:
    def fit(folder: str, **limit: Any) -> list[Any]:
        rows, history, own = K.CSVLogger(tmp_path / folder / "rows.csv"), K.History(), History()
        callbacks = [rows, own, Schedules(), Checkpoint()]
        fit_natively([*callbacks, history], directory=tmp_path / folder, resume="auto", **limit)
        return [history.epoch, history.history, own.seen[-1], (tmp_path / folder / "rows.csv").read_text()]

    whole = fit("whole")
    for steps in (3, 4, 6):
        fit(f"cut at {steps}", max_steps=steps)
        assert fit(f"cut at {steps}") == whole

"""Events, their order and numbers, and what classes of one's own see and do: as in ``model.fit``, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.compat.keras.callback import KerasCallback
from cadenza.compat.keras.events import EVENTS
from cadenza.loading import TensorBatches
from cadenza.loops.foreign_callbacks import adapt, base_of
from cadenza.testing import prove_resume
from tests.compat.keras import parts as pair
from tests.compat.keras.parts import INPUTS, TARGETS, K, Recorder, acting, keras, native_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# -- events ------------------------------------------------------------------------------------------------


def assert_same(native: list[Any], home: list[Any], tolerance: float = 1e-5) -> None:
    assert [one[:2] + one[3:] for one in native] == [one[:2] + one[3:] for one in home]
    for (event, number, logs, _), (_, _, expected, _) in zip(native, home, strict=True):
        assert list(logs) == list(expected), (event, number)
        assert all(type(value) is float for value in logs.values())
        assert logs == pytest.approx(expected, rel=tolerance), (event, number)


def test_the_events_of_a_run_are_those_of_fit_in_order_and_numbers() -> None:
    home, native = Recorder(), Recorder()
    pair.fit_at_home([home])
    pair.fit_natively([native])
    assert len(native.seen) == 80
    assert_same(native.seen, home.seen)
    assert native.params == {"verbose": 1, "epochs": 3, "steps": 4}


def test_every_event_that_keras_has_is_in_the_table() -> None:
    assert {name for name in dir(K.Callback) if name.startswith(("on_", "set_"))} == EVENTS.keys()


def fail(self: Any, batch: int, logs: Any = None) -> None:
    if batch == 2:
        raise ZeroDivisionError("in the third batch")


def test_after_an_error_no_end_is_called_as_in_fit() -> None:
    home, native = Recorder(), Recorder()
    with pytest.raises(ZeroDivisionError):
        pair.fit_at_home([home, acting("Fails", on_batch_end=fail)])
    with pytest.raises(ZeroDivisionError) as error:
        pair.fit_natively([native, acting("Fails", on_batch_end=fail)])
    assert_same(native.seen, home.seen)
    assert native.seen[-1][0] == "on_batch_end"
    assert "Fails" in error.value.__notes__[0]


def test_batches_that_are_skipped_have_a_loss_and_do_not_count() -> None:
    @on(Callback.on_before_backward)
    def skips(run: Run, outputs: Any) -> None:
        if run.progress.epoch == 1 or run.progress.batch_in_epoch == 1:
            run.skip_batch("for the test")

    ends = {"batch": list[float](), "epoch": list[float]()}
    shows = K.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends["batch"].append(logs["loss"]),
        on_epoch_end=lambda epoch, logs: ends["epoch"].append(logs["loss"]),
    )
    pair.fit_natively([shows, skips], max_epochs=2)
    assert ends["batch"][1] == ends["batch"][0]
    assert ends["batch"][3] == ends["epoch"][0]
    assert ends["batch"][7] == ends["epoch"][1]


def test_with_accumulation_a_batch_ends_before_the_next_and_the_last_one_after_the_update() -> None:
    native = Recorder()
    pair.fit_natively([native], max_epochs=1, accumulate=3, validate=False)
    batches = [(event, number, updates) for event, number, _, updates in native.seen if "_train_batch" in event]
    assert batches == [
        *(("on_train_batch_begin", 0, 0), ("on_train_batch_end", 0, 0)),
        *(("on_train_batch_begin", 1, 0), ("on_train_batch_end", 1, 0)),
        *(("on_train_batch_begin", 2, 0), ("on_train_batch_end", 2, 1)),
        *(("on_train_batch_begin", 3, 1), ("on_train_batch_end", 3, 2)),  # a short window, which is applied
    ]
    assert native.params["steps"] == 4


def test_prediction_and_evaluation_outside_of_a_run_have_their_events() -> None:
    callback = Recorder()
    trainer = pair.native_trainer([callback], validate=False, max_epochs=1)
    trainer.fit()
    callback.seen.clear()
    loader = TensorBatches(INPUTS, TARGETS, batch_size=5)
    results = trainer.evaluate(loader)
    assert [one[:2] for one in callback.seen] == [
        ("on_test_begin", None),
        *(("on_test_batch_begin", 0), ("on_test_batch_end", 0), ("on_test_batch_begin", 1), ("on_test_batch_end", 1)),
        ("on_test_end", None),
    ]
    assert callback.seen[-1][2] == {"loss": results["eval/loss"]}
    callback.seen.clear()
    predicted = trainer.predict(loader)
    assert [event for event, *_ in callback.seen] == [
        "on_predict_begin",
        *("on_predict_batch_begin", "on_predict_batch_end") * 2,
        "on_predict_end",
    ]
    parts = [torch.as_tensor(logs["outputs"]) for event, _, logs, _ in callback.seen if event == "on_predict_batch_end"]
    assert torch.equal(torch.cat(parts), predicted)


def test_of_a_class_with_both_names_of_an_event_the_newer_one_decides() -> None:
    def both(seen: list[str]) -> Any:
        return acting(
            "Both",
            on_train_batch_end=lambda self, batch, logs=None: seen.append("newer"),
            on_batch_end=lambda self, batch, logs=None: seen.append("older"),
        )

    home, native = list[str](), list[str]()
    pair.fit_at_home([both(home)], epochs=1)
    pair.fit_natively([both(native)], max_epochs=1)
    assert native == home == ["newer"] * 4


def test_a_callback_of_the_older_package_is_recognized_by_its_name() -> None:
    base = type("Callback", (), {"__module__": "tf_keras.src.callbacks", "on_epoch_end": lambda self, epoch, logs=None: None})

    class Older(base):  # type: ignore[misc, valid-type]
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            pass

    assert base_of(Older()) is base
    adapter = adapt(Older())
    assert isinstance(adapter, KerasCallback)
    assert adapter.overridden() == ["on_epoch_end"]


# -- classes as in Keras's guide "Writing your own callbacks" ----------------------------------------------


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


STOPS = ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end"]


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
    pair.fit_at_home(home, rate=rate)
    pair.fit_natively(native, rate=rate, model=nn.Sequential(native_model()))
    for one, other in zip(native, home, strict=True):
        assert one.seen
        assert flat(one.seen) == close(other.seen)


@pytest.mark.parametrize("event", STOPS)
def test_a_stop_takes_effect_after_the_batch_and_the_epoch_is_evaluated(event: str) -> None:
    home, native = Stops(event), Stops(event)
    pair.fit_at_home([home])
    run = pair.fit_natively([native])
    assert native.seen == home.seen
    assert run.why("stopped").startswith("stopped by Stops at epoch ")
    assert "model.stop_training" in run.why("stopped")


class History(Sees):
    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append((self.model.history.epoch, self.model.history.history))


def test_a_run_that_a_limit_cut_continues_as_if_it_was_whole(tmp_path: Path) -> None:
    def fit(folder: str, **limit: Any) -> list[Any]:
        rows, history, own = K.CSVLogger(tmp_path / folder / "rows.csv"), K.History(), History()
        callbacks = [rows, own, Schedules(), Checkpoint()]
        pair.fit_natively([*callbacks, history], directory=tmp_path / folder, resume="auto", **limit)
        return [history.epoch, history.history, own.seen[-1], (tmp_path / folder / "rows.csv").read_text()]

    whole = fit("whole")
    for steps in (3, 4, 6):
        fit(f"cut at {steps}", max_steps=steps)
        assert fit(f"cut at {steps}") == whole


# -- runs that continue ------------------------------------------------------------------------------------


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
    return pair.native_trainer(
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
    run = pair.native_trainer([history, *evaluations], validate=False).fit()
    assert len(history.history["val_loss"]) == 3
    assert history.history["val_loss"] == [run.history["val/loss"][index][1] for index in (0, 1, 3)]
    assert history.history["test_loss"] == [run.history["test/loss"][0][1]]

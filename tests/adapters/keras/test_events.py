"""Events, their order and their numbers are those of ``model.fit``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.adapters.foreign import ForeignCallback
from cadenza.adapters.keras.callback import KerasCallback
from cadenza.adapters.keras.events import EVENTS
from cadenza.adapters.recognition import adapt, base_of
from cadenza.loading import TensorBatches
from tests.adapters.keras.parts import INPUTS, TARGETS, K, Recorder, fit_at_home, fit_natively, native_trainer


def assert_same(native: list[Any], home: list[Any], tolerance: float = 1e-5) -> None:
    assert [one[:2] + one[3:] for one in native] == [one[:2] + one[3:] for one in home]
    for (event, number, logs, _), (_, _, expected, _) in zip(native, home, strict=True):
        assert list(logs) == list(expected), (event, number)
        assert all(type(value) is float for value in logs.values())
        assert logs == pytest.approx(expected, rel=tolerance), (event, number)


def test_the_events_of_a_run_are_those_of_fit_in_order_and_numbers() -> None:
    home, native = Recorder(), Recorder()
    fit_at_home([home])
    fit_natively([native])
    assert len(native.seen) == 80
    assert_same(native.seen, home.seen)
    assert native.params == {"verbose": 1, "epochs": 3, "steps": 4}


def test_every_event_that_keras_has_is_in_the_table() -> None:
    assert {name for name in dir(K.Callback) if name.startswith(("on_", "set_"))} == EVENTS.keys()


class StopsAt(K.Callback):  # type: ignore[misc]
    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == self.iterations:
            self.model.stop_training = True


def test_a_stop_in_an_epoch_ends_that_epoch_as_in_fit() -> None:
    home, native = Recorder(), Recorder()
    fit_at_home([home, StopsAt(6)], validate=False)
    run = fit_natively([native, StopsAt(6)], validate=False)
    assert_same(native.seen, home.seen)
    assert run.progress.step == 6
    assert run.why("stopped").startswith("stopped by StopsAt at epoch 1, step 6")
    assert "model.stop_training" in run.why("stopped")


class Fails(K.Callback):  # type: ignore[misc]
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise ZeroDivisionError("in the third batch")


def test_after_an_error_no_end_is_called_as_in_fit() -> None:
    home, native = Recorder(), Recorder()
    with pytest.raises(ZeroDivisionError):
        fit_at_home([home, Fails()])
    with pytest.raises(ZeroDivisionError) as error:
        fit_natively([native, Fails()])
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
    fit_natively([shows, skips], max_epochs=2)
    assert ends["batch"][1] == ends["batch"][0]
    assert ends["batch"][3] == ends["epoch"][0]
    assert ends["batch"][7] == ends["epoch"][1]


def test_with_accumulation_a_batch_ends_before_the_next_and_the_last_one_after_the_update() -> None:
    native = Recorder()
    fit_natively([native], max_epochs=1, accumulate=3, validate=False)
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
    trainer = native_trainer([callback], validate=False, max_epochs=1)
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


def test_functions_of_a_lambda_callback_are_events() -> None:
    seen: list[Any] = []
    callback = K.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"] > 0)),
        on_epoch_end=lambda epoch, logs: seen.append((epoch, sorted(logs))),
        on_test_end=lambda logs: seen.append(sorted(logs)),
    )
    fit_natively([callback], max_epochs=1)
    assert seen == [*((batch, True) for batch in range(4)), ["loss"], (0, ["loss", "val_loss"])]


def test_of_a_class_with_both_names_of_an_event_the_newer_one_decides() -> None:
    class Both(K.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append("newer")

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append("older")

    home, native = Both(), Both()
    fit_at_home([home], epochs=1)
    fit_natively([native], max_epochs=1)
    assert native.seen == home.seen == ["newer"] * 4


def test_a_callback_without_events_has_no_listeners() -> None:
    trainer = native_trainer([K.Callback()], validate=False)
    (adapter,) = [one for one in trainer.callbacks if isinstance(one, ForeignCallback)]
    assert adapter.listeners() == []


def test_a_callback_of_the_older_package_is_recognized_by_its_name() -> None:
    base = type("Callback", (), {"__module__": "tf_keras.src.callbacks", "on_epoch_end": lambda self, epoch, logs=None: None})

    class Older(base):  # type: ignore[misc, valid-type]
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            pass

    assert base_of(Older()) is base
    adapter = adapt(Older())
    assert isinstance(adapter, KerasCallback)
    assert adapter.overridden() == ["on_epoch_end"]

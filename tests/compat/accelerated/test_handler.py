"""A12 and A13: the handler, and custom events."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza import Callback, Run
from cadenza.compat.accelerated.callbacks import CallbackHandler, LogMetricsCallback, PrintProgressCallback, TrainerCallback
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import hooks_of
from tests.compat.accelerated.parts import Again, Noting, data, train, trainer_of


def test_a12_a_second_callback_of_the_same_class_is_an_error_but_a_subclass_is_not() -> None:
    class Other(LogMetricsCallback):
        pass

    handler = CallbackHandler([LogMetricsCallback, PrintProgressCallback(), Other])
    assert handler.callback_list == ["LogMetricsCallback", "PrintProgressCallback", "Other"]
    with pytest.raises(
        ValueError, match="LogMetricsCallback is already in the list; got a second one beside LogMetricsCallback, Print"
    ):
        handler.add_callback(LogMetricsCallback())
    handler.clear_callbacks()
    handler.add_callbacks([LogMetricsCallback])
    assert len(handler) == 1


def test_a12_events_are_called_in_the_order_of_registration_and_an_unknown_one_is_no_error() -> None:
    noting, again = Noting(), Again()
    again.log = noting.log
    handler = CallbackHandler([noting, again])
    trainer = trainer_of()
    assert handler.call_event("on_train_epoch_start", trainer) is None  # type: ignore[func-returns-value]  # that is the point
    assert handler.call_event("on_nothing_at_all", trainer, more=1) is None  # type: ignore[func-returns-value]  # likewise
    assert noting.log == ["on_train_epoch_start"] * 2
    assert list(handler) == [noting, again]


@pytest.mark.parametrize("thing", [42, object(), int])
def test_a12_an_object_that_is_no_callback_is_an_error(thing: Any) -> None:
    with pytest.raises(CallbackError, match="expected an instance or a subclass of TrainerCallback"):
        trainer_of(callbacks=[thing])


class Verify(TrainerCallback):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def verify_train_batch(self, trainer: Trainer, xb: Any, yb: Any) -> None:
        assert trainer.run_config is not None
        assert len(xb) == trainer.run_config["train_per_device_batch_size"]
        self.shapes.append(tuple(xb.shape))


class Verifying(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        xb, yb = batch
        self.callback_handler.call_event("verify_train_batch", trainer=self, xb=xb, yb=yb)
        return super().calculate_train_batch_loss(batch)


def test_a13_a_custom_event_is_called_on_the_callbacks_that_define_it() -> None:
    verify, noting = Verify(), Noting()
    train(trainer_of(Verifying, [noting, verify]), 1, data(2))
    assert verify.shapes == [(2, 1), (2, 1)]


def test_a13_its_own_attribute_error_is_not_taken_for_a_missing_event() -> None:
    class Broken(TrainerCallback):
        def verify_train_batch(self, trainer: Trainer, xb: Any, yb: Any) -> None:
            self.nothing  # type: ignore[attr-defined]  # noqa: B018  # the mistake that is meant

    with pytest.raises(AttributeError, match="nothing"):
        train(trainer_of(Verifying, [Broken]), 1, data(1))


def test_callbacks_added_during_a_run_get_the_events_from_then_on() -> None:
    class Adding(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.callback_handler.add_callback(noting)

    noting = Noting()
    train(trainer_of(callbacks=[Adding]), 1, data(2), data(1))
    assert noting.log == [
        *["on_train_epoch_end", "on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"],
        *["on_training_run_epoch_end", "on_training_run_end"],
    ]


def test_removed_callbacks_get_no_more_events() -> None:
    class Clearing(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.callback_handler.clear_callbacks()

    noting = Noting()
    train(trainer_of(callbacks=[Clearing, noting]), 1, data(2))
    assert noting.log == ["on_init_end", "on_training_run_start"]


def test_native_callbacks_may_be_in_the_same_list() -> None:
    class Steps(Callback):
        def on_step_end(self, run: Run) -> None:
            steps.append(run.progress.step)

    steps: list[int] = []
    trainer = trainer_of(callbacks=[Steps(), Noting(), Steps()])
    train(trainer, 1, data(4), gradient_accumulation_steps=2)
    assert steps == [1, 1, 2, 2]
    assert trainer.native_run is not None
    assert list(hooks_of(trainer.native_run).callbacks) == [
        "Trainer's hooks",
        "Steps",
        "Noting",
        "Steps#2",
        "Trainer's evaluation",
    ]

"""A8-A11 and A14: stops, errors, losses that are not finite, and early stopping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.compat.accelerated.callbacks import (
    EarlyStoppingCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from cadenza.compat.accelerated.trainer import Trainer
from tests.compat.accelerated.parts import (
    HERE,
    Again,
    Hooks,
    Noting,
    Scripted,
    ScriptedTrainer,
    data,
    noting_trainer,
    run_of,
    train,
    trainer_of,
    weights_of,
)


class Raises(TrainerCallback):
    """Raises an error at the n-th time of an event."""

    def __init__(self, event: str, error: BaseException, at: int = 1) -> None:
        def hook(trainer: Trainer, *_: Any, **keywords: Any) -> None:
            self.calls += 1
            if self.calls == at:
                raise error

        self.calls = 0
        setattr(self, event, hook)


def stopped_in(event: str, at: int = 1) -> tuple[Trainer, Noting, Again]:
    """Return a trainer that was stopped in an event, and the callbacks before and after the one that stopped it."""
    before, after = Noting(), Again()
    trainer = trainer_of(callbacks=[before, Raises(event, StopTrainingError("enough"), at), after])
    train(trainer, 3, data(3), data(2))
    return trainer, before, after


EVENTS_THAT_STOP = [
    ("on_train_epoch_start", 2, 2),
    ("on_train_step_start", 5, 2),
    ("on_train_step_end", 5, 2),
    ("on_train_epoch_end", 2, 2),
    ("on_eval_epoch_start", 2, 2),
    ("on_eval_step_start", 3, 2),
    ("on_eval_step_end", 3, 2),
    ("on_eval_step_end", 4, 2),  # the last batch
    ("on_eval_epoch_end", 2, 2),
    ("on_training_run_epoch_end", 2, 2),
]


@pytest.mark.parametrize(("event", "at", "epoch"), EVENTS_THAT_STOP)
def test_a8_after_a_stop_on_stop_training_error_is_called_once_and_the_run_ends(
    event: str, at: int, epoch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, before, after = stopped_in(event, at)
    assert before.log[-3:] == [event, "on_stop_training_error", "on_training_run_end"]
    assert after.log == before.log[:-3] + before.log[-2:]  # later callbacks do not get the event itself
    assert trainer.run_history.current_epoch == epoch
    assert "enough" in capsys.readouterr().out
    outcome = run_of(trainer).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("stopped", "enough")
    assert "Raises at epoch" in run_of(trainer).why("stopped")


def stop(self: Trainer, *_: Any) -> None:
    raise StopTrainingError("enough")


@pytest.mark.parametrize(
    ("hook", "last"),
    [
        ("train_epoch_start", "on_training_run_start"),
        ("calculate_train_batch_loss", "on_train_step_start"),
        ("backward_step", "on_train_step_end"),
        ("optimizer_step", "on_train_step_end"),
        ("optimizer_zero_grad", "on_train_step_end"),
        ("train_epoch_end", "on_train_step_end"),
        ("eval_epoch_start", "on_train_epoch_end"),
        ("calculate_eval_batch_loss", "on_eval_step_start"),
        ("eval_epoch_end", "on_eval_step_end"),
        ("training_run_epoch_end", "on_eval_epoch_end"),
    ],
)
def test_a8_a_hook_may_stop_as_well(hook: str, last: str) -> None:
    noting = Noting()
    trainer = train(trainer_of(type("Stopping", (Trainer,), {hook: stop}), [noting]), 3, data(3), data(2))
    assert noting.log[-3:] == [last, "on_stop_training_error", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 1


def test_a8_after_a_stop_at_the_end_of_a_step_there_is_no_backward_and_no_update() -> None:
    @on(Callback.on_after_backward)
    def count(run: Run, outputs: Any) -> None:
        backward.append(run.progress.batch_in_epoch)

    backward: list[int] = []
    trainer, noting = noting_trainer(Raises("on_train_step_end", StopTrainingError("enough"), at=2), count)
    train(trainer, 3, data(5), gradient_accumulation_steps=3)
    assert backward == [0]  # nor do native callbacks get the remaining batch of the window
    counts = Counter(noting.log)
    assert (counts["[calculate_train_batch_loss]"], counts["[backward_step]"], counts["[optimizer_step]"]) == (2, 1, 0)
    assert weights_of(trainer).tolist() == [0.5, 0.0]


ERRORS = (RuntimeError("broken"), KeyboardInterrupt())


@pytest.mark.parametrize(
    ("run", "event", "error"),
    [
        *(
            (run, f"on_{run}_run_{end}", StopTrainingError("enough"))
            for run in ("training", "evaluation")
            for end in ("start", "end")
        ),
        *(("training", event, error) for event in ("on_train_step_end", "on_train_epoch_end") for error in ERRORS),
        *((run, "on_eval_step_end", error) for run in ("training", "evaluation") for error in ERRORS),
    ],
)
def test_a9_and_a10_a_stop_outside_the_epochs_and_any_other_error_are_raised_and_no_event_is_called(
    run: str, event: str, error: BaseException
) -> None:
    before, after = Noting(), Again()
    trainer = trainer_of(callbacks=[before, Raises(event, error), after])
    runs: dict[str, Callable[[], object]] = {
        "training": lambda: train(trainer, 2, data(3), data(2)),
        "evaluation": lambda: trainer.evaluate(data(1), dataloader_kwargs=HERE),
    }
    with pytest.raises(type(error)):
        runs[run]()
    assert before.log[-1] == event
    assert event not in after.log
    assert "on_training_run_end" not in [*before.log[:-1], *after.log]


@pytest.mark.parametrize("hook", ["evaluation_run_start", "evaluation_run_end"])
def test_a9_a_stop_in_a_hook_around_an_evaluation_run_or_in_the_constructor_is_an_error(hook: str) -> None:
    with pytest.raises(StopTrainingError, match="enough"):
        trainer_of(type("Stopping", (Trainer,), {hook: stop})).evaluate(data(1), dataloader_kwargs=HERE)
    with pytest.raises(StopTrainingError):
        trainer_of(callbacks=[Raises("on_init_end", StopTrainingError("enough"))])


def test_a10_an_attribute_error_in_a_callback_is_not_swallowed() -> None:
    class Mistyped(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.conut += 1  # type: ignore[attr-defined]  # the mistake that is meant

    with pytest.raises(AttributeError, match="conut") as raised:
        train(trainer_of(callbacks=[Mistyped]), 1, data(1))
    assert "raised in Mistyped.on_epoch_start (callback 2 of 3)" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a11_a_loss_that_is_not_finite_ends_a_training_and_the_process_but_only_stops_an_evaluation_run(bad: float) -> None:
    class Counting(ScriptedTrainer):
        def backward_step(self, loss: torch.Tensor) -> None:
            backward.append(loss.item())
            super().backward_step(loss)

    backward: list[float] = []
    before, after = Noting(), Again()
    trainer = trainer_of(Counting, [before, TerminateOnNaNCallback, after])
    with pytest.raises(SystemExit, match=str(bad)):
        train(trainer, 2, Scripted(1.0, bad, 1.0), batch_size=1)
    assert backward == [1.0]
    assert before.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert after.log[-1] == "on_stop_training_error"
    before.log.clear()
    trainer.evaluate(Scripted(1.0, bad, 1.0), per_device_batch_size=1, dataloader_kwargs=HERE)
    assert before.log.count("on_eval_step_end") == 2
    assert before.log[-3:] == ["on_eval_step_end", "on_stop_training_error", "on_evaluation_run_end"]


@pytest.mark.parametrize(
    ("metrics", "arguments", "epochs"),
    [
        ([1.0, 0.995, 0.1], {}, 2),
        ([1.0, 0.995, 0.98, 0.975, 0.974, 0.1], {"early_stopping_patience": 2}, 5),
        ([1.0, 0.1], {"early_stopping_patience": 0}, 1),
        ([0.5, 0.52, 0.525, 0.9], {"greater_is_better": True}, 3),
        ([1.0, 0.9, 0.8, 0.7], {}, 4),
        ([1.0, 0.5, 0.1], {"early_stopping_threshold": 0.5}, 2),  # the threshold is strict
        ([float("nan"), 1.0, 0.5, 0.6, 0.7], {"early_stopping_patience": 2, "early_stopping_threshold": 0.0}, 5),
        ([float("nan"), float("nan"), 0.1], {"early_stopping_patience": 2}, 2),  # NaN is no improvement
    ],
)
def test_a14_early_stopping_stops_after_the_sequences_of_the_original(
    metrics: list[float], arguments: Any, epochs: int
) -> None:
    def report(trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("result", metrics[trainer.run_history.current_epoch - 1])

    callbacks = [Hooks(on_eval_epoch_end=report), EarlyStoppingCallback(watch_metric="result", **arguments)]
    trainer = train(trainer_of(callbacks=callbacks), len(metrics), data(1), data(1))
    assert len(trainer.run_history.get_metric_values("result")) == epochs


def test_a14_a_missing_metric_is_an_error_that_names_the_recorded_ones() -> None:
    with pytest.raises(ValueError, match=r"'eval_loss_epoch'.*The run history has train_loss_epoch"):
        train(trainer_of(callbacks=[EarlyStoppingCallback]), 2, data(1))


@pytest.mark.parametrize(("reset", "best"), [(True, 5.0), (False, 1.0)])
def test_another_training_resets_early_stopping_unless_reset_on_train_is_false(reset: bool, best: float) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=9, reset_on_train=reset, watch_metric="train_loss_epoch")
    trainer = trainer_of(ScriptedTrainer, [stop])
    for loss in (1.0, 5.0):
        train(trainer, 1, Scripted(loss), batch_size=1)
    assert stop.best_metric == best

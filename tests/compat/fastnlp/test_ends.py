"""The end of a training and its events, and callbacks that end it early: cases 13 to 15 and 17."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback as NativeCallback
from cadenza.callbacks import EarlyStopping, Evaluate, Limit
from cadenza.compat.fastnlp import EarlyStopCallback, EarlyStopException, Event
from cadenza.testing import Recorder, tiny_loader, tiny_run
from tests.compat.fastnlp.toy import Hooks, Raising, Scribe, Scripted, Toy, live, toy_trainer, trained, weights_of


def test_case_13_on_exception_is_called_for_an_error_and_the_error_is_raised() -> None:
    scribe, error = Scribe(), RuntimeError("third")
    with pytest.raises(RuntimeError, match="third"):
        trained(20, [Raising("on_train_batch_end", 3, error), scribe], n_epochs=1)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 3, 3)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert "on_train_epoch_end" not in scribe.names
    assert scribe.at("on_train_batch_end") == [(0, 1, 1), (0, 2, 2)]  # callbacks after the failing one do not get the event


@pytest.mark.parametrize(
    ("event", "caught"),
    [
        ("on_train_batch_begin", True),
        ("on_before_backward", True),
        ("on_before_optimizers_step", True),
        ("on_train_batch_begin", False),
    ],
)
def test_case_14_ctrl_c_in_the_third_batch_ends_the_training_and_is_raised_unless_it_is_caught(
    event: str, caught: bool
) -> None:
    scribe = Scribe()
    trainer = toy_trainer(20, [Raising(event, 2, KeyboardInterrupt()), scribe], n_epochs=1)
    with nullcontext() if caught else pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=None if caught else False)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


def test_ctrl_c_with_several_processes_is_raised(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trainer = toy_trainer(20, [Raising("on_train_batch_begin", 2, KeyboardInterrupt())], n_epochs=1)
    monkeypatch.setattr(trainer.driver, "is_distributed", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=True)
    assert "catch_KeyboardInterrupt works in a single process only" in caplog.text


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_sanity_check_begin", KeyboardInterrupt()), ("on_sanity_check_end", EarlyStopException("no"))],
    ids=["Ctrl-C", "stop"],
)
def test_case_15_a_stop_or_ctrl_c_before_the_training_is_raised(event: str, error: BaseException) -> None:
    scribe = Scribe("on_exception", "on_train_end")
    trainer = toy_trainer(20, [Raising(event, 0, error), scribe], {"acc": Scripted(0.1, 0.1)}, n_epochs=1)
    for _ in range(2):
        with pytest.raises(type(error)):
            trainer.run()
    assert scribe.seen == []


def test_an_evaluation_may_be_requested_in_on_train_end() -> None:
    seen: list[Any] = []
    last = Hooks(on_train_end=lambda trainer: seen.append(trainer.run_evaluate()))
    trained(8, last, {"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=1)
    assert seen == [{"acc#acc": 0.2}]


def test_an_error_that_a_hook_handles_does_not_disable_other_callbacks() -> None:
    def judge(trainer: Any) -> None:
        with pytest.raises(RuntimeError, match="judged"):
            trainer.run_evaluate()

    scribe, broken = Scribe("on_train_batch_end", "on_train_epoch_end"), Scribe()
    broken.on_evaluate_end = Raising("on_evaluate_end", 1, RuntimeError("judged")).on_evaluate_end  # type: ignore[method-assign]
    metrics = {"acc": Scripted(*range(9))}
    trained(4, [Hooks(on_train_batch_end=judge), scribe, broken], metrics, n_epochs=1, evaluate_every=-2)
    assert scribe.names == ["on_train_batch_end", "on_train_epoch_end"]


def test_after_an_error_in_the_optimizer_the_batch_does_not_count() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never returns
            raise RuntimeError("no step")

    model, scribe = Toy(), Scribe("on_exception")
    with pytest.raises(RuntimeError, match="no step"):
        toy_trainer(20, [scribe], model=model, optimizers=Broken(model.parameters(), 0.1), n_epochs=1).run()
    assert scribe.at("on_exception") == [(0, 0, 0)]


IN_A_BATCH = [
    "on_fetch_data_begin",
    "on_fetch_data_end",
    "on_train_batch_begin",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizers_step",
]


@pytest.mark.parametrize("event", IN_A_BATCH)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_case_15_a_stop_in_the_third_batch_ends_the_training_before_its_update(event: str, accumulate: int) -> None:
    stop, scribe = Raising(event, 2, EarlyStopException("enough")), Scribe()
    trainer = trained(20, [stop, scribe], n_epochs=4, accumulation_steps=accumulate)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert (trainer.cur_epoch_idx, trainer.global_forward_batches) == (0, 2)
    outcome = live(trainer).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("stopped", "enough")
    expected = trained(20, n_batches=2) if accumulate == 1 else Toy()
    assert torch.equal(weights_of(trainer), weights_of(expected))  # the third batch left no trace


@pytest.mark.parametrize("event", [*IN_A_BATCH, "on_after_optimizers_step", "on_train_batch_end"])
def test_in_a_native_trainer_a_stop_is_a_stop(event: str) -> None:
    scribe = Scribe()
    run = tiny_run(callbacks=[Raising(event, 2, EarlyStopException("enough")), scribe], epochs=3)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


def test_after_a_stop_at_the_start_no_epoch_begins() -> None:
    scribe = Scribe()
    trained(20, [Raising("on_train_begin", 0, EarlyStopException()), scribe], n_epochs=1)
    assert scribe.names == ["on_after_trainer_initialized", "on_exception", "on_train_end"]


def test_on_exception_gets_the_raised_exception_and_a_native_stop_as_an_early_stop() -> None:
    seen: list[BaseException] = []
    see, stop = Hooks(on_exception=lambda trainer, exception: seen.append(exception)), EarlyStopException("enough")
    trained(20, [Raising("on_train_batch_end", 3, stop), see], n_epochs=1)
    tiny_run(callbacks=[Raising("on_train_batch_end", 3, stop), see])
    assert seen == [stop, stop]
    assert stop.msg == "enough"
    seen.clear()
    evaluate = Evaluate(tiny_loader(), compute=lambda model, batch: {"loss": torch.tensor(1.0)})
    run = tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", mode="min", patience=1), see, Limit(9)], epochs=5)
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert [type(one) for one in seen] == [EarlyStopException]
    assert str(seen[0]) == run.outcome.reason


def test_a_stopped_training_continues_in_the_next_run() -> None:
    scribe = Scribe("on_train_batch_begin")
    trainer = trained(20, [Raising("on_train_epoch_begin", 5, EarlyStopException()), scribe], n_epochs=2)
    trainer.own_callbacks.pop(0)
    trainer.run()
    assert [g for *_, g in scribe.seen] == list(range(10))


def test_native_callbacks_get_the_ends_of_started_moments_after_a_stop() -> None:
    recorder = Recorder(NativeCallback.on_step_start, NativeCallback.on_step_end)
    tiny_run(callbacks=[Raising("on_before_backward", 1, EarlyStopException()), recorder])
    assert recorder.names == ["on_step_start", "on_step_end"] * 2


# -- early stop ------------------------------------------------------------------------------------------


def test_case_17_evaluations_between_batches_stop_before_the_next_fetch() -> None:
    scribe = Scribe("on_fetch_data_begin", "on_evaluate_end", "on_train_epoch_end", "on_exception", "on_train_end")
    metrics = {"acc": Scripted(0.0, 0.4, 0.3, 0.9, 0.9, 0.9)}
    trained(20, [scribe, EarlyStopCallback("acc#acc", patience=2)], metrics, evaluate_every=2, n_epochs=4)
    assert len(scribe.at("on_evaluate_end")) == 5
    assert scribe.at("on_train_epoch_end") == [(1, 0, 5)]
    assert scribe.seen[-3:] == [("on_fetch_data_begin", 1, 5, 10), ("on_exception", 1, 5, 10), ("on_train_end", 1, 5, 10)]


def test_a_training_that_ends_first_is_not_stopped() -> None:
    scribe = Scribe("on_exception", "on_train_epoch_end")
    trained(8, [scribe, EarlyStopCallback("acc", patience=2)], {"acc": Scripted(0.0, 3.0, 2.0, 1.0)}, n_epochs=3)
    assert scribe.names == ["on_train_epoch_end"] * 3


def test_a_checkpoint_restores_the_patience(tmp_path: Path) -> None:
    def stopped(*values: float, **run: Any) -> int:
        stop = EarlyStopCallback("acc", larger_better=False, patience=3)
        trainer = toy_trainer(8, stop, {"acc": Scripted(9.0, *values)}, n_epochs=len(values))
        if not run:
            trainer.add_callback_fn(Event.on_train_epoch_end(once=2), lambda trainer: trainer.save_checkpoint(tmp_path))
        trainer.run(**run)
        return int(trainer.cur_epoch_idx)

    assert stopped(0.1, 0.2, 0.3, 0.4, 0.5) == 4
    assert stopped(0.3, 0.2, 0.1, resume_from=tmp_path) == 3  # one was without gain before, two are now
    assert EarlyStopCallback("acc", patience=3).callback_name == "EarlyStopCallback#monitor-acc#patience-3"


def test_an_early_stop_needs_a_monitor_and_patience() -> None:
    with pytest.raises(RuntimeError, match="EarlyStopCallback needs a monitor"):
        toy_trainer(8, EarlyStopCallback(), {"acc": Scripted(0.0)})
    with pytest.raises(ValueError, match="patience must be a whole number of at least 1; got 0"):
        EarlyStopCallback("acc", patience=0)

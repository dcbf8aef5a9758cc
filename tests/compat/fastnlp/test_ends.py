"""The end of a training and its events: cases 13 to 15."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback as NativeCallback
from cadenza import Run
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, Limit
from cadenza.compat.fastnlp import Callback, EarlyStopException
from cadenza.testing import tiny_loader, tiny_run
from tests.compat.fastnlp.toy import Raising, Scribe, Scripted, Toy, toy_trainer


def test_case_13_on_exception_is_called_for_an_error_and_the_error_is_raised() -> None:
    scribe, error = Scribe(), RuntimeError("third")
    with pytest.raises(RuntimeError, match="third"):
        toy_trainer(20, [Raising("on_train_batch_end", 3, error), scribe], n_epochs=1).run()
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 3, 3)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert "on_train_epoch_end" not in scribe.names
    assert scribe.at("on_train_batch_end") == [(0, 1, 1), (0, 2, 2)]  # callbacks after the failing one do not get the event


@pytest.mark.parametrize("event", ["on_train_batch_begin", "on_before_backward", "on_before_optimizers_step"])
def test_case_14_ctrl_c_in_the_third_batch_ends_the_training(event: str) -> None:
    scribe = Scribe()
    toy_trainer(20, [Raising(event, 2, KeyboardInterrupt()), scribe], n_epochs=1).run()
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


def test_case_14_ctrl_c_is_raised_without_catch_keyboard_interrupt() -> None:
    scribe = Scribe("on_exception", "on_train_end")
    trainer = toy_trainer(20, [Raising("on_train_batch_begin", 2, KeyboardInterrupt()), scribe], n_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=False)
    assert scribe.seen == [("on_exception", 0, 2, 2), ("on_train_end", 0, 2, 2)]


def test_ctrl_c_with_several_processes_is_raised(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trainer = toy_trainer(20, [Raising("on_train_batch_begin", 2, KeyboardInterrupt())], n_epochs=1)
    monkeypatch.setattr(trainer.driver, "is_distributed", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=True)
    assert "catch_KeyboardInterrupt works in a single process only" in caplog.text


def test_ctrl_c_before_the_training_is_raised() -> None:
    scribe = Scribe("on_exception", "on_train_end")
    stop = Raising("on_sanity_check_begin", 0, KeyboardInterrupt())
    trainer = toy_trainer(20, [stop, scribe], {"acc": Scripted(0.1)}, n_epochs=1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    assert scribe.seen == []


def test_an_evaluation_may_be_requested_in_on_train_end() -> None:
    seen: list[Any] = []

    class Last(Callback):
        def on_train_end(self, trainer: Any) -> None:
            seen.append(trainer.run_evaluate())

    toy_trainer(8, [Last()], {"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=1).run()
    assert seen == [{"acc#acc": 0.2}]


def test_an_error_that_a_hook_handles_does_not_disable_other_callbacks() -> None:
    class Judges(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            with pytest.raises(RuntimeError, match="judged"):
                trainer.run_evaluate()

    scribe, broken = Scribe("on_train_batch_end", "on_train_epoch_end"), Scribe()
    broken.on_evaluate_end = Raising("on_evaluate_end", 1, RuntimeError("judged")).on_evaluate_end  # type: ignore[method-assign]
    toy_trainer(4, [Judges(), scribe, broken], {"acc": Scripted(*range(9))}, n_epochs=1, evaluate_every=-2).run()
    assert scribe.names == ["on_train_batch_end", "on_train_epoch_end"]


def test_after_an_error_in_the_optimizer_the_batch_does_not_count() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never returns
            raise RuntimeError("no step")

    model, scribe = Toy(), Scribe("on_exception")
    with pytest.raises(RuntimeError, match="no step"):
        toy_trainer(20, [scribe], model=model, optimizers=Broken(model.parameters(), 0.1), n_epochs=1).run()
    assert scribe.at("on_exception") == [(0, 0, 0)]


def test_ctrl_c_that_a_native_checkpoint_takes_ends_the_training_as_fastnlp_does(tmp_path: Path) -> None:
    class Press(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = toy_trainer(20, [Press(), Checkpoint("100 steps", directory=tmp_path)], n_epochs=4)
    trainer.run()
    assert trainer.live is not None
    assert trainer.live.outcome is not None
    assert trainer.live.outcome.kind == "interrupted"


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
    trainer = toy_trainer(20, [stop, scribe], n_epochs=4, accumulation_steps=accumulate)
    trainer.run()
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert (trainer.cur_epoch_idx, trainer.global_forward_batches) == (0, 2)
    assert trainer.live is not None
    assert (trainer.live.outcome.kind, trainer.live.outcome.reason) == ("stopped", "enough")
    expected = Toy()
    if accumulate == 1:
        toy_trainer(20, model=expected, n_batches=2).run()
    assert torch.equal(weights_of(trainer.model), weights_of(expected))  # the third batch left no trace


def weights_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def test_case_15_a_stop_before_the_training_is_an_error() -> None:
    scribe = Scribe("on_exception", "on_train_end")
    stop = Raising("on_sanity_check_end", 0, EarlyStopException("no"))
    with pytest.raises(EarlyStopException):
        toy_trainer(20, [stop, scribe], {"acc": Scripted(0.1)}).run()
    assert scribe.seen == []


def test_after_a_stop_at_the_start_no_epoch_begins() -> None:
    scribe = Scribe()
    toy_trainer(20, [Raising("on_train_begin", 0, EarlyStopException()), scribe], n_epochs=1).run()
    assert scribe.names == ["on_after_trainer_initialized", "on_exception", "on_train_end"]


def test_on_exception_gets_the_raised_exception() -> None:
    seen: list[BaseException] = []

    class See(Callback):
        def on_exception(self, trainer: Any, exception: BaseException) -> None:
            seen.append(exception)

    stop = EarlyStopException("enough")
    toy_trainer(20, [Raising("on_train_batch_end", 3, stop), See()], n_epochs=1).run()
    tiny_run(callbacks=[Raising("on_train_batch_end", 3, stop), See()])
    assert seen == [stop, stop]
    assert stop.msg == "enough"


def test_a_stopped_training_continues_in_the_next_run() -> None:
    scribe = Scribe("on_train_batch_begin")
    trainer = toy_trainer(20, [Raising("on_train_epoch_begin", 5, EarlyStopException()), scribe], n_epochs=2)
    trainer.run()
    trainer.own_callbacks.pop(0)
    trainer.run()
    assert [g for *_, g in scribe.seen] == list(range(10))


@pytest.mark.parametrize("event", [*IN_A_BATCH, "on_after_optimizers_step", "on_train_batch_end"])
def test_in_a_native_trainer_a_stop_is_a_stop(event: str) -> None:
    scribe = Scribe()
    run = tiny_run(callbacks=[Raising(event, 2, EarlyStopException("enough")), scribe], epochs=3)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


def test_a_native_stop_is_an_early_stop_for_fastnlps_callbacks() -> None:
    seen: list[BaseException] = []

    class See(Callback):
        def on_exception(self, trainer: Any, exception: BaseException) -> None:
            seen.append(exception)

    evaluate = Evaluate(tiny_loader(), compute=lambda model, batch: {"loss": torch.tensor(1.0)})
    run = tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", mode="min", patience=1), See(), Limit(9)], epochs=5)
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert [type(one) for one in seen] == [EarlyStopException]
    assert str(seen[0]) == run.outcome.reason


def test_native_callbacks_get_the_ends_of_started_moments_after_a_stop() -> None:
    calls_seen: list[str] = []

    class Pairs(NativeCallback):
        def on_step_start(self, run: Run) -> None:
            calls_seen.append("start")

        def on_step_end(self, run: Run) -> None:
            calls_seen.append("end")

    tiny_run(callbacks=[Raising("on_before_backward", 1, EarlyStopException()), Pairs()])
    assert calls_seen == ["start", "end"] * 2

"""What an error of one callback does, and who decided what."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from cadenza import Callback, Listener, Run, on
from cadenza.callbacks import Evaluate
from cadenza.status.decisions import decide
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


# -- faults -------------------------------------------------------------------------------------------


class Failing(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls = 0

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.calls += 1
        if run.progress.batch == 3:
            raise self.error

    def on_fit_end(self, run: Run) -> None:
        self.calls += 100


class Fragile(Failing):
    on_fault = "disable"


def test_an_error_keeps_its_traceback_and_gains_one_line_that_names_the_inner_callback_where_and_when() -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Recorder(), Failing(ValueError("broken"))], accumulate=2, epochs=2, batches=2)
    assert caught.value.__notes__ == ["raised in Failing.on_batch_start (callback 2 of 2) at epoch 2, step 1, batch 3"]
    assert caught.traceback[-1].name == "on_batch_start"
    assert any(entry.path.__fspath__() == __file__ for entry in caught.traceback if hasattr(entry.path, "__fspath__"))

    class Bad(Callback):
        def on_eval_batch_start(self, run: Run, evaluation: Any, batch: Any) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Evaluate(tiny_loader(1)), Bad()], batches=1)
    assert caught.value.__notes__ == ["raised in Bad.on_eval_batch_start (callback 2 of 2) at epoch 1, step 1, batch 1"]


def test_a_fault_that_disables_is_reported_once_and_the_run_goes_on_as_does_the_next(caplog: pytest.LogCaptureFixture) -> None:
    fragile, after = Fragile(OSError("tracker down")), Recorder(Callback.on_batch_start)
    trainer = tiny_trainer(callbacks=[fragile, after], epochs=2)
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        run = trainer.fit()
    assert run.progress.epoch == 2
    assert fragile.calls == 4  # and no on_fit_end
    assert len(after.names) == 10
    assert [str(fault) for fault in run.faults] == [
        "Fragile failed in on_batch_start at epoch 1, step 3, batch 3 and is disabled: OSError('tracker down')"
    ]
    assert len(caplog.records) == 1
    assert "Traceback" in caplog.text
    assert "tracker down" in caplog.text
    why = "disabled by Fragile at epoch 1, step 3, batch 3: on_batch_start raised OSError('tracker down')"
    assert run.why("disabled") == why
    assert len(trainer.fit().faults) == 1, "in the next run it is called again"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_is_not_a_fault_and_disables_no_callback(error: BaseException) -> None:
    with pytest.raises(type(error)):
        tiny_run(callbacks=[Fragile(error)])


def test_a_callback_that_is_disabled_inside_a_moment_is_not_called_by_the_moment_around_it() -> None:
    class Sink(Callback):
        on_fault = "disable"
        calls = 0

        def on_eval_end(self, run: Run, evaluation: Any) -> None:
            raise OSError("tracker down")

        def on_epoch_end(self, run: Run) -> None:
            Sink.calls += 1

    after = Recorder(Callback.on_epoch_end)
    seldom = Evaluate(tiny_loader(1), every="9 epochs")
    run = tiny_run(callbacks=[seldom, on(Callback.on_epoch_end)(seldom.evaluate), Sink(), after])
    assert len(run.faults) == 1
    assert Sink.calls == 0
    assert after.names == ["on_epoch_end"]


def test_a_callback_with_two_listeners_at_one_moment_is_disabled_once() -> None:
    class Twice(Callback):
        on_fault = "disable"

        def fail(self, run: Run) -> None:
            raise OSError("tracker down")

        def listeners(self) -> list[Listener]:
            return [Listener(Callback.on_step_end, act) for act in (self.fail, lambda run: self.fail(run))]

    assert len(tiny_run(callbacks=[Twice()]).faults) == 1


# -- decisions ----------------------------------------------------------------------------------------


def test_the_author_of_a_decision_is_the_callback_whose_hook_is_running() -> None:
    class Judge(Callback):
        def on_step_end(self, run: Run) -> None:
            run.stop("enough")

    other = on(Callback.on_step_end)(lambda run: decide(run, "noticed", "just so"))
    run = tiny_run(callbacks=[other, Judge(), Recorder(Callback.on_step_end)])
    assert [(decision.what, decision.who) for decision in run.decisions] == [("noticed", "<lambda>"), ("stopped", "Judge")]


def test_the_author_is_right_again_when_a_hook_that_fired_a_moment_goes_on() -> None:
    class Outer(Callback):
        def on_step_end(self, run: Run) -> None:
            run.fire(PruneMoments.on_prune, 0.5)
            decide(run, "after", "the moment that it fired")

    class Inner(PruneMoments):
        on_fault = "disable"

        def on_prune(self, run: Run, ratio: float) -> None:
            decide(run, "inside", "the moment")
            raise OSError("broken")

    run = tiny_run(callbacks=[Outer(), Inner(), on(Callback.on_step_end)(lambda run: decide(run, "later", "as well"))], steps=1)
    who = {decision.what: decision.who for decision in run.decisions}
    assert who == {"inside": "Inner", "disabled": "Inner", "after": "Outer", "later": "<lambda>"}


def test_the_author_is_that_of_the_thread_that_asks() -> None:
    inside, done = threading.Event(), threading.Event()

    class Starting(Callback):
        def on_step_end(self, run: Run) -> None:
            thread = threading.Thread(target=self.work, args=(run,))
            thread.start()
            assert inside.wait(60)
            decide(run, "meanwhile", "in the training thread")
            done.set()
            thread.join()
            decide(run, "after", "in the training thread")

        def work(self, run: Run) -> None:
            decide(run, "alone", "in a thread, outside of hooks")
            run.fire(PruneMoments.on_prune, 0.5)

    class Inner(PruneMoments):
        def on_prune(self, run: Run, ratio: float) -> None:
            inside.set()
            assert done.wait(60)
            decide(run, "inside", "a hook that a thread fires")

    run = tiny_run(callbacks=[Starting(), Inner()], steps=1)
    who = {decision.what: decision.who for decision in run.decisions}
    assert who == {"alone": "the script", "meanwhile": "Starting", "inside": "Inner", "after": "Starting"}


def test_outside_of_hooks_the_author_is_the_script_and_why_lists_the_decisions_if_none_matches() -> None:
    run = tiny_run(callbacks=[on(Callback.on_step_end)(lambda run: run.stop("enough"))], steps=1)
    assert run.why("stoped") == "nothing was 'stoped' in this run. Did you mean 'stopped'? Decided were: stopped"
    decide(run, "noticed", "just so")
    assert run.why("noticed") == "noticed by the script at epoch 1, step 1, batch 1: just so"


def test_a_listener_that_can_never_fire_is_named_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    def rare(run: Run) -> None: ...

    with caplog.at_level(logging.WARNING, logger="cadenza"):
        run = tiny_run(callbacks=[on(Callback.on_step_end, every=1000)(rare)], steps=3)
    said = "the run ends after 3 steps. Give it a shorter interval, or an earlier point"
    assert caplog.messages == [f"rare (every 1000 steps) never fires in this run: {said}"]
    (decision,) = [decision for decision in run.decisions if decision.what == "never fired"]
    assert decision.who == "rare (every 1000 steps), on_step_end"
    assert decision.why == "the run ended at epoch 1, step 3, batch 3"


def test_listeners_that_did_not_fire_are_listed_with_the_reason_but_not_at_an_end_that_did_not_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hearing(PruneMoments):
        def on_prune(self, run: Run, ratio: float) -> None: ...

        def on_eval_end(self, run: Run, evaluation: Any) -> None: ...

    stop = on(Callback.on_step_end, at=1)(lambda run: run.stop("early"))
    late = on(Callback.on_step_end, at=4)(lambda run: None)
    run = tiny_run(callbacks=[Hearing(), stop, late])
    never = {decision.who: decision.why for decision in run.decisions if decision.what == "never fired"}
    assert never == {
        "Hearing, on_prune": "no run.fire(...) called it",
        "Hearing, on_eval_end": "no evaluation took place",
        "<lambda>#2 (at step 4), on_step_end": "the run ended at epoch 1, step 1, batch 1",
    }
    assert caplog.messages == []
    rare = [on(moment)(lambda run, _: None) for moment in (Callback.on_exception, Callback.on_stop)]
    assert tiny_run(callbacks=rare).decisions == []

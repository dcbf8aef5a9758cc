"""Evaluations run at the boundary: after all hooks of the moment at which they are due, before saves, stops and records."""

from __future__ import annotations

from collections.abc import Callable as Function
from functools import partial
from typing import Any

import pytest

from cadenza import Callback, Evaluation, Run, on
from cadenza.callbacks import EarlyStopping, Ema, Evaluate, LogTraining
from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


@pytest.mark.parametrize(("moment", "every"), [(Callback.on_step_end, "5 steps"), (Callback.on_epoch_end, "1 epoch")])
def test_they_run_after_all_hooks_of_the_moment_in_the_order_of_the_list_and_before_the_work_of_the_boundary(
    moment: Function[..., None], every: str
) -> None:
    seen: list[str] = []

    @on(moment)
    def ask(run: Run) -> None:
        if run.progress.step == 5:
            run.after_step(partial(seen.append, "act"))
            run.stop("enough")

    @on(moment, at="5 steps")
    def hook(run: Run) -> None:
        seen.append("hook")

    callbacks = [
        Evaluate(tiny_loader(2), every=every),
        Evaluate(tiny_loader(2), every=every, name="test"),
        ask,
        hook,
        on(Callback.on_eval_end)(lambda run, evaluation: seen.append(evaluation.name)),
        on(Callback.on_log)(lambda run, record: seen.append(f"record {sorted(record.values)}")),
        on(Callback.on_stop)(lambda run, why: seen.append(why)),
    ]
    tiny_run(callbacks=callbacks, epochs=2)
    assert seen == ["hook", "eval", "test", "record ['eval/loss', 'test/loss']", "act", "enough"]


def test_a_stop_because_of_a_result_takes_effect_at_the_boundary_of_the_evaluation() -> None:
    stop = EarlyStopping("eval/loss", "min", threshold=1e9)
    for callbacks in ([stop, Evaluate(tiny_loader(), every="3 steps")], [Evaluate(tiny_loader(), every="3 steps"), stop]):
        run = tiny_run(callbacks=callbacks, epochs=2)
        assert (run.progress.step, run.outcome and run.outcome.kind) == (3, "stopped")


def test_an_evaluation_that_waits_for_a_better_result_of_another_one_sees_that_of_its_own_boundary() -> None:
    test = Evaluate(tiny_loader(), every="1 step", name="test", when_better=("eval/loss", "min"))
    run = tiny_run(callbacks=[Evaluate(tiny_loader(), every="1 step"), test], steps=3)
    assert [step for step, _ in run.history["test/loss"]] == [1, 2, 3]  # the loss falls with each step


def test_the_results_join_the_record_of_the_moment() -> None:
    records: list[set[str]] = []
    keep = on(Callback.on_log)(lambda run, record: records.append({*record.values}))
    tiny_run(callbacks=[LogTraining("2 steps", throughput=False), Evaluate(tiny_loader(), every="2 steps"), keep], steps=4)
    assert [{"train/loss", "eval/loss"} <= names for names in records] == [True, True]


def test_an_error_of_an_evaluation_is_one_of_its_callback_and_moment() -> None:
    def wrong(model: object, batch: object) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        tiny_run(callbacks=[Evaluate(tiny_loader(), compute=wrong), Ema()])
    assert any(note.startswith("raised in Evaluate.on_epoch_end (callback 1 of 2)") for note in raised.value.__notes__)


def test_an_evaluation_that_fails_is_disabled_and_those_after_it_run() -> None:
    def wrong(model: object, batch: object) -> Any:
        raise ZeroDivisionError

    fragile = Evaluate(tiny_loader(), compute=wrong)
    fragile.on_fault = "disable"
    run = tiny_run(callbacks=[fragile, Evaluate(tiny_loader(), name="test")], epochs=2)
    assert [(fault.callback, fault.moment) for fault in run.faults] == [("Evaluate", "on_epoch_end")]
    assert len(run.history["test/loss"]) == 2


def test_with_a_callback_of_another_system_an_evaluation_runs_at_its_position_in_the_moment() -> None:
    seen: list[str] = []

    class Foreign(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            seen.append("foreign")

    def noted(*more: Any) -> list[str]:
        seen.clear()
        late = on(Callback.on_epoch_end)(lambda run: seen.append("late"))
        ends = on(Callback.on_eval_end)(lambda run, evaluation: seen.append(evaluation.name))
        tiny_run(callbacks=[Evaluate(tiny_loader()), late, ends, *more])
        return [*seen]

    assert noted() == ["late", "eval"]
    assert noted(Foreign()) == ["foreign", "eval", "late"]


def test_the_plan_names_the_callbacks_behind_an_evaluation_that_no_longer_see_its_results() -> None:
    class Reader(Callback):
        def on_epoch_end(self, run: Run) -> None: ...

    @on(Callback.on_epoch_end)
    def look(run: Run) -> None: ...

    @on(Callback.on_epoch_end)
    def early(run: Run) -> None: ...

    @on(Callback.on_eval_end)
    def result(run: Run, evaluation: Evaluation) -> None: ...

    callbacks = [early, Evaluate(tiny_loader()), Reader(), LogTraining("1 epoch"), look, result]
    plan = tiny_trainer(callbacks=callbacks).plan()
    line = "on_epoch_end calls Reader, look before Evaluate evaluates: read results in on_eval_end"
    assert [row for row in str(plan).splitlines() if "before Evaluate" in row] == [f"order: {line}"]
    assert plan.to_dict()["order"] == [line]
    by_steps = [Evaluate(tiny_loader(), every="2 steps"), Reader(), look]
    assert tiny_trainer(callbacks=by_steps).plan().to_dict()["order"] == []

"""EarlyStopping: when it stops, what it says, what it puts back, and that it survives a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.checkpoint.store import Store
from cadenza.errors import MonitorError
from cadenza.testing import prove_resume, simulate, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import Scripted


def epochs_until_stop(stopping: EarlyStopping, values: list[float]) -> int:
    return simulate([stopping], metrics={"eval/x": values}).progress.epoch


def reason(stopping: EarlyStopping, values: list[float]) -> str:
    outcome = simulate([stopping], metrics={"eval/x": values}).outcome
    assert outcome is not None
    return outcome.reason


# -- when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "values", "patience", "min_delta", "epoch"),
    [
        ("min", [3.0, 2.0, 2.1, 2.2, 1.0], 2, 0.0, 4),
        ("min", [3.0, 2.0, 2.1, 1.0, 1.5, 0.5], 2, 0.0, 6),  # a gain in between starts the count anew
        ("max", [0.1, 0.2, 0.2, 0.3], 1, 0.0, 3),
        ("max", [0.1, 0.15, 0.3], 1, 0.1, 2),
        ("min", [math.nan, math.nan, 1.0], 2, 0.0, 2),
        ("min", [1.0, 0.5, 0.1], 1, 0.5, 2),  # a gain of exactly min_delta is none
        ("max", [0.5, 0.52, 0.525, 0.9], 1, 0.01, 3),
        ("max", [0.5, 0.4, 0.3, 0.9], 2, 0.0, 3),
        ("min", [1.0, 0.995, 0.98, 0.975, 0.974, 0.5], 2, 0.01, 5),  # the best stays where the last gain was
    ],
)
def test_it_stops_after_so_many_evaluations_without_gain(
    mode: Any, values: list[float], patience: int, min_delta: float, epoch: int
) -> None:
    assert epochs_until_stop(EarlyStopping("eval/x", mode=mode, patience=patience, min_delta=min_delta), values) == epoch


def test_it_says_why() -> None:
    run = simulate([EarlyStopping("eval/x", mode="min", name="mine")], metrics={"eval/x": [2.0, 3.0]})
    why = "'eval/x' did not get better than 2 in 1 evaluation"
    assert run.why("stopped") == f"stopped by mine at epoch 2, step 4, batch 4: {why}"


@pytest.mark.parametrize(
    ("mode", "values", "why"),
    [
        ("max", [0.5, 0.7, 0.9, 0.99], "'eval/x' is 0.9, as good as 0.8"),
        ("max", [0.5, 0.8, 0.9], "'eval/x' is 0.8, as good as 0.8"),
        ("min", [1.2, 0.85, 0.7, 0.6], "'eval/x' is 0.7, as good as 0.8"),
    ],
)
def test_a_result_that_is_good_enough_ends_the_run(mode: Any, values: list[float], why: str) -> None:
    assert reason(EarlyStopping("eval/x", mode=mode, patience=9, threshold=0.8), values) == why


@pytest.mark.parametrize(
    ("mode", "values", "why"),
    [("min", [3.0, 9.0, 9.5, 1.0], "'eval/x' is 9.5, worse than 9"), ("max", [0.5, 9.0, 8.5], "'eval/x' is 0.5, worse than 9")],
)
def test_a_result_that_is_bad_enough_ends_the_run(mode: Any, values: list[float], why: str) -> None:
    assert reason(EarlyStopping("eval/x", mode=mode, patience=9, diverged=9.0), values) == why


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_infinite_result_has_diverged_and_nan_is_merely_no_gain(mode: Any) -> None:
    worst = math.inf if mode == "min" else -math.inf
    stopping = EarlyStopping("eval/x", mode=mode, patience=3, diverged=5.0 if mode == "min" else -5.0)
    assert epochs_until_stop(stopping, [1.0, worst, 1.0]) == 2
    assert epochs_until_stop(stopping, [1.0, math.nan, math.nan, math.nan, 0.0]) == 4


def test_evaluations_of_the_warm_up_set_the_best_and_stop_nothing() -> None:
    stopping = EarlyStopping("eval/x", mode="min", ignore_first=3, threshold=0.5, diverged=7.0)
    values = [1.0, 9.0, 0.1, 0.6, 0.05]  # diverged, then good enough: both in the warm-up; then no better than 0.1
    assert reason(stopping, values) == "'eval/x' did not get better than 0.1 in 1 evaluation"
    assert epochs_until_stop(stopping, values) == 4


def test_the_warm_up_is_no_gain_for_the_patience_after_it() -> None:
    assert epochs_until_stop(EarlyStopping("eval/x", mode="min", ignore_first=2, patience=2), [1.0, 2.0, 2.0, 2.0, 0.0]) == 4


# -- what it looks at ---------------------------------------------------------------------------------


def test_it_looks_at_its_own_evaluation_only() -> None:
    stopping = EarlyStopping("test/x", mode="min")
    run = simulate([stopping], metrics={"eval/x": [1.0, 9.0, 9.0], "test/x": [3.0, 2.0, 1.0]})
    assert run.progress.epoch == 3


def test_an_evaluation_on_request_does_not_count() -> None:
    callbacks = [Evaluate(tiny_loader(1)), EarlyStopping("eval/loss", mode="min", patience=3)]
    trainer = tiny_trainer(callbacks=callbacks, epochs=2)
    trainer.fit()
    before = callbacks[1].state_dict()
    trainer.evaluate(tiny_loader(1), compute=lambda model, batch: {"predictions": 1})
    trainer.evaluate(tiny_loader(1))
    assert callbacks[1].state_dict() == before


def test_a_result_that_no_evaluation_reports_is_an_error_at_the_start() -> None:
    with pytest.raises(MonitorError, match="mine watches 'eval/acc', but no evaluation will report it"):
        tiny_run(callbacks=[EarlyStopping("eval/acc", mode="max", name="mine")])


def test_a_value_from_elsewhere_can_be_judged_as_well() -> None:
    stopping = EarlyStopping(lambda results: 1.0, mode="min", patience=2)
    judge = on(Callback.on_epoch_end)(lambda run: stopping.judge(run, float(run.progress.epoch)))
    assert tiny_run(callbacks=[stopping, judge], epochs=9).progress.epoch == 3


# -- the best weights ---------------------------------------------------------------------------------


def weights_at_each_step(seen: dict[int, float]) -> Callback:
    def look(run: Run) -> None:
        seen[run.progress.step] = run.model.get_parameter("weight").item()

    return on(Callback.on_step_end)(look)


@pytest.mark.parametrize(("restore", "step"), [(True, 2), (False, 4)])
def test_the_run_ends_with_the_weights_of_the_best_evaluation_if_that_is_wanted(restore: bool, step: int) -> None:
    seen: dict[int, float] = {}
    stopping = EarlyStopping("eval/loss", mode="min", patience=2, restore_best=restore)
    run = tiny_run(steps=9, callbacks=[weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 2.0, 0.0]), stopping])
    assert run.progress.step == 4
    assert run.model.get_parameter("weight").item() == seen[step]
    assert any(decision.what == "restored" for decision in run.decisions) == restore


def test_the_best_weights_are_the_best_also_where_the_gain_is_too_small_to_count() -> None:
    seen: dict[int, float] = {}
    stopping = EarlyStopping("eval/loss", mode="min", min_delta=0.5, patience=2, restore_best=True)
    run = tiny_run(steps=9, callbacks=[weights_at_each_step(seen), Scripted(loss=[1.0, 0.9, 0.95]), stopping])
    assert (run.progress.step, run.model.get_parameter("weight").item()) == (3, seen[2])
    assert run.why("restored").endswith("the weights of step 2: eval/loss was 0.9")


def test_nan_is_said_once_and_is_never_the_best(caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping("eval/x", mode="min", patience=3, restore_best=True)
    run = simulate([stopping], metrics={"eval/x": [math.nan, 2.0, math.nan]})
    assert run.why("restored").endswith("the weights of step 4: eval/x was 2")
    assert sum("is NaN, which is never better" in message for message in caplog.messages) == 1


def test_an_error_leaves_the_weights_as_they_are() -> None:
    @on(Callback.on_step_start, at=3)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    seen: dict[int, float] = {}
    stopping = EarlyStopping("eval/loss", mode="min", patience=9, restore_best=True)
    trainer = tiny_trainer(steps=5, callbacks=[weights_at_each_step(seen), Scripted(loss=[1.0, 2.0]), stopping, fail])
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.model.get_parameter("weight").item() == seen[2]


def test_what_a_module_saves_beside_its_tensors_is_put_back_as_well() -> None:
    class Counting(torch.nn.Linear):
        calls: list[int]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls.append(len(self.calls))
            return super().forward(inputs)

        def get_extra_state(self) -> Any:
            return self.calls

        def set_extra_state(self, state: Any) -> None:
            self.calls = state

    model = Counting(1, 1)
    model.calls = []
    stopping = EarlyStopping("eval/x", mode="min", restore_best=True)
    tiny_run(model=model, epochs=3, callbacks=[stopping, judge_at_epoch_ends(stopping)], batches=2)
    assert model.calls == [0, 1]


def judge_at_epoch_ends(stopping: EarlyStopping) -> Callback:
    class Judge(Callback):
        def on_setup(self, run: Run) -> None:
            run.evaluations["eval"] = Evaluate(tiny_loader(1)).evaluation

        def on_epoch_end(self, run: Run) -> None:
            stopping.judge(run, float(run.progress.epoch))

    return Judge()


# -- resume, several runs, arguments ------------------------------------------------------------------


def test_a_run_that_continues_stops_and_ends_as_the_whole_one_would_have(tmp_path: Path) -> None:
    loss = [3.0, 1.0, 2.0, 2.5, 2.0, 0.5]
    seen: dict[int, float] = {}

    def trainer(steps: int) -> Trainer:
        stopping = EarlyStopping("eval/loss", mode="min", ignore_first=3, patience=2, restore_best=True)
        callbacks = [weights_at_each_step(seen), stopping, Scripted(loss=loss), Checkpoint("1 step")]
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks)

    trainer(4).fit()
    store = Store(tmp_path / "checkpoints")
    assert store.read(store.saved()[-1]).model["weight"].item() == seen[4]  # the last step's, not the best
    second = trainer(9)
    run = second.fit(resume="auto")
    assert (run.progress.step, second.model.get_parameter("weight").item()) == (5, seen[2])


def test_a_resume_is_exact() -> None:
    def make(directory: Path) -> Trainer:
        stopping = EarlyStopping("eval/loss", mode="max", ignore_first=2, patience=4, restore_best=True)
        callbacks = [Evaluate(tiny_loader(2), every="1 step"), stopping]
        return tiny_trainer(directory=directory, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[1, 2, 4, 5], in_process=True)


def test_the_same_one_begins_anew_with_another_run() -> None:
    stopping = EarlyStopping("eval/x", mode="min", patience=2, ignore_first=1, restore_best=True)
    values = [1.0, 2.0, 2.0, 2.0]
    assert [epochs_until_stop(stopping, values) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience must be a whole number of at least 1; got 0"),
        ({"patience": 1.5}, r"patience must be a whole number of at least 1; got 1\.5"),
        ({"ignore_first": -1}, "ignore_first must be a whole number of at least 0; got -1"),
        ({"min_delta": -0.1}, r"min_delta must be 0 or more; got -0\.1"),
        ({"min_delta": math.nan}, "min_delta must be 0 or more; got nan"),
        ({"threshold": 1.0, "diverged": 0.5}, r"diverged must be worse than threshold=1\.0; got 0\.5"),
    ],
)
def test_wrong_numbers_are_errors_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyStopping("eval/x", mode="min", **arguments)

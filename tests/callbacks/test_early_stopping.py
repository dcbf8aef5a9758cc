"""EarlyStopping: when it stops, what it says, what it puts back, and that it survives a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Trainer, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.testing import simulate, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import weights_at_each_step
from tests.callbacks.test_checkpoint import Scripted


def epochs_until_stop(stopping: EarlyStopping, values: list[float]) -> int:
    return simulate([stopping], metrics={"eval/x": values}).progress.epoch


def reason(stopping: EarlyStopping, values: list[float]) -> str:
    return simulate([stopping], metrics={"eval/x": values}).why("stopped").partition(": ")[2]


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


@pytest.mark.parametrize(
    ("mode", "bound", "values", "why"),
    [
        ("max", {"threshold": 0.8}, [0.5, 0.7, 0.9, 0.99], "'eval/x' is 0.9, as good as 0.8"),
        ("max", {"threshold": 0.8}, [0.5, 0.8, 0.9], "'eval/x' is 0.8, as good as 0.8"),
        ("min", {"threshold": 0.8}, [1.2, 0.85, 0.7, 0.6], "'eval/x' is 0.7, as good as 0.8"),
        ("min", {"diverged": 9.0}, [3.0, 9.0, 9.5, 1.0], "'eval/x' is 9.5, worse than 9"),
        ("max", {"diverged": 9.0}, [0.5, 9.0, 8.5], "'eval/x' is 0.5, worse than 9"),
    ],
)
def test_a_result_that_is_good_or_bad_enough_ends_the_run(
    mode: Any, bound: dict[str, float], values: list[float], why: str
) -> None:
    assert reason(EarlyStopping("eval/x", mode=mode, patience=9, **bound), values) == why


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_infinite_result_has_diverged_and_nan_is_merely_no_gain(mode: Any) -> None:
    worst = math.inf if mode == "min" else -math.inf
    stopping = EarlyStopping("eval/x", mode=mode, patience=3, diverged=5.0 if mode == "min" else -5.0)
    assert epochs_until_stop(stopping, [1.0, worst, 1.0]) == 2
    assert epochs_until_stop(stopping, [1.0, math.nan, math.nan, math.nan, 0.0]) == 4


def test_evaluations_of_the_warm_up_set_the_best_stop_nothing_and_are_no_gain_for_the_patience() -> None:
    stopping = EarlyStopping("eval/x", mode="min", ignore_first=3, threshold=0.5, diverged=7.0)
    values = [1.0, 9.0, 0.1, 0.6, 0.05]  # diverged, then good enough: both in the warm-up; then no better than 0.1
    assert reason(stopping, values) == "'eval/x' did not get better than 0.1 in 1 evaluation"
    assert epochs_until_stop(stopping, values) == 4
    assert epochs_until_stop(EarlyStopping("eval/x", mode="min", ignore_first=2, patience=2), [1.0, 2.0, 2.0, 2.0, 0.0]) == 4


# -- what it looks at ---------------------------------------------------------------------------------


def test_it_looks_at_its_own_evaluation_only_and_says_why() -> None:
    stopping = EarlyStopping("test/x", mode="min", name="mine")
    assert simulate([stopping], metrics={"eval/x": [1.0, 9.0, 9.0], "test/x": [3.0, 2.0, 1.0]}).progress.epoch == 3
    run = simulate([stopping], metrics={"test/x": [2.0, 3.0]})
    why = "'test/x' did not get better than 2 in 1 evaluation"
    assert run.why("stopped") == f"stopped by mine at epoch 2, step 4, batch 4: {why}"


def test_an_evaluation_on_request_does_not_count() -> None:
    callbacks = [Evaluate(tiny_loader(1)), EarlyStopping("eval/loss", mode="min", patience=3)]
    trainer = tiny_trainer(callbacks=callbacks, epochs=2)
    trainer.fit()
    before = callbacks[1].state_dict()
    trainer.evaluate(tiny_loader(1), compute=lambda model, batch: {"predictions": 1})
    trainer.evaluate(tiny_loader(1))
    assert callbacks[1].state_dict() == before


def test_a_value_from_elsewhere_can_be_judged_as_well() -> None:
    stopping = EarlyStopping(lambda results: 1.0, mode="min", patience=2)
    judge = on(Callback.on_epoch_end)(lambda run: stopping.judge(run, float(run.progress.epoch)))
    assert tiny_run(callbacks=[stopping, judge], epochs=9).progress.epoch == 3


# -- the best weights ---------------------------------------------------------------------------------


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
    stopping = EarlyStopping("eval/loss", mode="min", restore_best=True)
    tiny_run(model=model, steps=3, callbacks=[Scripted(loss=[1.0, 2.0]), stopping])
    assert model.calls == [0]


def test_a_run_that_continues_stops_and_ends_as_the_whole_one_would_have(tmp_path: Path) -> None:
    seen: dict[int, float] = {}

    def trainer(steps: int) -> Trainer:
        stopping = EarlyStopping("eval/loss", mode="min", ignore_first=3, patience=2, restore_best=True)
        callbacks = [weights_at_each_step(seen), stopping, Scripted(loss=[3.0, 1.0, 2.0, 2.5, 2.0, 0.5]), Checkpoint("1 step")]
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks)

    trainer(4).fit()
    second = trainer(9)
    run = second.fit(resume="auto")
    assert (run.progress.step, second.model.get_parameter("weight").item()) == (5, seen[2])

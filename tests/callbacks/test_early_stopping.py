"""EarlyStopping and BestWeights: when a run stops, what it says, and the weights with which it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, Trainer, export_weights, on
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, Swa
from cadenza.checkpoint.store import Store
from cadenza.commands.main import main
from cadenza.errors import CheckpointError
from cadenza.loading.evaluation import Evaluation
from cadenza.status.plain import same
from cadenza.testing import simulate, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing, loaded, state_of, weights_at_each_step
from tests.callbacks.test_checkpoint import Scripted


def epochs_until_stop(stopping: EarlyStopping, values: list[float]) -> int:
    return simulate([stopping], metrics={"eval/x": values}).progress.epoch


def reason(stopping: EarlyStopping, values: list[float]) -> str:
    return simulate([stopping], metrics={"eval/x": values}).why("stopped").partition(": ")[2]


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
    mode: Any, bound: dict[str, Any], values: list[float], why: str
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


def test_it_looks_at_its_own_evaluation_only_and_says_why() -> None:
    stopping = EarlyStopping("test/x", mode="min", name="mine")
    assert simulate([stopping], metrics={"eval/x": [1.0, 9.0, 9.0], "test/x": [3.0, 2.0, 1.0]}).progress.epoch == 3
    run = simulate([stopping], metrics={"test/x": [2.0, 3.0]})
    why = "'test/x' did not get better than 2 in 1 evaluation"
    assert run.why("stopped") == f"stopped by mine at epoch 2, step 4, batch 4: {why}"


def test_a_value_from_elsewhere_can_be_judged_as_well() -> None:
    stopping = EarlyStopping(lambda results: 1.0, mode="min", patience=2)
    judge = on(Callback.on_epoch_end)(lambda run: stopping.judge(run, float(run.progress.epoch)))
    assert tiny_run(callbacks=[stopping, judge], epochs=9).progress.epoch == 3


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


# -- the weights with which a run ends ----------------------------------------------------------------


@pytest.mark.parametrize(("restore", "step"), [(True, 2), (False, 5)])
def test_the_run_ends_with_the_best_weights_if_that_is_wanted(restore: bool, step: int) -> None:
    seen: dict[int, float] = {}
    best = BestWeights("eval/loss", "min", restore=restore)
    run = tiny_run(steps=5, callbacks=[weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 1.0, 5.0]), best])
    assert best.step == 2
    assert seen[2] != seen[5]
    assert run.model.get_parameter("weight").item() == seen[step]
    if restore:
        assert run.why("restored").endswith("the weights of step 2: eval/loss was 1")
    else:
        assert best.weights is not None
        assert best.weights["weight"].item() == seen[2]


def test_buffers_belong_to_the_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    norm = model[1]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    script = Scripted(loss=[1.0, 2.0, 3.0])
    script.poisoned_at = None
    tiny_run(model=model, steps=3, callbacks=[script, BestWeights("eval/loss", "min")])
    assert norm.num_batches_tracked == 1


REPLACING: dict[str, Callable[[], Callback]] = {
    "BestWeights": lambda: BestWeights("eval/loss", "min"),
    "EarlyStopping": lambda: EarlyStopping("eval/loss", "min", patience=9, restore_best=True),
    "Ema": lambda: Ema(0.5, use_at_end=True),
    "Swa": lambda: Swa("2 steps", "1 step"),
}


@pytest.mark.parametrize("make", REPLACING.values(), ids=REPLACING)
def test_the_last_checkpoint_and_a_run_that_fails_have_the_weights_of_the_last_step(
    make: Callable[[], Callback], tmp_path: Path
) -> None:
    seen: dict[int, float] = {}

    def trainer(name: str, *more: Callback) -> Trainer:
        callbacks = [weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 4.0, 5.0]), make(), *more]
        return tiny_trainer(directory=tmp_path / name, steps=5, callbacks=callbacks)

    run = trainer("whole", Checkpoint("1 step")).fit()
    store = Store(tmp_path / "whole" / "checkpoints")
    assert store.read(store.saved()[-1]).model["weight"].item() == seen[5] != run.model.get_parameter("weight").item()
    broken = trainer("broken", failing(Callback.on_step_start, at=4))
    with pytest.raises(ZeroDivisionError):
        broken.fit()
    assert broken.model.get_parameter("weight").item() == seen[3]


@pytest.mark.parametrize("make", [REPLACING["BestWeights"], REPLACING["EarlyStopping"]], ids=["BestWeights", "EarlyStopping"])
def test_nan_is_said_once_and_is_never_the_best(make: Callable[[], Callback], caplog: pytest.LogCaptureFixture) -> None:
    run = simulate([make()], metrics={"eval/loss": [math.nan, 2.0, math.nan]})
    assert run.why("restored").endswith("the weights of step 4: eval/loss was 2")
    assert sum("is NaN, which is never better" in message for message in caplog.messages) == 1


def test_the_best_weights_survive_a_resume(tmp_path: Path) -> None:
    seen: dict[int, float] = {}

    def fit(steps: int) -> tuple[float, BestWeights]:
        best = BestWeights("eval/loss", "min")
        callbacks = [weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 4.0, 5.0, 6.0]), best, Checkpoint("1 step")]
        run = tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks).fit(resume="auto")
        return run.model.get_parameter("weight").item(), best

    assert fit(4)[0] == seen[2]
    again, best = fit(6)
    assert (best.step, best.monitor.best, again) == (2, 1.0, seen[2])


# -- the best by averaged weights ---------------------------------------------------------------------


SETS: list[Any] = [(lambda: Ema(0.9), "ema"), (lambda: Swa(0.2, "1 step", use_at_end=False), "swa")]


def judged_in(directory: Path, average: Callback, name: str, *more: Callback, **options: Any) -> dict[int, dict[str, Tensor]]:
    """Train for 5 steps; return by step the weights with which each evaluation was done."""
    seen: dict[int, dict[str, Tensor]] = {}

    @on(Callback.on_eval_end)
    def look(run: Run, evaluation: Evaluation) -> None:
        seen[run.progress.step] = state_of(run)

    keep = Checkpoint("9 steps", keep_best=("eval/loss", "min"), **options)
    judge = Evaluate(tiny_loader(2), every="1 step", weights=name)
    tiny_run(directory=directory, steps=5, seed=1, callbacks=[average, judge, look, keep, *more])
    return seen


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("make", "name"), SETS)
def test_the_best_by_averaged_weights_loads_these(tmp_path: Path, make: Any, name: str, weights_only: bool) -> None:
    seen = judged_in(tmp_path, make(), name, weights_only=weights_only)
    own = tiny_run(steps=5, seed=1).model.state_dict()
    assert same(loaded(tmp_path), seen[5])
    assert same(loaded(tmp_path, weights=name), seen[5])
    assert same(loaded(tmp_path, weights="model"), dict(own))
    assert not same(seen[5], dict(own))
    export_weights(tmp_path, tmp_path / "averaged.safetensors")
    assert same(loaded(tmp_path / "averaged.safetensors"), seen[5])


def test_a_checkpoint_that_was_not_chosen_by_them_loads_the_models_own(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=5, seed=1, callbacks=[Ema(0.9), Checkpoint()])
    assert same(loaded(tmp_path), dict(tiny_run(steps=5, seed=1).model.state_dict()))
    assert not same(loaded(tmp_path), loaded(tmp_path, weights="ema"))
    with pytest.raises(CheckpointError, match=r"holds no weights 'swa'\. It holds 'model', 'ema'"):
        loaded(tmp_path, weights="swa")
    with pytest.raises(CheckpointError, match="one file of weights, without any that are called 'ema'"):
        loaded(next((tmp_path / "checkpoints").glob("step-*/model.safetensors")), weights="ema")


def test_before_an_average_begins_the_best_is_one_by_the_models_own_weights(tmp_path: Path) -> None:
    judged_in(tmp_path, Swa("4 steps", "1 step", use_at_end=False), "swa")
    store = Store(tmp_path / "checkpoints")
    assert {store.manifest(saved).get("weights") for saved in store.saved() if saved.step == 5} == {"swa"}
    judged_in(tmp_path / "late", Swa("9 steps", "1 step", use_at_end=False), "swa")
    assert same(loaded(tmp_path / "late"), dict(tiny_run(steps=5, seed=1).model.state_dict()))


def test_show_and_export_say_which_weights_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged_in(tmp_path, Ema(0.9), "ema")
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "weights          ema\n" in (shown := capsys.readouterr().out)
    assert "load_weights and export take these; weights='model' takes the model's own" in shown
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors")]) == 0
    assert "wrote the weights 'ema' of step-00000005" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "b.safetensors"), "--weights", "model"]) == 0
    assert same(loaded(tmp_path / "b.safetensors"), loaded(tmp_path, weights="model"))


IN_MEMORY = [BestWeights("eval/loss", "min"), EarlyStopping("eval/loss", mode="min", restore_best=True)]


@pytest.mark.parametrize("callback", IN_MEMORY, ids=["BestWeights", "EarlyStopping"])
def test_what_keeps_the_best_in_memory_keeps_the_averaged_weights(tmp_path: Path, callback: Callback) -> None:
    ends: list[dict[str, Tensor]] = []
    look = on(Callback.on_fit_end)(lambda run: ends.append(state_of(run)))
    look.after = (type(callback),)
    seen = judged_in(tmp_path, Ema(0.9), "ema", callback, look)
    assert same(ends[0], seen[5])

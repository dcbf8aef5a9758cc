"""EarlyStopping, OptunaPruning and BestWeights: when a run stops, what it says, and the weights with which it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FixedTrial, Trial, TrialState
from optuna_integration import TorchDistributedTrial
from torch import Tensor

from cadenza import Callback, Run, Trainer, export_weights, on
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, OptunaPruning, Swa
from cadenza.checkpoint.store import Store
from cadenza.commands.main import main
from cadenza.errors import CheckpointError
from cadenza.loading.evaluation import Evaluation
from cadenza.status.encoding import same
from cadenza.testing import launch, simulate, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing, loaded, normed, state_of, weights_at_each_step
from tests.callbacks.test_checkpoint import Scripted
from tests.distributed.parts import loader, own_rank, rank, trainer

optuna.logging.set_verbosity(optuna.logging.ERROR)


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


def test_it_looks_at_its_own_evaluation_or_at_a_value_from_elsewhere_and_says_why() -> None:
    stopping = EarlyStopping("test/x", mode="min", name="mine")
    assert simulate([stopping], metrics={"eval/x": [1.0, 9.0, 9.0], "test/x": [3.0, 2.0, 1.0]}).progress.epoch == 3
    run = simulate([stopping], metrics={"test/x": [2.0, 3.0]})
    why = "'test/x' did not get better than 2 in 1 evaluation"
    assert run.why("stopped") == f"stopped by mine at epoch 2, step 4, batch 4: {why}"
    stopping = EarlyStopping(lambda results: 1.0, mode="min", patience=2)
    judge = on(Callback.on_epoch_end)(lambda run: stopping.judge(run, float(run.progress.epoch)))
    assert tiny_run(callbacks=[stopping, judge], epochs=9).progress.epoch == 3


@pytest.mark.parametrize("restore", [True, False])
def test_the_run_ends_with_the_weights_of_the_best_evaluation_if_that_is_wanted(restore: bool) -> None:
    seen: dict[int, float] = {}
    stopping = EarlyStopping("eval/loss", mode="min", patience=2, restore_best=restore)
    run = tiny_run(steps=9, callbacks=[weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 2.0, 0.0]), stopping])
    assert (run.progress.step, run.model.get_parameter("weight").item()) == (4, seen[2 if restore else 4])
    assert any(decision.what == "restored" for decision in run.decisions) == restore
    best = BestWeights("eval/loss", "min", restore=restore)
    run = tiny_run(steps=5, callbacks=[weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 1.0, 5.0]), best])
    assert best.step == 2
    assert seen[2] != seen[5]
    assert run.model.get_parameter("weight").item() == seen[2 if restore else 5]
    if restore:
        assert run.why("restored").endswith("the weights of step 2: eval/loss was 1")
    else:
        assert best.weights is not None
        assert best.weights["weight"].item() == seen[2]


def test_the_best_weights_are_the_best_also_where_the_gain_is_too_small_to_count() -> None:
    seen: dict[int, float] = {}
    stopping = EarlyStopping("eval/loss", mode="min", min_delta=0.5, patience=2, restore_best=True)
    run = tiny_run(steps=9, callbacks=[weights_at_each_step(seen), Scripted(loss=[1.0, 0.9, 0.95]), stopping])
    assert (run.progress.step, run.model.get_parameter("weight").item()) == (3, seen[2])
    assert run.why("restored").endswith("the weights of step 2: eval/loss was 0.9")


def test_buffers_and_what_a_module_saves_beside_its_tensors_are_put_back_as_well() -> None:
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
    norm = normed()
    tiny_run(model=norm, steps=3, callbacks=[Scripted(loss=[1.0, 2.0, 3.0]), BestWeights("eval/loss", "min")])
    assert norm.get_buffer("1.num_batches_tracked") == 1


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


IN_MEMORY = ["BestWeights", "EarlyStopping"]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_nan_is_said_once_and_is_never_the_best(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run = simulate([REPLACING[name]()], metrics={"eval/loss": [math.nan, 2.0, math.nan]})
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
@pytest.mark.parametrize(("make", "name"), [(lambda: Ema(0.9), "ema"), (lambda: Swa(0.2, "1 step", use_at_end=False), "swa")])
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


@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_keeps_the_best_in_memory_keeps_the_averaged_weights(tmp_path: Path, name: str) -> None:
    callback, ends = REPLACING[name](), list[dict[str, Tensor]]()
    look = on(Callback.on_fit_end)(lambda run: ends.append(state_of(run)))
    look.after = (type(callback),)
    seen = judged_in(tmp_path, Ema(0.9), "ema", callback, look)
    assert same(ends[0], seen[5])


# -- OptunaPruning ------------------------------------------------------------------------------------


def study(upper: float = math.inf, direction: Any = "minimize", **options: Any) -> optuna.Study:
    """Return a study that prunes a trial at a value above `upper`, or at NaN."""
    return optuna.create_study(direction=direction, pruner=optuna.pruners.ThresholdPruner(upper=upper), **options)


def values_of(one: optuna.Study) -> dict[int, float]:
    return one.trials[0].intermediate_values


def error(results: Mapping[str, float]) -> float:
    return 1 - results["eval/x"]


@pytest.mark.parametrize(
    ("direction", "monitor", "values", "reported", "best"),
    [
        ("minimize", "eval/x", [3.0, 1.0, 2.0], {2: 3.0, 4: 1.0, 6: 2.0}, 1.0),
        ("maximize", "eval/x", [2.0, 3.0, 1.0], {2: 2.0, 4: 3.0, 6: 1.0}, 3.0),
        ("minimize", error, [0.5, 0.75], {2: 0.5, 4: 0.25}, 0.25),
    ],
)
def test_each_evaluation_is_reported_with_the_step_of_the_run_and_the_best_is_the_result(
    direction: str, monitor: Any, values: list[float], reported: dict[int, float], best: float
) -> None:
    one = study(direction=direction)
    pruning = OptunaPruning(one.ask(), monitor)
    others = {"test/x": [7.0] * len(values)} if isinstance(monitor, str) else {}
    run = simulate([pruning], metrics={"eval/x": values, **others})
    assert (values_of(one), pruning.result(run)) == (reported, best)


def test_the_epoch_can_be_reported_instead_once_an_epoch() -> None:
    one = study()
    watch = OptunaPruning(one.ask(), "eval/loss", per="epoch")
    run = tiny_run(callbacks=[Scripted(loss=[5.0, 4.0, 3.0, 2.0]), watch], steps=4, batches=2)
    assert values_of(one) == {0: 5.0, 1: 3.0}  # evaluated after each step; an epoch has two
    assert watch.result(run) == 2.0


def test_a_pruned_run_ends_cleanly_and_the_objective_raises(tmp_path: Path) -> None:
    ended, runs = list[Any](), list[Run]()
    end = on(Callback.on_fit_end)(lambda run: ended.append(run.outcome and run.outcome.kind))

    def objective(trial: Trial) -> float:
        pruning = OptunaPruning(trial, "eval/loss")
        callbacks = [Scripted(loss=[1.0, 9.0 if trial.number else 0.5, 0.25]), pruning, end]
        runs.append(tiny_run(callbacks=callbacks, steps=3, directory=tmp_path / str(trial.number)))
        return pruning.result(runs[-1])

    one = study(upper=5.0)
    one.optimize(objective, n_trials=2)
    assert [trial.state for trial in one.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert (one.trials[0].value, one.trials[1].value) == (0.25, 9.0)
    assert ended == ["finished", "stopped"]
    assert [run.progress.step for run in runs] == [3, 2]
    why = "pruned by Optuna: 'eval/loss' of trial 1 is 9 at step 2"
    assert runs[1].why("stopped").endswith(why)
    assert json.loads((tmp_path / "1" / "run.json").read_text())["outcome"] == {"kind": "stopped", "reason": why}
    rows = map(json.loads, (tmp_path / "1" / "decisions.jsonl").read_text().splitlines())
    stops = [(row["who"], row["data"]) for row in rows if row["what"] == "stopped"]
    assert stops == [("OptunaPruning", {"trial": 1, "value": 9.0, "step": 2, "pruned": True})]
    assert one.trials[1].user_attrs == {"pruned by Optuna": why}


def test_the_pruner_decides_about_nan_and_a_run_without_a_finite_value_fails_its_trial() -> None:
    pruned = OptunaPruning(study().ask(), "eval/x")
    kept = OptunaPruning(optuna.create_study(pruner=optuna.pruners.NopPruner()).ask(), "eval/x")
    run = simulate([pruned], metrics={"eval/x": [math.nan, 1.0]})
    with pytest.raises(optuna.TrialPruned, match="is nan at step 2"):
        pruned.result(run)
    assert math.isnan(kept.result(simulate([kept], metrics={"eval/x": [math.nan, math.nan]})))


def test_an_objective_that_returns_the_value_of_a_pruned_run_is_named_in_the_next_run(caplog: pytest.LogCaptureFixture) -> None:
    def objective(trial: Trial) -> float:
        return simulate([OptunaPruning(trial, "eval/x")], metrics={"eval/x": [9.0, 1.0]}).history["eval/x"][-1][1]

    one = study(upper=5.0)
    one.optimize(objective, n_trials=1)
    assert "records" not in caplog.text
    one.optimize(objective, n_trials=1)
    assert "Optuna records 1 trial as complete that the pruner stopped: 0. End the objective with return" in caplog.text


def test_a_stop_of_another_callback_is_no_pruning_even_if_its_reason_reads_so() -> None:
    stop = on(Callback.on_eval_end)(lambda run, evaluation: run.stop("pruned by Optuna, or so it says"))
    one = study(upper=5.0)
    pruning = OptunaPruning(one.ask(), "eval/x")
    assert pruning.result(simulate([stop, pruning], metrics={"eval/x": [9.0, 2.0]})) == 9.0  # both stop it
    assert one.trials[0].user_attrs == {}
    pruning = OptunaPruning(study().ask(), "eval/x")
    run = simulate([EarlyStopping("eval/x", "min"), pruning], metrics={"eval/x": [1.0, 2.0, 0.0]})
    assert (run.outcome.kind, pruning.result(run)) == ("stopped", 1.0)  # type: ignore[union-attr]


def test_a_trial_that_continues_reports_each_step_once(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    one = study(storage=storage, study_name="resumed")
    trial = one.ask()

    def fit(steps: int, fail_at: int = 99) -> tuple[OptunaPruning, Run]:
        pruning = OptunaPruning(Trial(optuna.load_study(study_name="resumed", storage=storage), trial._trial_id), "eval/loss")
        others = [Checkpoint("2 steps", on_exception=False), failing(Callback.on_step_start, fail_at)]
        callbacks = [Scripted(loss=[5.0, 1.0, 3.0, 4.0, 3.5]), pruning, *others]
        return pruning, tiny_trainer(callbacks=callbacks, directory=tmp_path / "run", steps=steps, seed=1).fit(resume="auto")

    with pytest.raises(ZeroDivisionError):
        fit(5, fail_at=4)  # step 3 is reported, and the newest checkpoint is that of step 2
    assert values_of(one) == {1: 5.0, 2: 1.0, 3: 3.0}
    pruning, run = fit(5)  # a second report for a step would be a warning of Optuna, and an error here
    assert run.progress.origin.step == 2
    assert values_of(one) == {1: 5.0, 2: 1.0, 3: 3.0, 4: 4.0, 5: 3.5}
    assert pruning.result(run) == 1.0


@pytest.mark.parametrize("pruned", [False, True])
def test_a_run_that_is_over_gives_the_same_result_when_it_is_started_again(tmp_path: Path, pruned: bool) -> None:
    results = []
    for _ in range(2):
        pruning = OptunaPruning(study(upper=5.0).ask(), "eval/loss")
        judge = Scripted(loss=[1.0, 9.0, 1.0]) if pruned else Evaluate(tiny_loader(1), every="1 step")
        callbacks = [judge, pruning, Checkpoint("1 step")]
        run = tiny_trainer(callbacks=callbacks, directory=tmp_path, steps=3, seed=1).fit(resume="auto")
        with pytest.raises(optuna.TrialPruned, match="is 9 at step 2") if pruned else nullcontext():
            results.append(pruning.result(run))
    assert pruned or results[0] == results[1] < 10


def test_the_objective_runs_without_a_study_and_the_plan_names_the_trial() -> None:
    pruning = OptunaPruning(FixedTrial({"lr": 0.1}), "eval/x", "min")
    assert pruning.result(simulate([pruning], metrics={"eval/x": [2.0, 1.0]})) == 1.0
    callbacks = [Evaluate(tiny_loader(1)), OptunaPruning(study().ask(), "eval/loss", name="trial")]
    lines = str(tiny_trainer(callbacks=callbacks).plan()).splitlines()
    assert any(line.strip().startswith("on_eval_end") and "trial" in line for line in lines), lines


@pytest.mark.parametrize("distributed", [False, True], ids=["trial on rank 0", "TorchDistributedTrial"])
def test_the_main_process_reports_and_all_ranks_end_together(distributed: bool, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"

    def objective() -> tuple[int, str, float | str]:
        one: Trainer = trainer(callbacks=[], max_epochs=4)  # the first trainer opens the process group
        trial: Any = study(upper=-1.0, storage=storage, study_name="ranks").ask() if own_rank() == 0 else None
        pruning = OptunaPruning(TorchDistributedTrial(trial) if distributed else trial, "eval/loss")
        one = trainer(callbacks=[Evaluate(loader(8, shuffle=False), every="1 epoch"), pruning], max_epochs=4)
        run = one.fit()
        assert run.outcome is not None
        try:
            return run.progress.step, run.outcome.reason, pruning.result(run)
        except optuna.TrialPruned as pruned:
            return run.progress.step, run.outcome.reason, f"pruned: {pruned}"

    first, second = launch(objective)
    assert first == second
    assert first[0] == 3  # steps: of the four epochs, only the first was trained
    assert first[1].startswith("pruned by Optuna: 'eval/loss' of trial 0 is ")
    assert first[2] == f"pruned: {first[1]}"
    assert list(values_of(optuna.load_study(study_name="ranks", storage=storage))) == [3]


def test_on_two_ranks_an_error_of_the_storage_ends_both() -> None:
    class Unreachable(FixedTrial):
        def report(self, value: float, step: int) -> None:
            raise ConnectionError("the storage does not answer")

    def objective() -> None:
        pruning = OptunaPruning(Unreachable({}) if rank() == 0 else None, "eval/loss", "min")
        trainer(callbacks=[Evaluate(loader(8)), pruning], max_epochs=2).fit()

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(objective)
    assert all("the storage does not answer" in str(error) for error in caught.value.exceptions)
    assert len(caught.value.exceptions) == 2

"""OptunaPruning: what it reports, how a pruned run ends, and that all ranks end together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FixedTrial, Trial, TrialState
from optuna_integration import TorchDistributedTrial

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, OptunaPruning
from cadenza.testing import launch, simulate, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing
from tests.callbacks.test_checkpoint import Scripted
from tests.distributed.parts import loader, own_rank, rank, trainer

optuna.logging.set_verbosity(optuna.logging.ERROR)


def study(upper: float = math.inf, direction: Any = "minimize", **options: Any) -> optuna.Study:
    """Return a study that prunes a trial at a value above `upper`, or at NaN."""
    return optuna.create_study(direction=direction, pruner=optuna.pruners.ThresholdPruner(upper=upper), **options)


def values_of(one: optuna.Study, number: int = 0) -> dict[int, float]:
    return one.trials[number].intermediate_values


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
    ended: list[str] = []
    runs: list[Run] = []

    @on(Callback.on_fit_end)
    def end(run: Run) -> None:
        assert run.outcome is not None
        ended.append(run.outcome.kind)

    def objective(trial: Trial) -> float:
        pruning = OptunaPruning(trial, "eval/loss")
        losses = [1.0, 9.0 if trial.number else 0.5, 0.25]
        callbacks = [Scripted(loss=losses), pruning, end]
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
    @on(Callback.on_eval_end)
    def stop(run: Run, evaluation: object) -> None:
        run.stop("pruned by Optuna, or so it says")

    one = study(upper=5.0)
    pruning = OptunaPruning(one.ask(), "eval/x")
    assert pruning.result(simulate([stop, pruning], metrics={"eval/x": [9.0, 2.0]})) == 9.0  # both stop it
    assert one.trials[0].user_attrs == {}
    pruning = OptunaPruning(study().ask(), "eval/x")
    run = simulate([EarlyStopping("eval/x", "min"), pruning], metrics={"eval/x": [1.0, 2.0, 0.0]})
    assert run.outcome is not None
    assert (run.outcome.kind, pruning.result(run)) == ("stopped", 1.0)


def test_the_plan_names_it() -> None:
    callbacks = [Evaluate(tiny_loader(1)), OptunaPruning(study().ask(), "eval/loss", name="trial")]
    lines = str(tiny_trainer(callbacks=callbacks).plan()).splitlines()
    assert any(line.strip().startswith("on_eval_end") and "trial" in line for line in lines), lines


def test_a_trial_that_continues_reports_each_step_once(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    one = study(storage=storage, study_name="resumed")
    trial = one.ask()

    def fit(steps: int, fail_at: int = 99) -> tuple[OptunaPruning, Run]:
        pruning = OptunaPruning(Trial(optuna.load_study(study_name="resumed", storage=storage), trial._trial_id), "eval/loss")
        callbacks = [
            Scripted(loss=[5.0, 1.0, 3.0, 4.0, 3.5]),
            pruning,
            Checkpoint("2 steps", on_exception=False),
            failing(Callback.on_step_start, fail_at),
        ]
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


def test_the_objective_runs_without_a_study() -> None:
    pruning = OptunaPruning(FixedTrial({"lr": 0.1}), "eval/x", "min")
    assert pruning.result(simulate([pruning], metrics={"eval/x": [2.0, 1.0]})) == 1.0


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

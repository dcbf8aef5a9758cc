"""The recipes for sweeps: what was interrupted or died continues, and repeats nothing that is finished."""

from __future__ import annotations

import os
import time
from pathlib import Path

import optuna
import pytest

from cadenza import Callback, Trainer
from cadenza.run import Run
from tests.forked import start
from tests.recipes.pages import blocks, run


def test_a_sweep_that_was_interrupted_repeats_no_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = blocks("cross-validation")[0].partition("best = sweep()")[0]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(definitions)["sweep"]()
    monkeypatch.chdir(tmp_path / "cut")
    names = run(definitions)
    fit, begun = names["fit"], list[int]()

    def fit_three(fold: int, seed: int, directory: str) -> Run:
        if len(begun) == 3:
            fit(fold, seed, directory, max_epochs=2)  # the fourth is under way
            raise KeyboardInterrupt
        begun.append(fold)
        return fit(fold, seed, directory)  # type: ignore[no-any-return]

    names["fit"] = fit_three
    with pytest.raises(KeyboardInterrupt):
        names["sweep"]()
    steps: dict[str, int] = {}
    original = Trainer.fit

    def counting(trainer: Trainer, resume: str) -> Run:
        one = original(trainer, resume=resume)
        steps[Path(str(trainer.directory)).name] = one.progress.step - one.progress.origin.step
        return one

    monkeypatch.setattr(Trainer, "fit", counting)
    again = run(definitions)
    assert again["sweep"]() == whole
    trained = {name: count for name, count in steps.items() if count}
    assert len(steps) == 10
    assert {count for name, count in steps.items() if name in trained and name != "fold-3-seed-0"} == {52}
    assert trained["fold-3-seed-0"] == 26  # two of four epochs


class DieOnce(Callback):
    """End the process at the second epoch, before its checkpoint."""

    def on_eval_end(self, run: Run, evaluation: object) -> None:
        if run.progress.epoch == 2:
            os._exit(9)


def search(*, killed: bool = False) -> optuna.Study:
    """Run the blocks of the page that continue a study, with one trial and a heartbeat of a second."""
    first, _, resumable = blocks("optuna")
    resumable = resumable.replace("heartbeat_interval=60", "heartbeat_interval=1, grace_period=1").replace(
        "n_trials=2", "n_trials=1"
    )
    assert "grace_period=1" in resumable
    if killed:
        resumable = resumable.replace("pruning, Checkpoint", "pruning, DieOnce(), Checkpoint")
    namespace = run("from tests.recipes.test_sweeps import DieOnce", first.partition("study =")[0], resumable)
    return namespace["study"]  # type: ignore[no-any-return]


def search_and_die(folder: Path) -> None:
    os.chdir(folder)
    search(killed=True)


def test_a_killed_trial_is_retried_and_continues_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    monkeypatch.chdir(tmp_path)
    process = start(search_and_die, tmp_path, output=tmp_path / "written")
    assert process.ended() == 9, process.said()
    time.sleep(2.1)  # the heartbeat is now too old
    study = search()
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    lost, retried = study.trials
    assert list(lost.intermediate_values) == [13, 26]  # 13 steps are an epoch
    assert list(retried.intermediate_values) == [13, 26, 39]
    assert [path.name for path in (tmp_path / "runs" / "resumable").iterdir()] == ["trial-0"]
    assert "continued" in (tmp_path / "runs" / "resumable" / "trial-0" / "run.json").read_text()

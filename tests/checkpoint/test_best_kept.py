"""The end of a run says which checkpoints are the best: their values, steps and paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza import load_weights
from cadenza.callbacks import Checkpoint
from cadenza.commands.main import main
from cadenza.errors import CheckpointError, CheckpointMismatchError
from cadenza.sinks import Console
from cadenza.sinks.progress_bar import ProgressBar
from cadenza.status.plain import same
from cadenza.testing import tiny_run, tiny_trainer
from tests.checkpoint.chosen import WORST_FIRST, evaluated, network, state_of, trained


def test_console_and_progress_bar_end_with_value_step_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    both: Any = [WORST_FIRST, ("far/loss", "min")]
    for show in (Console(), ProgressBar("plain")):
        name = type(show).__name__
        callbacks = [evaluated(), evaluated(name="far"), Checkpoint(keep_best=both), show]
        run = tiny_run(directory=f"runs/{name}", steps=8, callbacks=callbacks)
        first, last = run.history["eval/loss"][0], run.history["far/loss"][-1]
        assert capsys.readouterr().out.splitlines()[-2:] == [
            f"best eval/loss {first[1]:.4g} at step 2: runs/{name}/checkpoints/step-00000002",
            f"best far/loss {last[1]:.4g} at step 8: runs/{name}/checkpoints/step-00000008",
        ]
    assert (tmp_path / "runs/Console/console.log").read_text().splitlines()[-1].startswith("best far/loss")


def test_a_resumed_run_still_says_what_was_the_best_before_it(tmp_path: Path) -> None:
    trained(tmp_path)
    saves = Checkpoint("3 steps", keep_best=WORST_FIRST)
    run = tiny_trainer(model=network(), steps=10, directory=tmp_path, callbacks=[evaluated(), saves]).fit(resume="auto")
    assert run.why("best kept").endswith("at step 2 in checkpoints/step-00000002")


def test_a_run_without_a_rule_for_the_best_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[evaluated(), Checkpoint(), Console()])
    assert capsys.readouterr().out.splitlines()[-1].startswith("finished")
    assert not any(one.what == "best kept" for one in run.decisions)


def test_the_commands_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert (run["kept"]["eval/loss"]["step"], run["kept"]["eval/loss"]["checkpoint"]) == (2, "step-00000002")
    assert run["kept"]["eval/loss"]["value"] == run["best"]["eval/loss"]
    assert main(["why", str(tmp_path / "run"), "best", "kept"]) == 0
    assert "at step 2 in checkpoints/step-00000002" in capsys.readouterr().out


def test_a_run_continues_at_its_best_checkpoint_by_name(tmp_path: Path) -> None:
    def again(steps: int = 8) -> Any:
        saves = Checkpoint("3 steps", keep_last=2, keep_best=WORST_FIRST)
        return tiny_trainer(model=network(), steps=steps, directory=tmp_path, callbacks=[evaluated(), saves])

    again().fit()
    load_weights(tmp_path, model := network(), which="best")
    expected = dict(model.state_dict())
    trainer = again(steps=2)
    run = trainer.fit(resume="best")
    assert run.progress.origin.step == 2
    assert same(state_of(trainer), expected)
    assert again(5).fit(resume="step-2").progress.origin.step == 2
    for wrong, message in (("best:x", "is the best by 'x'"), ("step-77", "there is no checkpoint 'step-77'")):
        with pytest.raises(CheckpointError, match=message):
            again().fit(resume=wrong)
    for wrong in ("bets", "last"):
        with pytest.raises(ValueError, match="Did you mean"):
            again().fit(resume=wrong)
    with pytest.raises(ValueError, match="resume='best' looks for checkpoints in the directory"):
        tiny_trainer().fit(resume="best")


def test_a_best_checkpoint_of_weights_only_cannot_be_continued(tmp_path: Path) -> None:
    saves = Checkpoint("2 steps", keep_best=WORST_FIRST, weights_only=True)
    trainer = tiny_trainer(model=network(), steps=6, directory=tmp_path, callbacks=[evaluated(), saves])
    trainer.fit()
    load_weights(tmp_path, network(), which="best")
    with pytest.raises(CheckpointMismatchError, match="holds weights only"):
        trainer.fit(resume="best")

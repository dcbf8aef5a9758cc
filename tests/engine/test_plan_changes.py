"""How a plan differs from the plan of the run so far: in the plan itself, and as a decision of the run that continues."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, ClipGradients, LogTraining
from cadenza.commands.main import main
from cadenza.errors import DirectoryError
from cadenza.testing import launch, tiny_trainer
from tests.distributed.parts import loader as sharded_loader
from tests.distributed.parts import trainer as sharded_trainer

CHANGES = [
    "- fit: 1 epoch",
    "- fit: 5 steps",
    "+ fit: 2 epochs",
    "+ fit: 10 steps",
    "- on_step_end: LogTraining (every 2 steps)",
    "+ on_step_end: LogTraining (every 3 steps)",
]


def trainer(directory: Path | None, every: str, **arguments: Any) -> Trainer:
    return tiny_trainer(callbacks=[LogTraining(every), Checkpoint()], directory=directory, **arguments)


def test_the_plan_of_a_run_that_continues_ends_with_its_differences(tmp_path: Path) -> None:
    assert not trainer(tmp_path / "run", "2 steps").plan().changes, "there is no run yet"
    trainer(tmp_path / "run", "2 steps").fit()
    plan = trainer(tmp_path / "run", "3 steps", epochs=2).plan()
    assert plan.changes == plan.to_dict()["changes"] == CHANGES
    assert "\n".join(["changed since the run so far:", *CHANGES]) in str(plan)
    assert "changed" not in str(trainer(tmp_path / "run", "2 steps").plan())


def test_a_plan_can_be_compared_with_any_run(tmp_path: Path) -> None:
    trainer(tmp_path / "run", "2 steps").fit()
    assert trainer(None, "3 steps", epochs=2).plan(since=tmp_path / "run").changes == CHANGES
    with pytest.raises(DirectoryError, match="other' holds no plan"):
        trainer(None, "3 steps").plan(since=tmp_path / "other")


def test_another_order_of_listeners_is_a_difference(tmp_path: Path) -> None:
    logs, saves = LogTraining("2 steps"), Checkpoint("3 steps")
    tiny_trainer(callbacks=[logs, saves], directory=tmp_path / "run").fit()
    plan = tiny_trainer(callbacks=[saves, logs], directory=tmp_path / "run").plan()
    assert "- on_step_end: LogTraining (every 2 steps) > Checkpoint (every 3 steps)" in plan.changes
    assert "+ on_step_end: Checkpoint (every 3 steps) > LogTraining (every 2 steps)" in plan.changes


def test_a_run_that_continues_records_the_differences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path / "run", "2 steps").fit()
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path / "run", "3 steps", epochs=2).fit(resume="auto")
    (decision,) = [one for one in run.decisions if one.what == "plan changed"]
    assert decision.data["changes"] == CHANGES
    assert "the plan has changed since the run so far: - fit: 1 epoch; " in caplog.text


def test_more_epochs_are_a_decision_and_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path / "run", "2 steps").fit()
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path / "run", "2 steps", epochs=2).fit(resume="auto")
    assert run.why("plan changed").endswith("- fit: 1 epoch; - fit: 5 steps; + fit: 2 epochs; + fit: 10 steps")
    assert not caplog.records


def test_an_unchanged_run_records_nothing(tmp_path: Path) -> None:
    trainer(tmp_path / "run", "2 steps", steps=3).fit()
    run = trainer(tmp_path / "run", "2 steps", steps=3).fit(resume="auto")
    assert "plan changed" not in {one.what for one in run.decisions}


def test_all_ranks_record_the_same_differences(tmp_path: Path) -> None:
    def continuing() -> list[list[str]]:
        for clip in ((), (ClipGradients(max_norm=1.0),)):
            made = sharded_trainer(sharded_loader(8), callbacks=[Checkpoint("1 step"), *clip], directory=tmp_path / "run")
            made.max_epochs = 2 if clip else 1
            run = made.fit(resume="auto")
        return [decision.data["changes"] for decision in run.decisions if decision.what == "plan changed"]

    first, second = launch(continuing)
    assert first == second
    assert any("ClipGradients" in line for line in first[0])


SCRIPT = """
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.testing import tiny_trainer
trainer = tiny_trainer(epochs=2, callbacks=[LogTraining("3 steps"), Checkpoint()])
"""


def test_the_command_shows_the_differences_and_the_calendar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_changed.py").write_text(SCRIPT)
    trainer(tmp_path / "run", "2 steps").fit()
    assert main(["plan", "train_changed.py", "--since", "run"]) == 0
    assert "\n".join(CHANGES) in capsys.readouterr().out
    assert main(["plan", "train_changed.py", "--calendar", "1 epoch"]) == 0
    assert "on_step_end   LogTraining  every 3 steps  once: step 3" in capsys.readouterr().out
    assert main(["plan", "train_changed.py", "--calendar", "--json"]) == 0
    assert '"headline": "calendar of 2 epochs, 10 steps"' in capsys.readouterr().out

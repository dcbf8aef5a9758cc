"""A callback sees the same events with the same numbers in a native run as in transformers's own trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments, trainer
from tests.adapters.transformers.scenario import EVENTS, Net, Recorder, Samples, at_home, evaluate, here, transformers


def test_two_epochs(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    at_home(tmp_path, home, num_train_epochs=2, logging_steps=2)
    here([Arguments(logging_steps=2), native], max_epochs=2)
    assert native.rows == home.rows
    assert {row[0] for row in home.rows} == {
        *("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"),
        *("on_step_end", "on_log", "on_epoch_end", "on_train_end"),
    }


def test_accumulation_with_a_short_last_step_and_evaluation_of_epochs(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    arguments: dict[str, Any] = {"logging_steps": 1, "gradient_accumulation_steps": 3, "eval_strategy": "epoch"}
    at_home(tmp_path, home, samples=14, evaluation=True, num_train_epochs=2, **arguments)
    here([evaluate("1 epoch"), Arguments(logging_steps=1), native], samples=14, max_epochs=2, accumulate=3)
    assert native.rows == home.rows
    assert [row[0] for row in home.rows].count("on_substep_end") == 8


def test_steps_with_evaluations_and_checkpoints(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    by_steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    at_home(tmp_path, home, evaluation=True, max_steps=9, logging_steps=2, metric_for_best_model="loss", **by_steps)
    callbacks = [evaluate("3 steps"), Checkpoint("3 steps"), Arguments(logging_steps=2, metric_for_best_model="loss")]
    here([*callbacks, native], max_steps=9, directory=tmp_path / "run")
    # A checkpoint of the last step of an epoch is also that of its end, and is written once, after on_epoch_end.
    at_end = [row[0] for row in home.rows].index("on_save", [row[0] for row in home.rows].index("on_epoch_end") - 1)
    assert home.rows[at_end + 1][0] == "on_epoch_end"
    home.rows[at_end], home.rows[at_end + 1] = home.rows[at_end + 1], home.rows[at_end]
    assert native.rows == home.rows


@pytest.mark.parametrize("event", ["on_epoch_end", "on_evaluate"])
def test_a_stop(tmp_path: Path, event: str) -> None:
    def stop(args: Any, state: Any, control: Any) -> None:
        control.should_training_stop = True

    home, native = Recorder(**{event: stop}), Recorder(**{event: stop})
    at_home(tmp_path, home, evaluation=True, num_train_epochs=3, logging_steps=4, eval_strategy="epoch")
    run = here([evaluate("1 epoch"), Arguments(logging_steps=4), native], max_epochs=3)
    assert native.rows == home.rows
    assert run.why("stopped") == "stopped by Recorder at epoch 1, step 6, batch 6: control.should_training_stop is set"


@pytest.mark.parametrize(
    ("event", "flag"),
    [
        ("on_step_begin", "should_training_stop"),
        ("on_train_begin", "should_training_stop"),
        ("on_log", "should_training_stop"),
        ("on_step_end", "should_epoch_stop"),
        ("on_optimizer_step", "should_log"),
        ("on_step_begin", "should_evaluate"),
    ],
)
def test_flags_in_an_epoch(tmp_path: Path, event: str, flag: str) -> None:
    def set_flag(args: Any, state: Any, control: Any) -> None:
        if state.global_step in (0, 3, 6):
            setattr(control, flag, True)

    home, native = Recorder(**{event: set_flag}), Recorder(**{event: set_flag})
    at_home(tmp_path, home, evaluation=True, num_train_epochs=3, logging_steps=3)
    here([evaluate("99 epochs"), Arguments(logging_steps=3), native], max_epochs=3)
    assert native.rows == home.rows


def test_early_stopping_stops_at_the_same_step(tmp_path: Path) -> None:
    def stopping() -> Any:
        return transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.9)

    home, native = Recorder(), Recorder()
    by_epochs: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    theirs = at_home(tmp_path, stopping(), home, evaluation=True, num_train_epochs=8, metric_for_best_model="loss", **by_epochs)
    callbacks = [evaluate("1 epoch"), Checkpoint("1 epoch", keep_best=("eval/loss", "min")), stopping(), native]
    run = here(callbacks, max_epochs=8, directory=tmp_path / "run")
    assert native.rows == home.rows
    assert run.progress.step == theirs.state.global_step < 48
    assert "EarlyStoppingCallback" in run.why("stopped")


def test_a_trainer_made_of_arguments(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    arguments: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    made = at_home(tmp_path, home, evaluation=True, train_sampling_strategy="sequential", **arguments)
    given = dataclasses.replace(made.args, output_dir=str(tmp_path / "here"))
    trainer(Net(), given, Samples(12, 1), Samples(6, 2), callbacks=[native]).fit()
    assert [row[:4] for row in native.rows] == [row[:4] for row in home.rows]


def test_an_error_has_no_ends(tmp_path: Path) -> None:
    def fail(args: Any, state: Any, control: Any) -> None:
        if state.global_step == 3:
            raise ValueError("of a test")

    home, native = Recorder(on_step_end=fail), Recorder(on_step_end=fail)
    with pytest.raises(ValueError, match="of a test"):
        at_home(tmp_path, home, num_train_epochs=2, logging_steps=2)
    with pytest.raises(ValueError, match="of a test"):
        here([Arguments(logging_steps=2), native], max_epochs=2)
    assert native.rows == home.rows


def test_the_table_has_each_event() -> None:
    from cadenza.adapters.transformers.events import EVENTS as TABLE

    assert sorted(TABLE) == sorted(EVENTS)
    assert [name for name, event in TABLE.items() if event.moment is None] == ["on_push_begin"]
    assert TABLE["on_push_begin"].note

"""A callback sees the events and numbers of transformers's own trainer; on two processes, all ranks act alike."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.adapters.transformers.callback import TransformersCallback
from cadenza.adapters.transformers.flags import FLAGS, flags_of
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments, trainer
from cadenza.testing import launch
from tests.adapters.transformers.scenario import (
    EVENTS,
    Net,
    Recorder,
    Samples,
    TrainerCallback,
    at_home,
    evaluate,
    here,
    scalars,
    transformers,
)

# -- one process -------------------------------------------------------------------------------------------


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


# -- two processes: the trainer of transformers waits without an end for a flag of one rank ----------------

Seen = list[tuple[str, int]]


class OnSecondRank(TrainerCallback):  # type: ignore[misc]
    """Sets a flag on the second rank, once, at step 3."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if args.process_index == 1 and state.global_step == 3:
            setattr(control, self.flag, True)


def with_flag(folder: Path, flag: str) -> tuple[Seen, list[str]]:
    recorder = Recorder()
    parts = [evaluate("99 steps"), Checkpoint("99 steps"), Arguments(logging_steps=99), OnSecondRank(flag), recorder]
    run = here(parts, samples=20, max_epochs=1, directory=folder / flag)
    seen = [row[:2] for row in recorder.rows if row[0] in ("on_log", "on_evaluate", "on_save", "on_epoch_end")]
    return seen, [one.who for one in run.decisions if one.when.step == 3]


def with_classes(folder: Path) -> dict[str, Any]:
    """Train with classes of transformers that write, show or stop, and stop on one rank."""
    seen: list[tuple[str, int, bool]] = []

    class Sees(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
            seen.append(("on_log", state.global_step, "loss" in logs))
            assert (args.world_size, args.process_index) == (2, int(os.environ["RANK"]))
            assert state.is_world_process_zero is (args.process_index == 0)

        def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            seen.append(("on_save", state.global_step, os.path.isdir(f"{args.output_dir}/checkpoint-{state.global_step}")))

    class StopsOnOneRank(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            control.should_training_stop = args.process_index == 1 and state.global_step == 8

    stopping = transformers.EarlyStoppingCallback(9)
    shown = [transformers.integrations.TensorBoardCallback(), transformers.ProgressCallback(), transformers.PrinterCallback()]
    parts = [evaluate("3 steps"), Checkpoint("3 steps", keep_best=("eval/loss", "min")), Arguments(logging_steps=2)]
    run = here([*parts, *shown, stopping, StopsOnOneRank(), Sees()], samples=24, max_epochs=3, directory=folder)
    state = run._session.adapters["transformers"].state  # type: ignore[attr-defined]
    losses = [row["loss"] for row in state.log_history if "loss" in row]
    return {"step": run.progress.step, "seen": seen, "losses": losses, "best": state.best_model_checkpoint}


def on_both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return {flag: with_flag(folder, flag) for flag in FLAGS}, with_classes(folder / "run")


def test_two_processes_act_alike(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (flags, first), (others, second) = launch(lambda: on_both(tmp_path))

    seen = {flag: events for flag, (events, _) in flags.items()}
    assert seen == {flag: events for flag, (events, _) in others.items()}
    end = [("on_epoch_end", 5), ("on_save", 5), ("on_log", 5)]
    a_step_later = [("on_epoch_end", 4), ("on_save", 4), ("on_log", 4)]
    assert seen["should_training_stop"] == seen["should_epoch_stop"] == a_step_later
    assert seen["should_save"] == [("on_save", 3), *end]
    assert seen["should_log"] == [("on_log", 3), *end]
    assert seen["should_evaluate"] == [("on_log", 3), ("on_evaluate", 3), *end]
    assert "OnSecondRank on rank 1" in flags["should_evaluate"][1]

    assert first == second
    assert first["step"] == 8
    saves = [one for one in first["seen"] if one[0] == "on_save"]
    assert saves == [("on_save", 3, True), ("on_save", 6, True), ("on_save", 8, True)]
    assert [one[1] for one in first["seen"] if one[0] == "on_log" and one[2]] == [2, 4, 6, 8]
    assert first["best"].startswith(str(tmp_path / "run" / "checkpoints" / "step-"))
    assert [step for step, _ in scalars(tmp_path / "run")["train/loss"]] == [2, 4, 6, 8]  # one file, of the main process


def returns(self: Any, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
    return control


def tracks(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
    self.last = (args.output_dir, state.global_step, logs)


def saves(self: Any, args: Any, state: Any, c: Any, **keywords: Any) -> None:
    c.should_save = True


def passes_on(self: Any, args: Any, state: Any, c: Any, **keywords: Any) -> None:
    vars(c).update(should_log=True)


def passes_all_on(self: Any, *given: Any, **keywords: Any) -> None:
    saves(self, *given)


@pytest.mark.parametrize(
    ("hook", "flags"),
    [
        (returns, set()),
        (tracks, set()),
        (saves, {"should_save"}),
        (passes_on, {*FLAGS}),
        (passes_all_on, {*FLAGS}),
        (print, {*FLAGS}),  # not a function of Python
    ],
)
def test_the_code_of_a_callback_says_which_flags_it_may_set(hook: Callable[..., Any], flags: set[str]) -> None:
    made = type("Made", (TrainerCallback,), {"on_log": hook})()
    assert flags_of(TransformersCallback(made, TrainerCallback)) == flags


def test_trackers_set_no_flags() -> None:
    kind = transformers.integrations.TensorBoardCallback
    assert not flags_of(TransformersCallback(kind(), TrainerCallback))
    stopping = transformers.EarlyStoppingCallback(2)
    assert flags_of(TransformersCallback(stopping, TrainerCallback)) == {"should_training_stop"}

"""A callback sees the events and numbers of transformers's own trainer; its state is resumed, and all ranks act alike."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.callbacks import BestWeights, Checkpoint, LogTraining
from cadenza.compat.transformers import Arguments, trainer
from cadenza.compat.transformers.callback import TransformersCallback
from cadenza.compat.transformers.flags import FLAGS, flags_of
from cadenza.errors import AdapterError, CallbackError, MonitorError
from cadenza.testing import launch
from tests.compat.transformers import scenario as pair
from tests.compat.transformers.scenario import Net, Recorder, Samples, TrainerCallback, evaluate, transformers

# -- one process -------------------------------------------------------------------------------------------


def test_two_epochs(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    pair.at_home(tmp_path, home, num_train_epochs=2, logging_steps=2)
    pair.here([Arguments(logging_steps=2), native], max_epochs=2)
    assert native.rows == home.rows
    assert {row[0] for row in home.rows} == {
        *("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"),
        *("on_step_end", "on_log", "on_epoch_end", "on_train_end"),
    }


def test_accumulation_with_a_short_last_step_and_evaluation_of_epochs(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    arguments: dict[str, Any] = {"logging_steps": 1, "gradient_accumulation_steps": 3, "eval_strategy": "epoch"}
    pair.at_home(tmp_path, home, samples=14, evaluation=True, num_train_epochs=2, **arguments)
    pair.here([evaluate("1 epoch"), Arguments(logging_steps=1), native], samples=14, max_epochs=2, accumulate=3)
    assert native.rows == home.rows
    assert [row[0] for row in home.rows].count("on_substep_end") == 8


def test_steps_with_evaluations_and_checkpoints(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    by_steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    pair.at_home(tmp_path, home, evaluation=True, max_steps=9, logging_steps=2, metric_for_best_model="loss", **by_steps)
    callbacks = [evaluate("3 steps"), Checkpoint("3 steps"), Arguments(logging_steps=2, metric_for_best_model="loss")]
    pair.here([*callbacks, native], max_steps=9, directory=tmp_path / "run")
    # A checkpoint of the last step of an epoch is also that of its end, and is written once, after on_epoch_end.
    at_end = [row[0] for row in home.rows].index("on_save", [row[0] for row in home.rows].index("on_epoch_end") - 1)
    assert home.rows[at_end + 1][0] == "on_epoch_end"
    home.seen[at_end], home.seen[at_end + 1] = home.seen[at_end + 1], home.seen[at_end]
    assert native.rows == home.rows


@pytest.mark.parametrize("event", ["on_epoch_end", "on_evaluate"])
def test_a_stop(tmp_path: Path, event: str) -> None:
    def stop(args: Any, state: Any, control: Any) -> None:
        control.should_training_stop = True

    home, native = Recorder(**{event: stop}), Recorder(**{event: stop})
    pair.at_home(tmp_path, home, evaluation=True, num_train_epochs=3, logging_steps=4, eval_strategy="epoch")
    run = pair.here([evaluate("1 epoch"), Arguments(logging_steps=4), native], max_epochs=3)
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
    pair.at_home(tmp_path, home, evaluation=True, num_train_epochs=3, logging_steps=3)
    pair.here([evaluate("99 epochs"), Arguments(logging_steps=3), native], max_epochs=3)
    assert native.rows == home.rows


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("flag", ["should_training_stop", "should_epoch_stop", "should_evaluate", "should_save"])
def test_a_flag_that_on_save_sets(tmp_path: Path, strategy: str, flag: str) -> None:
    def set_flag(args: Any, state: Any, control: Any) -> None:
        if state.global_step in (4, 6):
            setattr(control, flag, True)

    home, native = Recorder(on_save=set_flag), Recorder(on_save=set_flag)
    every, steps = {"steps": ("4 steps", 8), "epoch": ("1 epoch", 12)}[strategy]
    pair.at_home(tmp_path, home, evaluation=True, max_steps=steps, save_strategy=strategy, save_steps=4)
    pair.here([evaluate("99 epochs"), Checkpoint(every), native], max_steps=steps, directory=tmp_path / "run")
    assert [row[:2] for row in native.rows] == [row[:2] for row in home.rows]


def test_a_schedule_that_a_callback_cannot_hold_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reset(args: Any, state: Any, control: Any) -> None:
        control.should_save = False

    run = pair.here([Checkpoint("3 steps"), Recorder(on_step_end=reset)], max_steps=9, directory=tmp_path)
    assert [one.data["step"] for one in run.decisions if one.what == "saved"] == [3, 6, 9]
    assert caplog.text.count("schedules hold") == 1


def test_early_stopping_stops_at_the_same_step(tmp_path: Path) -> None:
    def stopping() -> Any:
        return transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.9)

    home, native = Recorder(), Recorder()
    by_epochs: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    theirs = pair.at_home(
        tmp_path, stopping(), home, evaluation=True, num_train_epochs=8, metric_for_best_model="loss", **by_epochs
    )
    callbacks = [evaluate("1 epoch"), Checkpoint("1 epoch", keep_best=("eval/loss", "min")), stopping(), native]
    run = pair.here(callbacks, max_epochs=8, directory=tmp_path / "run")
    assert native.rows == home.rows
    assert run.progress.step == theirs.state.global_step < 48
    assert "EarlyStoppingCallback" in run.why("stopped")


def test_a_trainer_made_of_arguments(tmp_path: Path) -> None:
    home, native = Recorder(), Recorder()
    arguments: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    made = pair.at_home(tmp_path, home, evaluation=True, train_sampling_strategy="sequential", **arguments)
    given = dataclasses.replace(made.args, output_dir=str(tmp_path / "here"))
    trainer(Net(), given, Samples(12, 1), Samples(6, 2), callbacks=[native]).fit()
    assert [row[:4] for row in native.rows] == [row[:4] for row in home.rows]


def test_an_error_has_no_ends(tmp_path: Path) -> None:
    def fail(args: Any, state: Any, control: Any) -> None:
        if state.global_step == 3:
            raise ValueError("of a test")

    home, native = Recorder(on_step_end=fail), Recorder(on_step_end=fail)
    with pytest.raises(ValueError, match="of a test"):
        pair.at_home(tmp_path, home, num_train_epochs=2, logging_steps=2)
    with pytest.raises(ValueError, match="of a test"):
        pair.here([Arguments(logging_steps=2), native], max_epochs=2)
    assert native.rows == home.rows


def test_the_table_has_each_event() -> None:
    from cadenza.compat.transformers.events import EVENTS as TABLE

    assert sorted(TABLE) == sorted(pair.EVENTS)
    assert [name for name, event in TABLE.items() if event.moment is None] == ["on_push_begin"]
    assert TABLE["on_push_begin"].note


# -- two processes: the trainer of transformers waits without an end for a flag of one rank ----------------

Seen = list[tuple[str, int]]


class OnSecondRank(TrainerCallback):  # type: ignore[misc]
    """Sets a flag on the second rank, once, at step 3. A stop in ``on_save`` is that of both ranks."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        control.should_training_stop = self.flag == "should_save"

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if args.process_index == 1 and state.global_step == 3:
            setattr(control, self.flag, True)


def with_flag(folder: Path, flag: str) -> tuple[Seen, list[str]]:
    recorder = Recorder()
    parts = [evaluate("99 steps"), Checkpoint("99 steps"), Arguments(logging_steps=99), OnSecondRank(flag), recorder]
    run = pair.here(parts, samples=20, max_epochs=1, directory=folder / flag)
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
    run = pair.here([*parts, *shown, stopping, StopsOnOneRank(), Sees()], samples=24, max_epochs=3, directory=folder)
    state = run._session.adapters["transformers"].state
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
    assert seen["should_save"] == [("on_save", 3), ("on_epoch_end", 3), ("on_log", 3)]
    assert seen["should_log"] == [("on_log", 3), *end]
    assert seen["should_evaluate"] == [("on_log", 3), ("on_evaluate", 3), *end]
    assert "OnSecondRank on rank 1" in flags["should_evaluate"][1]

    assert first == second
    assert first["step"] == 8
    saves = [one for one in first["seen"] if one[0] == "on_save"]
    assert saves == [("on_save", 3, True), ("on_save", 6, True), ("on_save", 8, True)]
    assert [one[1] for one in first["seen"] if one[0] == "on_log" and one[2]] == [2, 4, 6, 8]
    assert first["best"].startswith(str(tmp_path / "run" / "checkpoints" / "step-"))
    assert [step for step, _ in pair.scalars(tmp_path / "run")["train/loss"]] == [2, 4, 6, 8]  # one file, of the main process


def tracks(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> Any:
    self.last = (args.output_dir, state.global_step, logs)
    return control


def saves(self: Any, args: Any, state: Any, c: Any, **keywords: Any) -> None:
    c.should_save = True


def passes_on(self: Any, args: Any, state: Any, c: Any, **keywords: Any) -> None:
    vars(c).update(should_log=True)


def passes_all_on(self: Any, *given: Any, **keywords: Any) -> None:
    saves(self, *given)


def with_hook(hook: Callable[..., Any]) -> Any:
    return type("Made", (TrainerCallback,), {"on_log": hook})()


@pytest.mark.parametrize(
    ("made", "flags"),
    [
        (with_hook(tracks), set()),
        (with_hook(saves), {"should_save"}),
        (with_hook(passes_on), {*FLAGS}),
        (with_hook(passes_all_on), {*FLAGS}),
        (with_hook(print), {*FLAGS}),  # not a function of Python
        (transformers.EarlyStoppingCallback(2), {"should_training_stop"}),
    ],
)
def test_the_code_of_a_callback_says_which_flags_it_may_set(made: Any, flags: set[str]) -> None:
    assert flags_of(TransformersCallback(made, TrainerCallback)) == flags


def test_trackers_set_no_flags() -> None:
    assert not flags_of(TransformersCallback(transformers.integrations.TensorBoardCallback(), TrainerCallback))


# -- what a run holds of callbacks, and what is an error ---------------------------------------------------


class Counting(TrainerCallback):  # type: ignore[misc]
    """Has attributes of each kind: set in the constructor, reset, appended to and counted."""

    def __init__(self) -> None:
        self.steps = 0
        self.opened = False
        self.weights: list[torch.Tensor] = []
        self.since_begin = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        assert not self.opened, "the flag of a tracker must not be restored"
        self.opened, self.since_begin = True, 0
        self.weights.append(torch.zeros(()))

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.steps += 1
        self.since_begin += 1
        self.weights[0] += state.global_step


def trained(folder: Path, *, dies_at: int = 0) -> tuple[Run | None, Counting, Any]:
    def die(args: Any, state: Any, control: Any) -> None:
        if state.global_step == dies_at:
            raise KeyError("of a test")

    counting, stopping = Counting(), transformers.EarlyStoppingCallback(3, 10.0)
    arguments = Arguments(logging_steps=3, metric_for_best_model="loss")
    saves = Checkpoint("2 steps", on_exception=False)
    trainer = pair.trainer_of(
        [evaluate("2 steps"), saves, arguments, stopping, counting, Recorder(on_step_end=die)],
        max_epochs=3,
        directory=folder,
    )
    if not dies_at:
        return trainer.fit(resume="auto"), counting, stopping
    with pytest.raises(KeyError):
        trainer.fit()
    return None, counting, stopping


def state_of(run: Run) -> Any:
    return run._session.adapters["transformers"].state


def logged(run: Run) -> list[dict[str, Any]]:
    clock = ("runtime", "per_second", "train_loss")  # of this process alone
    return [{key: one for key, one in row.items() if not any(x in key for x in clock)} for row in state_of(run).log_history]


def test_a_run_that_was_killed_continues_to_the_same_state(tmp_path: Path) -> None:
    whole, counted, stopping = trained(tmp_path / "whole")
    trained(tmp_path / "cut", dies_at=5)
    run, counting, again = trained(tmp_path / "cut")
    assert whole is not None
    assert run is not None
    assert run.progress.step == whole.progress.step == 8
    assert logged(run) == logged(whole)
    assert (state_of(run).best_metric, state_of(run).best_global_step) == (state_of(whole).best_metric, 8)
    assert again.early_stopping_patience_counter == stopping.early_stopping_patience_counter == 3
    assert counting.steps == counted.steps == 8
    assert counting.weights == counted.weights == [torch.tensor(36.0)]
    assert counting.since_begin == 4  # on_train_begin sets it anew, also in transformers
    assert state_of(run).best_model_checkpoint == str(tmp_path / "cut" / "checkpoints" / "step-00000008")
    state_of(run).save_to_json(str(tmp_path / "state.json"))
    assert json.loads((tmp_path / "state.json").read_text())["global_step"] == 8


def test_checkpoints_have_the_names_that_integrations_read(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(args: Any, state: Any, control: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        seen.append(sorted(path.name for path in folder.iterdir()))
        (folder / "notes.txt").write_text("of a callback")

    pair.here([Checkpoint("2 steps", keep_last=1), Recorder(on_save=look)], max_steps=4, directory=tmp_path / "run")
    assert len(seen) == 2
    assert all("manifest.json" in names for names in seen)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]  # the other one was deleted
    assert not [*(tmp_path / "run" / "checkpoints").rglob("notes.txt")]


def test_a_save_is_requested_by_its_author(tmp_path: Path) -> None:
    def save(args: Any, state: Any, control: Any) -> None:
        control.should_save = state.global_step == 3

    run = pair.here([Checkpoint("99 epochs"), Recorder(on_step_end=save)], max_steps=5, directory=tmp_path / "run")
    steps = [one.data["step"] for one in run.decisions if one.what == "saved"]
    assert steps == [3, 5]


def test_default_flow_follows_the_schedules_of_native_callbacks(tmp_path: Path) -> None:
    recorder, flow = Recorder(), transformers.DefaultFlowCallback()
    arguments = Arguments(logging_steps=2, logging_first_step=True)
    run = pair.here(
        [evaluate("2 steps"), Checkpoint("3 steps"), flow, arguments, recorder], max_epochs=1, directory=tmp_path / "run"
    )
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    events = [row[:2] for row in recorder.rows if row[0] in ("on_evaluate", "on_save")]
    assert events == [("on_evaluate", 2), ("on_save", 3), ("on_evaluate", 4), ("on_evaluate", 6), ("on_save", 6)]
    assert [row[1] for row in recorder.rows if row[0] == "on_log" and "loss" in row[3]] == [1, 2, 4, 6]


def test_a_returned_control_replaces_the_old_one() -> None:
    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            return transformers.TrainerControl(should_training_stop=state.global_step == 2)

    assert pair.here([Stop()], max_steps=5).progress.step == 2


def test_native_values_reach_on_log() -> None:
    recorder = Recorder(on_train_begin=lambda args, state, control: None)
    pair.here([LogTraining("3 steps", throughput=["steps"]), evaluate("3 steps"), recorder], max_steps=3)
    logs = [row[3] for row in recorder.rows if row[0] == "on_log"]
    assert [sorted(one) for one in logs] == [
        ["epoch", "grad_norm", "learning_rate", "loss"],
        ["epoch", "eval_loss"],
        ["epoch", "steps_per_s"],
        ["epoch", "total_flos", "train_loss"],
    ]


def test_several_evaluations_have_names_of_their_own() -> None:
    recorder = Recorder()
    pair.here([evaluate("3 steps"), evaluate("3 steps", "other"), recorder], max_steps=3)
    metrics = [sorted(row[3]) for row in recorder.rows if row[0] == "on_evaluate"]
    assert metrics == [["epoch", "eval_loss"], ["epoch", "eval_other_loss"]]


def test_evaluate_and_predict_alone() -> None:
    recorder = Recorder()
    trainer = pair.trainer_of([recorder], max_steps=2)
    trainer.fit()
    begun = len(recorder.rows)
    loader = DataLoader(Samples(4, 2), batch_size=2)
    results = trainer.evaluate(loader)
    trainer.predict(loader, compute=lambda model, batch: model(**batch)["logits"])
    step = "on_prediction_step"
    assert [row[0] for row in recorder.rows[begun:]] == [step, step, "on_log", "on_evaluate", step, step, "on_predict"]
    assert recorder.rows[begun + 3][3]["eval_loss"] == results["eval/loss"]


def test_the_view_answers_with_values_of_the_run(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def read(args: Any, state: Any, control: Any) -> None:
        seen.update(args.to_dict(), world_size=args.world_size, device=args.device, mode=args.parallel_mode.value)
        assert json.loads(args.to_json_string())["seed"] == 1
        assert args.to_sanitized_dict()["train_batch_size"] == 2
        assert dataclasses.asdict(args)["gradient_accumulation_steps"] == 2  # ClearMLCallback reads the fields

    native = [evaluate("1 epoch"), Checkpoint("4 steps"), BestWeights("eval/loss", "min"), LogTraining(5)]
    pair.here([*native, Recorder(on_train_begin=read)], max_epochs=2, accumulate=2, directory=tmp_path / "run")
    wanted = {
        "output_dir": str(tmp_path / "run"),
        "run_name": "run",
        "max_steps": -1,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "max_grad_norm": 1.0,
        "seed": 1,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 5,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
        "report_to": [],
        "world_size": 1,
        "device": torch.device("cpu"),
        "mode": "not_distributed",
    }
    assert {name: seen[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda args: args.output_dir, r"Recorder reads args.output_dir, .* Give Trainer\(directory=...\)"),
        (lambda args: args.optim, "Recorder reads args.optim, .* in the keyword `optimizer`"),
        (lambda args: args.tf32, r"Recorder reads args.tf32, .* Give Arguments\(tf32=...\)"),
        (lambda args: args.outputdir, "Did you mean 'output_dir'"),
    ],
)
def test_an_argument_that_is_not_mapped(read: Any, message: str) -> None:
    recorder = Recorder(on_train_begin=lambda args, state, control: read(args))
    with pytest.raises(AdapterError, match=message):
        pair.here([recorder], max_steps=1)


def test_errors_say_what_to_add() -> None:
    def ask(args: Any, state: Any, control: Any) -> None:
        control.should_evaluate = True

    with pytest.raises(AdapterError, match=r"Recorder sets control.should_evaluate, but the list has no Evaluate"):
        pair.here([Recorder(on_step_end=ask)], max_steps=1)
    with pytest.raises(AdapterError, match=r"EarlyStoppingCallback needs args.metric_for_best_model"):
        pair.here([evaluate("1 epoch"), transformers.EarlyStoppingCallback()], max_steps=1)
    with pytest.raises(AdapterError, match=r"TrainingArguments has no field 'loging_steps'. Did you mean 'logging_steps'"):
        pair.here([Recorder(), Arguments(loging_steps=1)], max_steps=1)
    with pytest.raises(MonitorError, match=r"best_model is 'los', but the .* only eval_loss. Did you mean 'eval_loss'"):
        pair.here([evaluate("1 step"), Arguments(metric_for_best_model="los"), Recorder()], max_steps=1)
    with pytest.raises(TypeError, match="Set these in the TrainingArguments"):
        Arguments(object(), logging_steps=1)
    with pytest.raises(TypeError, match=r"got {'logging_steps': 1}. Give values by name: Arguments\(\*\*values\)"):
        Arguments({"logging_steps": 1})
    with pytest.raises(CallbackError, match=r"is not a callback: .*; got .{,80}$"):
        pair.here([transformers.TrainingArguments("out", use_cpu=True)], max_steps=1)


def test_a_control_with_another_attribute_or_another_object_for_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def misspell(args: Any, state: Any, control: Any) -> None:
        control.should_stop_training = True

    class Returns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            return state.global_step < 3

    assert pair.here([Recorder(on_step_begin=misspell)], max_steps=2).progress.step == 2
    told = "Recorder sets control.should_stop_training, which has no effect. Did you mean 'should_training_stop'?"
    assert [one.message for one in caplog.records].count(told) == 1
    with pytest.raises(AdapterError, match=r"Returns returned True from an event; expected control or None"):
        pair.here([Returns()], max_steps=2)


def test_a_callback_may_shorten_the_run_by_its_state(tmp_path: Path) -> None:
    def shorten(args: Any, state: Any, control: Any) -> None:
        state.max_steps = 4

    home, native = Recorder(on_train_begin=shorten), Recorder(on_train_begin=shorten)
    pair.at_home(tmp_path, home, num_train_epochs=2)
    assert pair.here([native], max_epochs=2).progress.step == 4
    assert native.rows == home.rows


def test_explicit_arguments_are_those_of_the_run() -> None:
    seen: dict[str, Any] = {}

    class Explicit(TrainerCallback):  # type: ignore[misc]
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
        ) -> Any:
            seen.update(model=model, optimizer=optimizer, lr=lr_scheduler.get_last_lr())

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, eval_dataloader: Any = None, **_: Any) -> None:
            seen.update(metrics=metrics, eval_dataloader=eval_dataloader)

    evaluation = evaluate("2 steps")
    run = pair.here([evaluation, Explicit(), Arguments(processing_class="tokenizer")], max_steps=2)
    assert seen["model"] is run.model
    assert seen["optimizer"] is run.optimizers[0]
    assert seen["lr"] == [0.0]
    assert seen["eval_dataloader"] is evaluation.evaluation.loader
    assert "eval_loss" in seen["metrics"]
    assert state_of(run).global_step == 2


def test_floating_point_operations_are_counted() -> None:
    class Tokens(nn.Module):
        main_input_name = "tokens"

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 1)

        def num_parameters(self, exclude_embeddings: bool) -> int:
            return 5

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.table(tokens).square().mean()}

    for accumulate in (1, 3):
        run = Trainer(
            Tokens(),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            [{"tokens": torch.arange(1 + count)} for count in range(4)],
            pair.compute,
            max_epochs=1,
            accumulate=accumulate,
            callbacks=[transformers.PrinterCallback()],
            progress=False,
            device="cpu",
        ).fit()
        assert state_of(run).total_flos == 6 * 5 * (1 + 2 + 3 + 4)

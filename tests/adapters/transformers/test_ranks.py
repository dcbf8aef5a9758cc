"""Callbacks of transformers on two processes: flags that one rank sets, and classes that write, show or stop.

With the trainer of transformers, the other rank waits without an end for a flag of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.adapters.transformers.callback import TransformersCallback
from cadenza.adapters.transformers.flags import FLAGS, flags_of
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments
from cadenza.testing import launch
from tests.adapters.transformers.scenario import TrainerCallback, evaluate, here, scalars, transformers

Seen = list[tuple[str, int]]


class OnSecondRank(TrainerCallback):  # type: ignore[misc]
    """Sets a flag on the second rank, once, at step 3."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if args.process_index == 1 and state.global_step == 3:
            setattr(control, self.flag, True)


class Saw(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: Seen = []

    def on_log(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seen.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seen.append(("evaluation", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seen.append(("epoch", state.global_step))


def with_flag(folder: Path, flag: str) -> tuple[Seen, list[str]]:
    saw = Saw()
    parts = [evaluate("99 steps"), Checkpoint("99 steps"), Arguments(logging_steps=99), OnSecondRank(flag), saw]
    run = here(parts, samples=20, max_epochs=1, directory=folder / flag)
    return saw.seen, [one.who for one in run.decisions if one.when.step == 3]


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
    end = [("epoch", 5), ("save", 5), ("log", 5)]
    assert seen["should_training_stop"] == seen["should_epoch_stop"] == [("epoch", 4), ("save", 4), ("log", 4)]  # a step later
    assert seen["should_save"] == [("save", 3), *end]
    assert seen["should_log"] == [("log", 3), *end]
    assert seen["should_evaluate"] == [("log", 3), ("evaluation", 3), *end]
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

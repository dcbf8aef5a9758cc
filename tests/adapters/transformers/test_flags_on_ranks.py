"""Flags of ``control`` that one of two ranks sets. With the trainer of transformers, the other rank waits without an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.adapters.transformers.callback import TransformersCallback
from cadenza.adapters.transformers.flags import FLAGS, flags_of
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments
from cadenza.testing import launch
from tests.adapters.transformers.scenario import TrainerCallback, evaluate, here, transformers

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


def trained(folder: Path, flag: str) -> tuple[Seen, list[str]]:
    saw = Saw()
    parts = [evaluate("99 steps"), Checkpoint("99 steps"), Arguments(logging_steps=99), OnSecondRank(flag), saw]
    run = here(parts, samples=20, max_epochs=1, directory=folder / flag)
    return saw.seen, [one.who for one in run.decisions if one.when.step == 3]


def test_a_flag_of_one_rank_holds_for_all(tmp_path: Path) -> None:
    first, second = launch(lambda: {flag: trained(tmp_path, flag) for flag in FLAGS})
    end = [("epoch", 5), ("save", 5), ("log", 5)]
    seen = {flag: events for flag, (events, _) in first.items()}
    assert seen == {flag: events for flag, (events, _) in second.items()}
    assert seen["should_training_stop"] == seen["should_epoch_stop"] == [("epoch", 4), ("save", 4), ("log", 4)]  # a step later
    assert seen["should_save"] == [("save", 3), *end]
    assert seen["should_log"] == [("log", 3), *end]
    assert seen["should_evaluate"] == [("log", 3), ("evaluation", 3), *end]
    assert "OnSecondRank on rank 1" in first["should_evaluate"][1]


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

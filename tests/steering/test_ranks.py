"""Acts on runs of two processes: all ranks carry them out at the same step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.steering import Steering, tell
from tests.distributed.parts import loader, rank, trainer, weights_of
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks

Acts = Sequence[tuple[str, dict[str, Any]]]


def steered(
    directory: Path, acts: Acts, *, repeats: Path | None = None
) -> tuple[int, list[Any], list[dict[str, Any]], float, torch.Tensor]:
    """Train on this rank; the first one sends acts from a thread. Return the last step, what was steered, and the answers."""
    answers: list[dict[str, Any]] = []
    stopped_at: list[float] = []

    def send() -> None:
        for verb, arguments in acts:
            answers.append(tell(directory, verb, arguments, author="ann", wait_s=60))
        stopped_at.append(time.monotonic())

    sender = threading.Thread(target=send)

    def begin(run: Run) -> None:
        if run.progress.step == 3 and rank() == 0 and acts:
            sender.start()
        time.sleep(0.0 if repeats else 0.01)

    callbacks = [
        Evaluate(loader(8), "100000 steps"),
        Checkpoint("100000 steps"),
        Steering(acts=repeats),
        on(Callback.on_step_end)(begin),
    ]
    one = trainer(max_steps=100_000, max_epochs=None, callbacks=callbacks, directory=directory, seed=1)
    run = one.fit()
    ended = time.monotonic()
    if rank() == 0 and acts:
        sender.join()
    late = ended - stopped_at[0] if stopped_at else 0.0
    decided = [(one.what, one.when.step, one.why.partition(" by ")[0]) for one in run.decisions if "steered" in one.what]
    return run.progress.step, decided, answers, late, weights_of(one)


def test_all_ranks_carry_an_act_out_at_the_same_step(tmp_path: Path) -> None:
    acts: Acts = [
        ("set", {"lr": 0.01}), ("pause", {}), ("save", {}), ("resume", {}), ("evaluate", {}), ("set", {"accumulate": 2}),
        ("set", {"nothing": 1}), ("stop", {}),
    ]  # fmt: skip
    first, second = on_ranks(partial(steered, tmp_path / "run", acts))
    assert first[:2] == second[:2]
    assert torch.equal(first[4], second[4])
    states = [answer["state"] for answer in first[2]]
    assert states == ["done"] * 6 + ["refused", "done"]
    assert first[2][-1]["step"] == first[0]
    assert first[2][1]["step"] == first[2][3]["step"]  # nothing is trained in a pause


def test_a_stop_takes_effect_within_a_second_of_steps_of_10_ms(tmp_path: Path) -> None:
    first, second = on_ranks(partial(steered, tmp_path / "run", [("stop", {})]))
    assert first[0] == second[0]
    act = first[2][0]
    assert act["state"] == "done"

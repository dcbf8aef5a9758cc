"""A callback of transformers costs nothing if it overrides nothing, and at most three calls of Python beside its own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from tests.adapters.transformers.scenario import TrainerCallback
from tests.engine.test_calls import by_cadenza


def python_calls(work: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_a_batch(callbacks: Callable[[], list[Any]], accumulate: int) -> float:
    def calls(count: int) -> int:
        batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]
        return python_calls(lambda: by_cadenza(*callbacks(), accumulate=accumulate)(batches))

    calls(4)
    return (calls(80) - calls(40)) / 40


def overriding(*events: str) -> list[Any]:
    return [type("Own", (TrainerCallback,), {name: lambda *_, **__: None for name in events})()]


@pytest.mark.parametrize(
    ("events", "accumulate", "most"),
    [
        ((), 1, 0),
        (("on_train_begin", "on_log", "on_save", "on_evaluate", "on_train_end"), 1, 2),
        (("on_step_end",), 1, 1 + 3),
        (("on_step_begin",), 1, 1 + 3),
        (("on_pre_optimizer_step",), 1, 1 + 3),
        (("on_optimizer_step",), 1, 1 + 3),
        (("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"), 1, 4 + 2 + 4),
        (("on_substep_end",), 2, (1 + 2 + 2) / 2),
    ],
)
def test_calls_in_a_step(events: tuple[str, ...], accumulate: int, most: float) -> None:
    own = calls_a_batch(lambda: overriding(*events), accumulate) - calls_a_batch(list, accumulate)
    assert own <= most

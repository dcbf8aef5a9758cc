"""A loader of unknown length and both limits: what is made to the length of the run is refused, and no plan promises it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

from cadenza.callbacks import LearningRate, ScheduleValue, Swa, Warmup
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


class Stream:
    """Seven batches, and no length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from tiny_loader(7)


BOTH: dict[str, Any] = {"epochs": 1, "steps": 1000}
EITHER = (
    r"with max_epochs=1 and max_steps=1000 either limit may come first. Give Trainer max_steps= alone, or a loader with __len__"
)


def fall(optimizer: torch.optim.Optimizer, total: int) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.1, total_iters=total)


@pytest.mark.parametrize(
    "callback",
    [
        LearningRate(fall),
        Warmup(0.1),
        Swa(0.75),
        ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "lr", lambda step, total: step / total),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_made_to_the_length_of_the_run_is_refused(callback: Any) -> None:
    with pytest.raises(ValueError, match=EITHER):
        tiny_run(loader=Stream(), callbacks=[callback], **BOTH)


def test_with_max_steps_alone_the_total_is_known() -> None:
    one = LearningRate(fall)
    tiny_run(loader=Stream(), callbacks=[one], steps=20)
    assert one.total == 20


def test_the_plan_gives_the_limit_as_a_limit_and_still_says_who_never_fires() -> None:
    late = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "lr", {0: 0.1}, every="2000 steps")
    plan = str(tiny_trainer(loader=Stream(), callbacks=[late], **BOTH).plan())
    assert "fit: 1 epoch, at most 1,000 steps, on cpu" in plan
    assert "never fires: the run ends after at most 1000 steps" in plan
    assert tiny_run(loader=Stream(), **BOTH).progress.step == 7

"""An error in the start of a resumed run writes no checkpoint, and the next start continues to the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.hooks.moments import Moment
from cadenza.loading import TensorBatches

ERRORS: list[type[BaseException]] = [KeyboardInterrupt, MemoryError]
CUTS = {"inside an epoch": (Callback.on_step_end, 4), "at its end": (Callback.on_epoch_end, 1)}


def trainer(directory: Path, *callbacks: Callback, last: tuple[Callback, ...] = ()) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    loader = TensorBatches(inputs, (inputs.sum(1) > 0).long(), batch_size=6, shuffle=True)
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        loader,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=1,
        directory=directory,
        callbacks=[*callbacks, Checkpoint("1 step", keep_last=2, background=False), *last],
    )


def raising(error: type[BaseException], moment: Moment, at: int | None = None) -> Callback:
    @on(moment, at=at)
    def stop(run: Run) -> None:
        raise error

    return stop


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step-*"))


def weights(trained: Trainer) -> list[Tensor]:
    return [one.clone() for one in trained.model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    trained = trainer(tmp_path_factory.mktemp("whole"))
    trained.fit()
    return weights(trained)


@pytest.fixture
def failing_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[BaseException]], None]:
    """Let the writer fail when it reads which checkpoints its rules kept, once."""

    def begin(error: type[BaseException]) -> None:
        opened = os.open

        def failing(path: Any, *rest: Any, **more: Any) -> int:
            if ".kept-" in str(path):
                monkeypatch.setattr(os, "open", opened)
                raise error
            return opened(path, *rest, **more)

        monkeypatch.setattr(os, "open", failing)

    return begin


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_the_next_start_continues_with_the_same_bits(
    place: str, cut: str, error: type[BaseException], whole: list[Tensor], tmp_path: Path, failing_read: Any
) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, raising(KeyboardInterrupt, *CUTS[cut])).fit()
    there = checkpoints(tmp_path)
    late = (raising(error, Callback.on_fit_start),)
    interrupted = trainer(tmp_path, *(late if place == "before" else ()), last=late if place == "after" else ())
    if place == "inside":
        failing_read(error)
    with pytest.raises(error):
        interrupted.fit(resume="auto")
    assert checkpoints(tmp_path) == there
    resumed = trainer(tmp_path)
    resumed.fit(resume="auto")
    assert all(map(torch.equal, weights(resumed), whole))

"""The recipes for sharded data: a resume between two epochs, and on two ranks each sample once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, Trainer, on
from cadenza.testing import launch
from tests.recipes.pages import blocks, run
from tests.recipes.streaming_without_torchvision import import_streaming

Points = list[tuple[float, ...]]
EPOCH = 20  # steps on one process


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Execute the first blocks of a page, which write the shards and define ``make``."""
    monkeypatch.chdir(tmp_path)

    def execute(name: str) -> dict[str, Any]:
        if name == "mosaicml-streaming":
            import_streaming()
        write, read, *_ = blocks(name)
        return run(write, write, read)  # a script that is started again writes them again

    return execute


def seen(trainer: Trainer) -> tuple[Run, Points]:
    """Train; return the run and the inputs of all samples that this rank trained on."""
    points: Points = []

    @on(Callback.on_batch_start)
    def keep(run: Run, batch: Any) -> None:
        points.extend(map(tuple, batch[0].tolist()))

    trainer.callbacks.append(keep)
    return trainer.fit(resume="auto"), points


@pytest.mark.parametrize("name", ["webdataset", "mosaicml-streaming"])
def test_a_new_process_continues_with_the_order_of_the_next_epoch(name: str, page: Callable[[str], dict[str, Any]]) -> None:
    make = page(name)["make"]
    _, whole = seen(make("one/whole"))
    make("one/cut", max_steps=EPOCH).fit()
    run, second = seen(make("one/cut"))
    assert run.progress.origin.epoch == 1
    assert second == whole[len(whole) // 2 :]
    assert sorted(second) == sorted(whole[: len(whole) // 2])
    assert second != whole[: len(whole) // 2]  # another order


@pytest.mark.parametrize(("name", "batches", "least"), [("webdataset", 9, 480), ("mosaicml-streaming", 10, 640)])
def test_each_of_two_ranks_trains_on_all_batches_of_its_own_shards(
    name: str, batches: int, least: int, page: Callable[[str], dict[str, Any]]
) -> None:
    make = page(name)["make"]

    def train() -> tuple[int, Points]:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        trainer = make("two")
        trainer.callbacks.clear()
        run, points = seen(trainer)
        return run.progress.step, points

    (steps, first), (_, second) = launch(train)
    assert steps == 2 * batches  # two epochs; WebDataset's rank 1 has three of seven shards
    times = Counter([*first, *second])
    assert len(times) >= least
    assert max(times.values()) == 2
    assert not {*first} & {*second} or name == "mosaicml-streaming"  # which deals the samples anew in each epoch

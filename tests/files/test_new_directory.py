"""A run directory with a new name for each start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import attach, new_directory
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer


def test_each_trainer_has_a_directory_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        trainer = tiny_trainer(directory=new_directory(tmp_path / "runs", "lr-0.1"), steps=2)
        trainer.fit()
    tiny_trainer(directory=new_directory(tmp_path / "runs", "lr-0.01"), steps=2).fit()
    assert trainer.directory == tmp_path / "runs" / "lr-0.1-2"
    assert sorted(one.parent.name for one in tmp_path.rglob("run.json")) == ["lr-0.01-1", "lr-0.1-1", "lr-0.1-2"]


def test_the_next_number_is_above_all_others_even_if_some_are_gone(tmp_path: Path) -> None:
    for name in ("a-7", "a-x", "ab-9", "a"):
        (tmp_path / name).mkdir()
    assert new_directory(tmp_path, "a").make().name == "a-8"


def test_trials_that_start_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: new_directory(tmp_path, "trial").make(), range(40)))
    assert sorted(made) == sorted({*made})


@pytest.mark.parametrize("resume", ["auto", True, "last", "best", "best:loss", "step-3"])
def test_a_run_that_shall_be_continued_needs_a_name(resume: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(directory=new_directory(tmp_path), callbacks=[Checkpoint("1 step")], steps=2)
    with pytest.raises(ValueError, match=r"new_directory gives a new one at each start\. Name the directory"):
        trainer.fit(resume=resume)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="new_directory gives a new one"):
        attach(model, torch.optim.SGD(model.parameters(), 0.1), directory=new_directory(tmp_path), resume=resume).__enter__()


def test_it_may_begin_with_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    tiny_trainer(directory=tmp_path / "first", callbacks=[Checkpoint("1 step")], steps=2, seed=1).fit()
    trainer = tiny_trainer(directory=new_directory(tmp_path), callbacks=[Checkpoint("1 step")], steps=4, seed=1)
    run = trainer.fit(resume=tmp_path / "first" / "checkpoints" / "step-00000002")
    assert (run.progress.origin.step, run.progress.step) == (2, 4)
    assert trainer.directory == tmp_path / "run-1"


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "c:"])
def test_a_name_is_one_part_of_a_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be a part of a path"):
        new_directory(tmp_path, name)


def test_the_parent_is_a_local_folder() -> None:
    with pytest.raises(ValueError, match="parent must be a local folder; got the URL"):
        new_directory("s3://bucket/runs", "a")

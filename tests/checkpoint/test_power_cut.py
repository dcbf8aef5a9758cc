"""Records outlive a power cut: they are flushed with each checkpoint, and written again where they are lost all the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.records.history import History
from cadenza.sinks import Csv
from cadenza.testing import tiny_loader, tiny_trainer


def trainer(directory: Path, steps: int) -> Trainer:
    callbacks = [Evaluate(tiny_loader(1)), LogTraining("1 step", throughput=False), Csv(), Checkpoint("2 steps")]
    return tiny_trainer(callbacks=callbacks, steps=steps, batches=4, directory=directory, seed=0)


def rows(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_records_are_flushed_before_a_checkpoint_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def appear(self: Path, target: Path) -> Path:
        flushed.append(f"-> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", appear)
    trainer(tmp_path, 3).fit()
    first = flushed[: flushed.index("-> step-00000002")]
    assert {"metrics.jsonl", "decisions.jsonl", tmp_path.name} <= {*first} | {"decisions.jsonl"}
    second = flushed[flushed.index("-> step-00000002") + 1 : flushed.index("-> step-00000003")]
    assert {"metrics.jsonl", "decisions.jsonl", tmp_path.name} <= {*second}


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


LOSSES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "gone": lambda path: path.unlink(),
    "cut in a line": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "zeros": zeros,
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_rows_that_a_power_cut_took_are_written_again(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    trainer(tmp_path / "whole", 7).fit()
    path = tmp_path / "run" / "metrics.jsonl"
    trainer(tmp_path / "run", 5).fit()
    before = path.read_text().splitlines()
    lose(path)
    run: Run = trainer(tmp_path / "run", 7).fit(resume="auto")
    assert rows(path) == rows(tmp_path / "whole" / "metrics.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()][: len(before)] == [json.loads(one) for one in before]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(rows(path))
    told = [decision.why for decision in run.decisions if decision.what == "records restored"]
    assert len(told) == (lose is not LOSSES["nothing"])


def test_rows_are_written_again_twice_from_the_same_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", 9).fit()
    trainer(tmp_path / "run", 5).fit()
    path = tmp_path / "run" / "metrics.jsonl"
    for steps in (7, 9):
        path.write_text("")
        trainer(tmp_path / "run", steps).fit(resume="auto")
    assert rows(path) == rows(tmp_path / "whole" / "metrics.jsonl")


def test_of_a_thinned_history_what_it_keeps_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History.__init__, "__defaults__", (8,))
    trainer(tmp_path, 20).fit()
    (tmp_path / "metrics.jsonl").write_text("")
    trainer(tmp_path, 21).fit(resume="auto")
    steps = [row["step"] for row in rows(tmp_path / "metrics.jsonl")]
    assert steps[0] == 1
    assert steps[-2:] == [20, 21]
    assert steps == sorted(steps)

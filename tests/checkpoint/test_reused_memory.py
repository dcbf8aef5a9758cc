"""Saves in the background copy to the memory of the save before, once it is written, and no checkpoint changes by that."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, StopOnNonFinite
from cadenza.checkpoint import attempts
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.errors import StateError
from cadenza.status.plain import same
from cadenza.testing import tiny_run
from tests.callbacks.test_checkpoint import Scripted, manifest, names
from tests.checkpoint.killed_in_save import trainer

Weights = dict[str, Tensor]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note, for each checkpoint that is about to be written, weak references to its tensors by name, and their addresses."""
    noted: list[dict[str, Any]] = []
    write = Store.write

    def noting(self: Store, content: Content) -> Saved:
        noted.append({name: (weakref.ref(one), one.data_ptr()) for name, one in {**content.model, **content.tensors}.items()})
        return write(self, content)

    monkeypatch.setattr(Store, "write", noting)
    return noted


def addresses(noted: dict[str, Any]) -> set[int]:
    return {address for _, address in noted.values()}


def noting_weights(weights: dict[int, Weights]) -> Callback:
    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        weights[run.progress.step] = {name: value.clone() for name, value in run.model.state_dict().items()}

    return note


def assert_as_they_were(folder: Path, weights: dict[int, Weights], *steps: int) -> None:
    store = Store(folder / "checkpoints")
    assert [saved.step for saved in store.saved()] == [*steps]
    assert all(same(store.read(saved).model, weights[saved.step]) for saved in store.saved())


class FullDisk(LocalFiles):
    """Files of tensors of which one, by its number, cannot be written."""

    def __init__(self, root: Path, fails_at: int) -> None:
        super().__init__(root)
        self.files, self.fails_at = 0, fails_at

    def write_tensors(self, path: str, *arguments: Any) -> Facts:
        self.files += 1
        if self.files == self.fails_at:
            raise OSError("the disk is full")
        return super().write_tensors(path, *arguments)


def full_at(saves: Checkpoint, fails_at: int) -> Callback:
    """Return a callback that lets one file of the checkpoints fail."""

    @on(Callback.on_fit_start)
    def fill(run: Run) -> None:
        saves.store.files = FullDisk(Path(str(saves.store.files)), fails_at)

    return fill


def test_each_save_has_the_memory_of_the_one_before_and_the_end_of_the_run_gives_it_back(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    weights: dict[int, Weights] = {}
    run = tiny_run(directory=tmp_path, steps=4, callbacks=[noting_weights(weights), Checkpoint("1 step", keep_last=None)])
    first, *others = map(addresses, written)
    assert len(others) == 3
    assert all(len(one & first) >= len(first) - 1 for one in others)  # the loader's and the generators' states may grow
    assert_as_they_were(tmp_path, weights, 1, 2, 3, 4)
    gc.collect()
    assert run.progress.step == 4
    assert not [name for noted in written for name, (one, _) in noted.items() if one() is not None]


def test_what_could_not_be_written_keeps_its_memory_until_a_newer_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (1e9,))
    monkeypatch.setattr(attempts, "LAST_PAUSES_S", (0.001,))
    weights: dict[int, Weights] = {}

    class Unsavable(Callback):
        broken = False

        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.ones(3), "object": object() if self.broken else None}

        def on_step_end(self, run: Run) -> None:
            self.broken = run.progress.step >= 6

    saves = Checkpoint("2 steps", keep_last=None)
    full = full_at(saves, 3)  # the first file of step 4
    with pytest.raises(StateError):  # the save of step 6 copies the weights, and then finds a state that it cannot save
        tiny_run(directory=tmp_path, steps=8, callbacks=[noting_weights(weights), Unsavable(), full, saves])
    assert not addresses(written[1]) - addresses(written[2])  # step 4 is written at the end, after a failure
    assert_as_they_were(tmp_path, weights, 2, 4)


def test_a_blocking_save_that_fails_is_repeated_with_the_weights_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (1e9,))
    monkeypatch.setattr(attempts, "LAST_PAUSES_S", (0.001,))
    weights: dict[int, Weights] = {}

    @on(Callback.on_step_end, at=3)
    def power_cut(run: Run) -> None:
        raise KeyboardInterrupt

    saves = Checkpoint("2 steps", background=False, on_exception=False)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(directory=tmp_path, steps=5, callbacks=[noting_weights(weights), full_at(saves, 1), power_cut, saves])
    assert_as_they_were(tmp_path, weights, 2)


def test_a_run_that_is_killed_in_a_save_goes_on_at_the_one_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killed_in_save", str(tmp_path / "killed")]
    assert subprocess.run(command, check=False, capture_output=True, timeout=300).returncode == -9
    newest, skipped = Store(tmp_path / "killed" / "checkpoints").latest()
    assert (newest and newest.step, skipped) == (2, [])
    continued, whole = trainer(tmp_path / "killed"), trainer(tmp_path / "whole")
    assert continued.fit(resume="auto").progress.origin.step == 2
    whole.fit()
    assert same(continued.model.state_dict(), whole.model.state_dict())
    assert not [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir() if path.name.startswith(".tmp")]


# -- whether the weights are finite ---------------------------------------------------------------------------


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the threads that read the weights."""
    threads: list[str] = []
    look = Content.is_finite

    def noting(self: Content) -> bool:
        if self.finite is None:
            threads.append(threading.current_thread().name)
        return look(self)

    monkeypatch.setattr(Content, "is_finite", noting)
    return threads


@pytest.mark.parametrize("background", [True, False])
def test_weights_that_are_not_finite_are_the_last_and_never_the_best(
    tmp_path: Path, looked: list[str], background: bool
) -> None:
    script = Scripted(acc=[0.1, 0.9, 0.5, 0.2, 0.95])
    script.poisoned_at = 5
    keep = Checkpoint("1 step", keep_last=2, keep_best=("eval/acc", "max"), background=background)
    tiny_run(directory=tmp_path, steps=5, callbacks=[script, keep])
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)] == [True, True, False]
    assert names(tmp_path) == ["02", "04", "05"]
    assert {link: (tmp_path / "checkpoints" / link).resolve().name[-2:] for link in ("last", "best")} == {
        "last": "05",
        "best": "02",
    }
    assert {*looked} == {"MainThread"}
    assert Store(tmp_path / "checkpoints").latest()[0] == Saved(5, 1, "step-00000005")  # a resume takes it, and says nothing


def test_without_a_result_the_thread_that_writes_reads_the_weights(tmp_path: Path, looked: list[str]) -> None:
    script = Scripted()
    script.poisoned_at = 2
    tiny_run(directory=tmp_path, steps=3, callbacks=[script, Checkpoint("1 step", keep_last=None)])
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)] == [True, False, True]
    assert looked == ["cadenza-checkpoint"] * 3


def test_a_run_that_stops_at_weights_that_are_not_finite_saves_them_flagged(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=3)
    def poison(run: Run) -> None:
        with torch.no_grad():
            next(run.model.parameters()).fill_(math.nan)

    callbacks = [poison, StopOnNonFinite(), Checkpoint("1 step", keep_last=None)]
    run = tiny_run(directory=tmp_path, steps=6, callbacks=callbacks)
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)][2:3] == [False]
    assert names(tmp_path)[:3] == ["01", "02", "03"]


# -- the checksum -------------------------------------------------------------------------------------------


def test_the_checksum_of_a_large_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {name: torch.randn(700_000) for name in "abc"}
    facts = LocalFiles(tmp_path).write_tensors("large", tensors)
    content = (tmp_path / "large").read_bytes()
    assert facts == {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    assert len(content) > 8 << 20


def test_a_checksum_that_fails_beside_the_write_is_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise MemoryError("no memory left")

    monkeypatch.setattr(zlib, "crc32", fail)
    with pytest.raises(MemoryError, match="no memory left"):
        LocalFiles(tmp_path).write_tensors("large", {"a": torch.zeros(2_000_000)})

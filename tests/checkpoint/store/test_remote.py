"""The same store behind fsspec: there a folder does not appear whole, and the manifest, written last, is what counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from cadenza import Trainer, load_weights
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.files import RemoteFiles
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.errors import CheckpointDamagedError, CheckpointError
from cadenza.files.disk import Unflushed
from cadenza.testing import tiny_model, tiny_trainer
from tests.checkpoint.store.contents import content, filled, step_in

URL = "memory://runs/a/checkpoints"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """Return an empty file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_a_store_in_memory_writes_lists_verifies_reads_and_prunes() -> None:
    store, saved = filled(URL, 1, 2, 10, 10)
    assert [one.name for one in store.saved()] == ["step-00000001", "step-00000002", "step-00000010", "step-00000010-2"]
    assert [step_in(store, one) for one in saved] == [1, 2, 10, 10]
    assert store.latest() == (saved[3], [])
    assert str(store.files) == URL
    assert store.prune([saved[1].name]) == ["step-00000001", "step-00000010"]
    assert [one.name for one in Store(URL).saved()] == ["step-00000002", "step-00000010-2"]
    assert Store("memory://nowhere").latest() == (None, [])


def test_nothing_of_another_run_is_pruned() -> None:
    filled(URL, 1, 2, run="another")
    store, _ = filled(URL, 3, 4)
    assert store.prune([]) == ["step-00000003"]


def test_one_without_a_manifest_is_not_finished_and_skipped(memory: Any) -> None:
    store, saved = filled(URL, 1, 2)
    memory.rm("/runs/a/checkpoints/step-00000002/manifest.json")
    newest, skipped = store.latest()
    assert newest == saved[0]
    assert skipped == ["step-00000002: it has no manifest.json: it is unfinished, or not a checkpoint of cadenza"]
    assert store.prune([]) == []


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_damage_is_found(memory: Any, name: str) -> None:
    store, [saved] = filled(URL, 1)
    path = f"/runs/a/checkpoints/step-00000001/{name}"
    whole = memory.cat_file(path)
    for wrong in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        memory.pipe_file(path, wrong)
        with pytest.raises(CheckpointDamagedError, match=name):
            store.read(saved)


class FullDisk(RemoteFiles):
    """A storage that takes `room` files."""

    room = 2

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> Facts:
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(path, content, later)


def test_a_write_that_fails_leaves_nothing(memory: Any) -> None:
    store, [saved] = filled(URL, 1)
    store.files = FullDisk(URL)
    with pytest.raises(OSError, match="No space left"):
        store.write(content(2))
    assert store.saved() == [saved]
    assert not [path for path in memory.find("/runs") if "step-00000002" in path]


def weights(trainer: Trainer) -> list[float]:
    return [float(parameter.detach()) for parameter in trainer.model.parameters()]


def test_a_run_saves_to_memory_and_continues_from_there_to_the_same_bits(tmp_path: Path) -> None:
    def trainer(steps: int, directory: Path | None) -> Trainer:
        saving = Checkpoint("2 steps", directory=URL, keep_last=2)
        return tiny_trainer(steps=steps, seed=1, directory=directory, callbacks=[saving], optimizer=adam)

    whole = trainer(12, None)
    whole.fit()
    fsspec.filesystem("memory").rm("/runs", recursive=True)
    cut = trainer(6, tmp_path / "cut")
    cut.fit()
    assert [saved.step for saved in Store(URL).saved()] == [4, 6]
    continued = trainer(12, tmp_path / "continued")
    run = continued.fit(resume=f"{URL}/step-00000006")
    assert run.why("resumed").endswith("at step-00000006")
    assert weights(continued) == weights(whole) != weights(cut)
    assert {saved.step for saved in Store(URL).saved()} == {4, 6, 10, 12}  # those of the other run are left alone

    model = tiny_model()
    load_weights(f"{URL}/step-00000012", model)
    assert [float(parameter.detach()) for parameter in model.parameters()] == weights(whole)
    load_weights(URL, model)
    assert [float(parameter.detach()) for parameter in model.parameters()] == weights(whole)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def test_a_name_that_is_not_there_is_an_error_with_those_that_are() -> None:
    filled(URL, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint at '.*step-00000009': expected one of \['step-00000001'\]"):
        tiny_trainer(steps=1).fit(resume=f"{URL}/step-00000009")

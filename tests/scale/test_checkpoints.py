"""What a checkpoint costs, counted: bytes that are read and gathered, files and their sizes, by number of ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Content, Loaded, Store
from cadenza.checkpoint.store.files import LocalFiles, RemoteFiles

FACTS = {"step": 1, "exact": True, "reason": "a test", "weights_only": False}
SIZE = 4 * 2**20


@dataclass
class Count:
    """Bytes that the system calls of this process have read and written."""

    read: int = 0
    written: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    def now() -> tuple[int, int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        values = dict(line.split(": ") for line in lines)
        return int(values["rchar"]), int(values["wchar"])

    count, before = Count(), now()
    yield count
    after = now()
    count.read, count.written = after[0] - before[0], after[1] - before[1]


def content() -> Content:
    """Return 8 MiB: a model, and a state that is as large."""
    state = {"optimizers": [{"state": {0: {"exp_avg": torch.rand(SIZE // 4)}}}]}
    return Content.of({"w": torch.rand(SIZE // 4)}, state, FACTS)


def test_a_save_reads_nothing_and_a_read_that_verifies_reads_each_byte_once(tmp_path: Path) -> None:
    store = Store(tmp_path, "r1")
    store.read(store.write(content()))  # imports what is needed
    one = content()
    with counted() as save:
        saved = store.write(one)
    assert save.read < 10_000
    assert save.written < 1.001 * 2 * SIZE
    with counted() as resume:
        store.read(saved)
    assert resume.read < 1.001 * 2 * SIZE


def test_a_save_to_object_storage_downloads_nothing_and_a_read_downloads_each_file_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    downloaded: list[int] = []

    def counting(self: RemoteFiles, path: str) -> bytes:
        found = read(self, path)
        downloaded.append(len(found))
        return found

    read = RemoteFiles.read
    monkeypatch.setattr(RemoteFiles, "read", counting)
    store = Store("memory://scale", "r1")
    saved = store.write(content())
    assert sum(downloaded) < 1000  # the manifest, to order the checkpoints
    downloaded.clear()
    store.read(saved)
    assert sum(downloaded) < 1.001 * 2 * SIZE


def trainer(directory: Path, steps: int) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.rand(2, 512), torch.rand(2, 512)) for _ in range(4)]
    return Trainer(
        nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        data,
        supervised(nn.MSELoss()),
        max_steps=steps,
        directory=directory,
        callbacks=[Checkpoint("1 step", keep_last=2, background=False)],
        progress=False,
    )


def test_a_run_that_resumes_reads_its_checkpoint_once_and_its_saves_and_prunes_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, 2).fit()
    files = (tmp_path / "checkpoints/step-00000002").iterdir()
    size = sum(path.stat().st_size for path in files)
    assert size > 12 * 2**20
    opened: list[str] = []

    def noting(self: LocalFiles, path: str) -> Any:
        opened.append(path)
        return opening(self, path)

    opening = LocalFiles.open
    monkeypatch.setattr(LocalFiles, "open", noting)
    with counted() as count:
        trainer(tmp_path, 6).fit(resume="auto")
    assert sorted(opened) == [f"step-00000002/{name}.safetensors" for name in ("model", "state")]
    assert size < count.read < 1.1 * size
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


def test_the_content_of_the_checkpoint_is_not_kept_during_the_training(tmp_path: Path) -> None:
    trainer(tmp_path, 2).fit()
    one, found = trainer(tmp_path, 3), list[int]()

    @on(Callback.on_step_end)
    def count(run: Run) -> None:
        found.append(sum(type(item) is Loaded for item in gc.get_objects()))

    one.callbacks.append(count)
    one.fit(resume="auto")
    assert found == [0]


def test_nothing_is_pruned_that_may_be_the_only_whole_checkpoint(tmp_path: Path) -> None:
    """A later process has not written what it finds: it reads the newest once before it deletes older ones."""
    store = Store(tmp_path, "r1")
    saved = [store.write(Content.of({"w": torch.ones(3)}, {}, {**FACTS, "step": step})) for step in (1, 2, 3)]
    path = tmp_path / saved[2].name / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert Store(tmp_path, "r1").prune([]) == ["step-00000001", "step-00000003"]


def test_a_tensor_is_copied_once_also_if_its_numbers_are_not_in_order() -> None:
    from cadenza.status.plain import host_copy

    turned: Tensor = torch.rand(512, 1024).t()
    with torch.profiler.profile(profile_memory=True) as profile:
        copy = host_copy(turned)
    taken = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert turned.nbytes <= taken < 1.05 * turned.nbytes
    assert copy.is_contiguous()
    assert torch.equal(copy, turned)

"""What a checkpoint costs, counted: bytes that are read, sent and gathered, files and their sizes, by number of ranks."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Content, Loaded, Saved, Store
from cadenza.checkpoint.store.content import Part, write_part, write_whole
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.shards import Shard, Stored, layout_of, part_file
from cadenza.drivers import Driver
from cadenza.drivers.consensus import ALONE, Meeting
from cadenza.drivers.group import GroupDriver
from cadenza.drivers.sharding import chunk_of
from cadenza.errors import CheckpointError, DistributedError, StateError
from cadenza.files.disk import Unflushed
from cadenza.loading.rng import RNGState
from cadenza.parallel.remote_files import RemoteFiles
from cadenza.status.encoding import encode, host_copy
from cadenza.testing import launch
from tests.distributed.drivers import ddp, fsdp, single
from tests.distributed.parts import adamw, flip_last_byte

TENSORS, FACTS = 300, {"step": 1, "exact": True, "reason": "a test", "weights_only": False, "finite": True}
STREAMS = RNGState.capture().to_plain()
ABSENT = {"size": 10**9, "crc32": "0123abcd"}
"""The facts of a file that was not written here."""


def part_of(rank: int, ranks: int) -> Content:
    """Return what a rank saves of a model of 300 tensors with 3 rows for each rank: its shards, and its own state."""
    rows = chunk_of(3 * ranks, rank, ranks)
    shard = Shard(torch.full((3, 2), float(rank)), (3 * ranks, 2), (rows.start, 0))
    shards = {f"layers.{number}.weight": shard for number in range(TENSORS)}
    own = None if rank == 0 else encode({"rank": rank, "streams": STREAMS, "loader": {}})
    return Content({**shards}, {"rank": 0}, {**shards}, dict(FACTS), own)


class Written(NamedTuple):
    store: Store
    saved: Saved
    told: list[int]
    """The size of the messages of the ranks to the main process, in bytes."""


def written(folder: Path, ranks: int, real: tuple[int, ...]) -> Written:
    """Write the checkpoint of many ranks, of which the main process and those in `real` write their files."""
    store, told, messages = Store(folder), list[int](), list[Any]()

    def broadcast(message: Any) -> Any:
        messages.append(message)
        return message

    def gather(value: Any) -> list[Any]:
        (name, _), _ = messages[0]
        layout = layout_of(part_of(0, ranks).model, part_of(0, ranks).tensors)
        parts = {}
        for rank in real:
            content = part_of(rank, ranks)
            assert layout_of(content.model, content.tensors) == layout
            parts[rank] = write_part(store.files, name, content, Meeting(rank, ranks, gather, broadcast), {})
            told.append(len(pickle.dumps((parts[rank], None))))
        other = Part(dict.fromkeys(("model", "state", "rank"), ABSENT), True, {})
        return [value, *((parts.get(rank, other), None) for rank in range(1, ranks))]

    saved = store.write_together(part_of(0, ranks), Meeting(0, ranks, gather, broadcast))
    assert len(messages) == 2
    return Written(store, saved, told)


MANY = [1024, pytest.param(4096, marks=pytest.mark.long)]


@pytest.mark.parametrize("ranks", [2, *MANY])
def test_a_rank_sends_a_few_bytes_to_the_main_process_and_the_layout_does_not_grow_with_the_ranks(
    tmp_path: Path, ranks: int
) -> None:
    store, saved, told = written(tmp_path, ranks, real=(1, ranks - 1))
    assert max(told) < 400
    size = {path.name: path.stat().st_size for path in (tmp_path / saved.name).iterdir()}
    assert size["manifest.json"] < 2000
    assert size["shards.json"] < 2 * TENSORS * 100
    assert size["parts.json"] < 100 + 3 * 28 * ranks
    assert store.manifest(saved)["ranks"] == ranks


def opened_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the files that this process opens in stores."""
    opened: list[str] = []

    def opening(self: LocalFiles, path: str) -> Any:
        opened.append(path.split("/")[-1])
        return opens(self, path)

    def reading(self: LocalFiles, path: str) -> bytes:
        opened.append(path.split("/")[-1])
        return reads(self, path)

    opens, reads = LocalFiles.open, LocalFiles.read
    monkeypatch.setattr(LocalFiles, "open", opening)
    monkeypatch.setattr(LocalFiles, "read", reading)
    return opened


COMMON = ["manifest.json", "model.safetensors", "parts.json", "shards.json", "state.json", "state.safetensors"]


@pytest.mark.parametrize("ranks", MANY)
def test_on_as_many_ranks_a_rank_reads_and_verifies_its_own_files_once_and_those_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    store, saved, _ = written(tmp_path, ranks, real=(700,))
    opened = opened_in(monkeypatch)
    loaded = store.read(saved, lazily=True, rank=700, ranks=ranks)
    region = (chunk_of(3 * ranks, 700, ranks), slice(0, 2))
    for tensor in (*loaded.model.values(),):
        assert isinstance(tensor, Stored)
        assert torch.equal(tensor.read(region), torch.full((3, 2), 700.0))
    assert loaded.by_rank[700]["rank"] == 700
    assert sorted(opened) == sorted([*COMMON, *(part_file(kind, 700, ranks) for kind in ("model", "state", "rank"))])


def test_on_another_number_of_ranks_each_verifies_a_part_of_the_files_and_reads_the_rows_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, saved, _ = written(tmp_path, 8, real=tuple(range(1, 8)))
    opened = opened_in(monkeypatch)
    everything = []
    for rank in range(3):
        opened.clear()
        loaded = store.read(saved, lazily=True, rank=rank, ranks=3)
        region = (chunk_of(24, rank, 3), slice(0, 2))
        values = loaded.model["layers.0.weight"].read(region)
        assert values[:, 0].tolist() == [float(row // 3) for row in range(24)][region[0]]
        assert loaded.by_rank[rank]["rank"] == rank
        everything += [name for name in opened if name.startswith(("model-", "state-"))]
    assert sorted(everything) == sorted(part_file(kind, rank, 8) for kind in ("model", "state") for rank in range(8))


def test_a_changed_or_missing_file_of_a_rank_is_found_by_the_rank_that_reads_it_and_by_verify(tmp_path: Path) -> None:
    store, saved, _ = written(tmp_path, 3, real=(1, 2))
    assert store.verify(saved)["ranks"] == 3
    for kind in ("model", "state", "rank"):
        path = tmp_path / saved.name / part_file(kind, 2, 3)
        flip_last_byte(path)
        for act in (lambda: store.verify(saved), lambda: store.read(saved, lazily=True, rank=2, ranks=3)):
            with pytest.raises(CheckpointError, match=f"{path.name} has changed since it was written"):
                act()
        store.read(saved, lazily=True, rank=0, ranks=3)
        flip_last_byte(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        store.verify(saved)


def test_a_machine_without_the_folder_sends_its_own_state_and_the_main_process_writes_it(tmp_path: Path) -> None:
    here, there = LocalFiles(tmp_path / "here"), LocalFiles(tmp_path / "there")
    here.make("step")
    content = Content({}, {}, {}, dict(FACTS), own=({"rank": 1}, {"rng": torch.zeros(8)}))
    part = write_part(there, "step", content, Meeting(1, 2, list, list), {})
    assert part.files == {}
    main = write_part(here, "step", Content({}, {}, {}, dict(FACTS)), ALONE, {})
    with Unflushed() as later:
        write_whole(here, "step", Content({}, {"rank": 0}, {}, dict(FACTS)), {"model": {}, "state": {}}, [main, part], later)
    assert (tmp_path / "here/step/rank-00002-of-00002.safetensors").read_bytes() == part.carried


def test_a_rank_with_another_tensor_adds_it_and_one_with_another_layout_is_an_error(tmp_path: Path) -> None:
    here = LocalFiles(tmp_path)
    here.make("step")
    empty = Content({}, {}, {}, dict(FACTS))

    def index(shape: tuple[int, ...]) -> Any:
        layouts = [layout_of({"w": Shard(torch.ones(2), size, (0,))}, {}) for size in ((4,), shape)]
        layouts[1]["model"]["more"] = layouts[1]["model"]["w"]
        with Unflushed() as later:
            write_whole(here, "step", empty, layouts[0], [Part({}, True, {}), Part({}, True, layouts[1])], later)
        return json.loads((tmp_path / "step/shards.json").read_text())["model"]

    assert index((4,)) == {name: {"shape": [4], "dtype": "float32", "split": 0} for name in ("w", "more")}
    with pytest.raises(StateError, match="'w' has the layout"):
        index((6,))


def test_a_rank_copies_what_it_writes_and_no_tensor_that_the_main_process_writes() -> None:
    model, state = {"w": torch.ones(4)}, {"moments": [torch.ones(4)]}
    content = Content.of(model, state, FACTS, own={"rng": torch.ones(2)}, whole=False)
    assert (content.model, content.tensors, content.nbytes) == ({}, {}, 0)
    assert content.own is not None
    assert list(content.own[1]) == ["rng"]


# -- bytes ---------------------------------------------------------------------------------------------------

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


# -- real runs -------------------------------------------------------------------------------------------------


def trainer(
    driver: Callable[[], Driver],
    steps: int,
    directory: Path | None = None,
    *,
    width: int = 256,
    folder: str | None = None,
    **saving: Any,
) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.rand(2, width), torch.rand(2, width)) for _ in range(8)]
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
    callbacks = [Checkpoint("1 step", directory=folder, **saving)]
    arguments: dict[str, Any] = {"max_steps": steps, "directory": directory, "callbacks": callbacks, "progress": False}
    return Trainer(model, adamw, data, supervised(nn.MSELoss()), driver=driver(), **arguments)


def test_a_run_that_resumes_reads_its_checkpoint_once_and_its_saves_and_prunes_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = partial(trainer, single, directory=tmp_path, width=512, keep_last=2, background=False)
    large(2).fit()
    files = (tmp_path / "checkpoints/step-00000002").iterdir()
    size = sum(path.stat().st_size for path in files)
    assert size > 12 * 2**20
    opened = opened_in(monkeypatch)
    with counted() as count:
        large(6).fit(resume="auto")
    assert sorted(name for name in opened if name.endswith(".safetensors")) == ["model.safetensors", "state.safetensors"]
    assert size < count.read < 1.1 * size
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


def test_the_content_of_the_checkpoint_is_not_kept_during_the_training(tmp_path: Path) -> None:
    trainer(single, 2, tmp_path).fit()
    one, found = trainer(single, 3, tmp_path), list[int]()
    count = on(Callback.on_step_end)(lambda run: found.append(sum(type(item) is Loaded for item in gc.get_objects())))
    one.callbacks.append(count)
    one.fit(resume="auto")
    assert found == [0]


def test_a_tensor_is_copied_once_also_if_its_numbers_are_not_in_order() -> None:
    turned: Tensor = torch.rand(512, 1024).t()
    with torch.profiler.profile(profile_memory=True) as profile:
        copy = host_copy(turned)
    taken = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert turned.nbytes <= taken < 1.05 * turned.nbytes
    assert copy.is_contiguous()
    assert torch.equal(copy, turned)


@pytest.mark.parametrize(("driver", "kinds"), [(ddp, ["rank"]), (fsdp, ["model", "state", "rank"])])
def test_each_rank_writes_and_reads_its_own_files_and_no_state_travels(
    tmp_path: Path, driver: Callable[[], Driver], kinds: list[str]
) -> None:
    def resumed() -> tuple[list[str], int]:
        trainer(driver, 2, tmp_path, background=False).fit()
        sizes: list[int] = []

        def sending(name: str) -> None:
            send = getattr(GroupDriver, name)

            def counting(self: GroupDriver, value: Any, *where: Any, **named: Any) -> Any:
                sizes.append(len(pickle.dumps(value)))
                return send(self, value, *where, **named)

            setattr(GroupDriver, name, counting)

        for name in ("broadcast", "gather", "gather_on_main"):
            sending(name)
        with pytest.MonkeyPatch.context() as patch:
            opened = opened_in(patch)
            trainer(driver, 3, tmp_path).fit(resume="auto")
        return opened, max(sizes)

    ranks = launch(resumed)
    folder = tmp_path / "checkpoints/step-00000002"
    there = {part_file(kind, rank, 2) for kind in kinds for rank in range(2)} - {part_file("rank", 0, 2)}
    assert {path.name for path in folder.iterdir()} == {*COMMON, *there}
    for rank, (opened, largest) in enumerate(ranks):
        own = [name for name in opened if "-of-" in name]
        assert sorted(own) == sorted(part_file(kind, rank, 2) for kind in kinds if rank or kind != "rank")
        assert opened.count("state.safetensors") == opened.count("model.safetensors") == 1
        assert largest < 20_000


def test_a_machine_that_does_not_see_the_checkpoint_is_named_and_no_rank_waits() -> None:
    def resumed() -> str:
        url = "memory://unseen"  # each process has a memory of its own, as machines have disks of their own
        one = trainer(ddp, 2, folder=url)
        one.fit()
        assert (
            fsspec.filesystem("memory").exists("/unseen/step-00000002/rank-00002-of-00002.safetensors")
            is not one.driver.is_main
        )
        with pytest.raises((CheckpointError, DistributedError)) as raised:
            one.fit(resume=f"{url}/step-00000002")
        return str(raised.value)

    main, other = launch(resumed)
    assert main.startswith("rank 1 cannot read step-00000002: LookupError: on ")
    assert "Put it on a file system that they share" in main
    assert main in other

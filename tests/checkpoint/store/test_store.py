"""Checkpoints on disk: listed, verified, pruned, and found out when they are damaged."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import load_weights
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Content, Store
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError
from cadenza.testing import tiny_trainer
from tests.checkpoint.store.contents import content, filled, step_in

FILES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


# -- names, order, retention --------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store, [saved] = filled(tmp_path / "new" / "checkpoints", 7)
    assert saved.name == "step-00000007"
    assert step_in(store, saved) == 7
    manifest = store.verify(saved)
    assert {key: manifest[key] for key in ("format", "run", "step", "exact", "finite", "reason")} == {
        "format": 1,
        "run": "r1",
        "step": 7,
        "exact": True,
        "finite": True,
        "reason": "a test",
    }
    assert sorted(manifest["files"]) == sorted(FILES[:3])


def test_restored_state_is_aligned_as_torch_aligns_new_tensors(tmp_path: Path) -> None:
    state = {f"bias {number}": torch.rand(3) for number in range(20)}  # in a file, these are 12 bytes apart
    for location in (tmp_path, f"file://{tmp_path}/remote"):
        store = Store(location, "r1")
        restored = store.read(store.write(Content.of({}, state, {"step": 1, "reason": "a test", "exact": True}))).state
        assert all(torch.equal(restored[name], value) for name, value in state.items())
        assert {value.data_ptr() % 64 for value in restored.values()} == {0}


def test_the_order_is_by_step_also_when_the_clock_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, "r1")
    for step, clock in [(2, 3e9), (10, 2e9), (1, 4e9)]:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda clock=clock: clock)
            saved = store.write(content(step))
        os.utime(tmp_path / saved.name, (clock, clock))
    assert [saved.step for saved in store.saved()] == [1, 2, 10]
    newest, _ = store.latest()
    assert newest is not None
    assert newest.step == 10
    assert store.prune(["step-00000002"]) == ["step-00000001"]


def test_more_than_eight_digits_are_ordered_as_numbers(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, 99_999_999, 100_000_000)
    assert [saved.step for saved in store.saved()] == [99_999_999, 100_000_000]


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 3, 3, 3)
    assert [one.name for one in saved] == ["step-00000003", "step-00000003-2", "step-00000003-3"]
    shutil.rmtree(tmp_path / "step-00000003-2")
    assert store.next_name(3).name == "step-00000003-4"
    newest, _ = store.latest()
    assert newest == saved[2]


def test_the_newest_that_verifies_is_found_and_the_newer_ones_named_with_the_reason(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 1, 2, 3, 4)
    store.write(content(5, exact=False, reason="an error: ValueError()"))
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / saved[3].name / "state.json").unlink()
    cut = tmp_path / saved[2].name / "model.safetensors"
    size = cut.stat().st_size
    os.truncate(cut, 20)
    newest, skipped = store.latest()
    assert newest == saved[1]
    assert skipped == [
        "step-00000006: it has no manifest.json: it is unfinished, or not a checkpoint of cadenza",
        "step-00000005: written in the middle of a step (an error: ValueError())",
        "step-00000004: state.json is missing",
        f"step-00000003: model.safetensors has 20 bytes instead of {size}",
    ]
    inexact, _ = store.latest(exact=False)
    assert inexact is not None
    assert inexact.step == 5


def test_none_is_found_where_there_is_none(tmp_path: Path) -> None:
    assert Store(tmp_path / "nowhere").latest() == (None, [])
    assert Store(tmp_path).saved() == []


def test_prune_keeps_the_given_names_and_the_newest_that_verifies(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 1, 2, 3, 4)
    os.truncate(tmp_path / saved[3].name / "state.json", 3)
    assert store.prune([saved[0].name]) == ["step-00000002", "step-00000004"]
    assert store.prune([]) == ["step-00000001"]
    assert store.prune([]) == []
    assert step_in(store, saved[2]) == 3


def test_prune_deletes_only_what_this_run_wrote(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, 5, 6, run="r1")
    filled(tmp_path, 1, 2, run="another")
    for foreign in ("step-00000003", "epoch=3", "lightning_logs", "step-4"):
        (tmp_path / foreign).mkdir()
        (tmp_path / foreign / "weights.bin").write_bytes(b"precious")
    (tmp_path / "step-00000004").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    assert store.prune([]) == ["step-00000005"]
    assert before - {path.name for path in tmp_path.iterdir()} == {"step-00000005"}


def test_sweeping_removes_what_a_killed_writer_of_this_run_left_and_nothing_else(tmp_path: Path) -> None:
    store, [saved] = filled(tmp_path, 1)
    for name in (".tmp-step-00000002-r1-0123abcd", ".trash-step-00000001-2-r1-0123abcd", ".tmp-step-00000002-r2-0123abcd",
                 ".tmp-mine", "step-00000003"):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert [one.step for one in store.saved()] == [1, 3]
    store.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {
        saved.name, ".tmp-step-00000002-r2-0123abcd", ".tmp-mine", "step-00000003"
    }  # fmt: skip


def test_a_write_that_fails_leaves_nothing_behind_and_the_error_is_its_own(tmp_path: Path) -> None:
    store, [saved] = filled(tmp_path, 1)
    wrong = content(2)
    wrong.plain["bad"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write(wrong)
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """150 random bits of each of the four files: 600 flips."""
    store, [saved] = filled(tmp_path, 1)
    path, dice = tmp_path / saved.name / name, random.Random(name)
    whole = path.read_bytes()
    for bit in dice.sample(range(8 * len(whole)), 150):
        wrong = bytearray(whole)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        with pytest.raises((CheckpointDamagedError, CheckpointFormatError), match=rf"^{saved.name}: .*{name}|format"):
            store.verify(saved)
        assert store.latest()[0] is None
    path.write_bytes(whole)
    assert step_in(store, saved) == 1


def make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "zero tail", "hole", "longer", "missing", "a folder", "swapped"])
def test_every_other_damage_is_found_and_the_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    store, [older, saved] = filled(tmp_path, 1, 2)
    path = tmp_path / saved.name / name
    whole = path.read_bytes()
    half = len(whole) // 2
    damages: dict[str, Callable[[], object]] = {
        "cut": lambda: path.write_bytes(whole[:-1]),
        "empty": lambda: path.write_bytes(b""),
        "zero tail": lambda: path.write_bytes(whole[:half] + bytes(len(whole) - half)),
        "hole": lambda: path.write_bytes(whole[:8] + bytes(half) + whole[8 + half :]),
        "longer": lambda: path.write_bytes(whole + b"\0"),
        "missing": path.unlink,
        "a folder": lambda: make_folder_of(path),
        "swapped": lambda: shutil.copy(tmp_path / older.name / name, path),
    }
    damages[damage]()
    with pytest.raises(CheckpointError, match=rf"^{saved.name}: .*{name}"):
        store.read(saved)
    newest, skipped = store.latest()
    assert newest == older
    assert len(skipped) == 1


def test_files_under_each_others_names_are_found(tmp_path: Path) -> None:
    store, [saved] = filled(tmp_path, 1)
    folder = tmp_path / saved.name
    (folder / "model.safetensors").rename(folder / "x")
    (folder / "state.safetensors").rename(folder / "model.safetensors")
    (folder / "x").rename(folder / "state.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors has"):
        store.verify(saved)


def test_a_checkpoint_under_the_name_of_another_step_is_found(tmp_path: Path) -> None:
    store, [one, two] = filled(tmp_path, 1, 2)
    (tmp_path / one.name).rename(tmp_path / "step-00000009")
    newest, skipped = store.latest()
    assert newest == two
    assert skipped == ["step-00000009: manifest.json belongs to step 1"]


def test_the_manifest_of_another_step_is_found(tmp_path: Path) -> None:
    store, [one, two] = filled(tmp_path, 1, 2)
    shutil.copy(tmp_path / one.name / "manifest.json", tmp_path / two.name / "manifest.json")
    with pytest.raises(CheckpointDamagedError, match=f"^{two.name}: manifest.json belongs to step 1"):
        store.verify(two)


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Change the manifest so that its checksum, and the files' sizes and checksums, fit again: what an attacker can do."""
    path = folder / "manifest.json"
    manifest = {key: part for key, part in json.loads(path.read_bytes()).items() if key != "crc32"} | changes
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    body = json.dumps(manifest, indent=1)
    path.write_text(json.dumps({**manifest, "crc32": f"{zlib.crc32(body.encode()):08x}"}, indent=1))


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    store, [one, two] = filled(tmp_path, 1, 2)
    rewrite_manifest(tmp_path / two.name)
    assert step_in(store, two) == 2
    rewrite_manifest(tmp_path / two.name, format=7)
    with pytest.raises(CheckpointFormatError, match=r"it has format 7, and this version reads up to 3\. Update cadenza\."):
        store.verify(two)
    assert store.latest()[0] == one


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b'{"format": 1}', b"null", b'{"format": "x"}', b"[" * 100_000, b"\xff\xfe"])
def test_a_manifest_of_another_program_is_skipped(tmp_path: Path, manifest: bytes) -> None:
    store, [one] = filled(tmp_path, 1)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "manifest.json").write_bytes(manifest)
    newest, skipped = store.latest()
    assert newest == one
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000005: ")
    assert store.prune([]) == []


# -- nothing in a checkpoint runs ---------------------------------------------------------------------


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def bombs(mark: Path, folder: Path) -> dict[str, bytes]:
    """Return malicious content in the forms that other libraries load."""
    torch.save({"weight": Bomb(mark)}, folder / "bomb.pt")
    torch.save({"weight": Bomb(mark)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    pickled = [pickle.dumps(Bomb(mark), protocol=protocol) for protocol in (0, 2, 5)]
    files = [(folder / name).read_bytes() for name in ("bomb.pt", "old.pt")]
    return {f"form {number}": content for number, content in enumerate([*pickled, *files])}


def test_the_bombs_are_real(tmp_path: Path) -> None:
    for number, bomb in enumerate(bombs(tmp_path / "mark", tmp_path).values()):
        (tmp_path / "mark").unlink(missing_ok=True)
        (tmp_path / "bomb").write_bytes(bomb)
        torch.load(tmp_path / "bomb", weights_only=False) if number > 2 else pickle.loads(bomb)
        assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_any_file_is_refused_and_never_runs(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"

    def trainer() -> Any:
        return tiny_trainer(directory=tmp_path / "run", callbacks=[Checkpoint("2 steps", background=False)], steps=2, seed=1)

    trainer().fit()
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    for bomb in bombs(mark, tmp_path).values():
        (folder / name).write_bytes(bomb)
        if name != "manifest.json":
            rewrite_manifest(folder)
        for load in (
            lambda: Store(folder.parent).read(Store(folder.parent).saved()[0]),
            lambda: trainer().fit(resume="auto"),
            lambda: trainer().fit(resume=folder),
            lambda: load_weights(folder, torch.nn.Linear(1, 1)),
        ):
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                load()
        assert not mark.exists()


@pytest.mark.parametrize("state", ['{"$tuple": 5}', '{"$dict": [1]}', '{"$bytes": 7}', '{"$float": []}', "[" * 100_000, "x"])
def test_a_state_that_is_nonsense_is_refused_as_such(tmp_path: Path, state: str) -> None:
    store, [saved] = filled(tmp_path, 1)
    (tmp_path / saved.name / "state.json").write_text(state)
    rewrite_manifest(tmp_path / saved.name)
    with pytest.raises(CheckpointFormatError, match=r"state\.json does not have the format that cadenza writes"):
        store.read(saved)

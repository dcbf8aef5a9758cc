"""Checkpoints on disk and behind fsspec: listed, verified, pruned, linked, and found out when they are damaged."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from cadenza import Trainer, load_weights
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.catalogue import checkpoint_at
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.files import Facts
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError
from cadenza.files.disk import Unflushed
from cadenza.parallel.remote_files import RemoteFiles
from cadenza.status.encoding import same
from cadenza.testing import tiny_model, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import Scripted, names
from tests.checkpoint.store.contents import Bomb, content, filled, latest, prune, step_in

FILES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


# -- names, order, retention --------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store, [saved] = filled(tmp_path / "new" / "checkpoints", 7)
    assert saved.name == "step-00000007"
    assert step_in(store, saved) == 7
    manifest = store.verify(saved)
    expected = {"format": 1, "run": "r1", "step": 7, "exact": True, "finite": True, "reason": "a test"}
    assert {key: manifest[key] for key in expected} == expected
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
    assert latest(store) == (Saved(10, 1, "step-00000010"), [])
    assert prune(store, ["step-00000002"]) == ["step-00000001"]
    large, _ = filled(tmp_path / "large", 99_999_999, 100_000_000)  # nine digits, ordered as numbers
    assert [saved.step for saved in large.saved()] == [99_999_999, 100_000_000]


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 3, 3, 3)
    assert [one.name for one in saved] == ["step-00000003", "step-00000003-2", "step-00000003-3"]
    shutil.rmtree(tmp_path / "step-00000003-2")
    assert store.next_name(3).name == "step-00000003-4"
    assert latest(store)[0] == saved[2]


def test_the_newest_that_verifies_is_found_and_the_newer_ones_named_with_the_reason(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 1, 2, 3, 4)
    store.write(content(5, exact=False, reason="an error: ValueError()"))
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / saved[3].name / "state.json").unlink()
    cut = tmp_path / saved[2].name / "model.safetensors"
    size = cut.stat().st_size
    os.truncate(cut, 20)
    newest, skipped = latest(store)
    assert newest == saved[1]
    assert skipped == [
        "step-00000006: it has no manifest.json: it is unfinished, or not a checkpoint of cadenza",
        "step-00000005: written in the middle of a step (an error: ValueError())",
        "step-00000004: state.json is missing",
        f"step-00000003: model.safetensors has 20 bytes instead of {size}",
    ]
    assert latest(store, exact=False)[0] == Saved(5, 1, "step-00000005")


def test_prune_keeps_the_given_names_the_newest_that_verifies_and_what_another_run_wrote(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 1, 2, 3, 4)
    os.truncate(tmp_path / saved[3].name / "state.json", 3)
    assert prune(store, [saved[0].name]) == ["step-00000002", "step-00000004"]
    assert prune(store, []) == ["step-00000001"]
    assert prune(store, []) == []
    assert step_in(store, saved[2]) == 3

    folder = tmp_path / "shared"
    store, _ = filled(folder, 5, 6, run="r1")
    filled(folder, 1, 2, run="another")
    for foreign in ("step-00000003", "epoch=3", "lightning_logs", "step-4"):
        (folder / foreign).mkdir()
        (folder / foreign / "weights.bin").write_bytes(b"precious")
    (folder / "step-00000004").write_text("a file")
    before = {path.name for path in folder.iterdir()}
    assert prune(store, []) == ["step-00000005"]
    assert before - {path.name for path in folder.iterdir()} == {"step-00000005"}


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
        assert latest(store)[0] is None
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
    newest, skipped = latest(store)
    assert newest == older
    assert len(skipped) == 1


def test_files_and_folders_that_have_the_names_of_others_are_found(tmp_path: Path) -> None:
    store, [one, two, three] = filled(tmp_path, 1, 2, 3)
    shutil.copy(tmp_path / one.name / "manifest.json", tmp_path / three.name / "manifest.json")
    with pytest.raises(CheckpointDamagedError, match=f"^{three.name}: manifest.json belongs to step 1"):
        store.verify(three)
    (tmp_path / three.name).rename(tmp_path / "step-00000009")
    assert latest(store) == (two, ["step-00000009: manifest.json belongs to step 1"])
    model, state = tmp_path / one.name / "model.safetensors", tmp_path / one.name / "state.safetensors"
    model.rename(tmp_path / "model")
    state.rename(model)
    (tmp_path / "model").rename(state)
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors has"):
        store.verify(one)


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
    with pytest.raises(CheckpointFormatError, match=r"it has format 7, and this version reads 1 and 3\. Use the version"):
        store.verify(two)
    assert latest(store)[0] == one


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b'{"format": 1}', b"null", b'{"format": "x"}', b"[" * 100_000, b"\xff\xfe"])
def test_a_manifest_of_another_program_is_skipped(tmp_path: Path, manifest: bytes) -> None:
    store, [one] = filled(tmp_path, 1)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "manifest.json").write_bytes(manifest)
    newest, skipped = latest(store)
    assert newest == one
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000005: ")
    assert prune(store, []) == []


# -- nothing in a checkpoint runs ---------------------------------------------------------------------


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


# -- behind fsspec --------------------------------------------------------------------------------------

URL = "memory://runs/a/checkpoints"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """Return an empty file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_a_store_in_memory_writes_lists_verifies_reads_and_prunes_its_own(tmp_path: Path, memory: Any) -> None:
    store, saved = filled(URL, 1, 2, 10, 10)
    assert [one.name for one in store.saved()] == ["step-00000001", "step-00000002", "step-00000010", "step-00000010-2"]
    assert [step_in(store, one) for one in saved] == [1, 2, 10, 10]
    assert latest(store) == (saved[3], [])
    assert str(store.files) == URL
    assert prune(store, [saved[1].name]) == ["step-00000001", "step-00000010"]
    assert [one.name for one in Store(URL).saved()] == ["step-00000002", "step-00000010-2"]
    for nowhere in ("memory://nowhere", tmp_path / "nowhere"):
        assert (latest(Store(nowhere)), Store(nowhere).saved()) == ((None, []), [])
    assert Store(tmp_path).saved() == []

    filled(f"{URL}/shared", 1, 2, run="another")
    shared, _ = filled(f"{URL}/shared", 3, 4)
    assert prune(shared, []) == ["step-00000003"]
    other, two = filled(f"{URL}/other", 1, 2)
    memory.rm("/runs/a/checkpoints/other/step-00000002/manifest.json")
    reason = "step-00000002: it has no manifest.json: it is unfinished, or not a checkpoint of cadenza"
    assert latest(other) == (two[0], [reason])
    assert prune(other, []) == []


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
        saving, adam = Checkpoint("2 steps", directory=URL, keep_last=2), partial(torch.optim.Adam, lr=0.1)
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


def test_a_name_that_is_not_there_is_an_error_with_those_that_are() -> None:
    filled(URL, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint at '.*step-00000009': expected one of \['step-00000001'\]"):
        tiny_trainer(steps=1).fit(resume=f"{URL}/step-00000009")


# -- links ----------------------------------------------------------------------------------------------


def place(tmp_path: Path, scheme: str) -> str:
    return f"{scheme}://{tmp_path}/saved" if scheme else str(tmp_path / "saved")


@pytest.mark.parametrize("scheme", ["", "file", "memory"])
def test_a_link_is_set_and_moved_and_is_an_error_if_its_checkpoint_is_gone_until_the_next_save_deletes_it(
    tmp_path: Path, scheme: str
) -> None:
    store, saved = filled(place(tmp_path, scheme), 2, 4)
    store.set_links({"last": "step-00000002", "best": "step-00000002"})
    store.set_links({"last": "step-00000004", "best-eval-acc": "step-00000002"})
    assert store.files.links() == {"best": "step-00000002", "best-eval-acc": "step-00000002", "last": "step-00000004"}
    assert store.linked("last") == Saved(4, 1, "step-00000004")
    assert store.linked("best-eval-loss") is None
    assert store.saved() == saved
    assert latest(store)[0] == saved[1]
    _, best = checkpoint_at(f"{store.files}/best")
    assert best is not None
    assert best.saved == saved[0]

    prune(store, ["step-00000004"])
    gone = r"the link 'best' in .* names step-00000002, which is gone\. There is step-00000004"
    with pytest.raises(CheckpointError, match=gone):
        checkpoint_at(f"{store.files}/best")
    store.set_links({"last": "step-00000004"})
    assert store.files.links() == {"last": "step-00000004"}


def test_where_there_are_no_symbolic_links_they_are_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    trainer = tiny_trainer(directory=tmp_path, steps=2, callbacks=[Checkpoint()])
    trainer.fit()
    link = tmp_path / "checkpoints" / "last"
    assert (link.is_symlink(), link.read_text()) == (False, "step-00000002")
    model = tiny_model()
    load_weights(link, model)
    assert same(dict(model.state_dict()), dict(trainer.model.state_dict()))


def test_a_folder_of_the_user_with_the_name_of_a_link_stays_and_the_save_is_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    run = tiny_run(directory=tmp_path, steps=2, callbacks=[Checkpoint()])
    assert "has the name of one" in run.why("not pruned")
    assert names(tmp_path) == ["02"]
    assert Store(tmp_path / "checkpoints").files.links() == {}


def test_a_run_sets_last_and_best_and_can_be_continued_at_both(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        script = Scripted(acc=[0.1, 0.9, 0.2, 0.3, 0.4, 0.5], loss=[5.0, 4.0, 1.0, 2.0, 2.0, 2.0])
        keep = Checkpoint("2 steps", keep_last=1, keep_best=[("eval/acc", "max"), ("eval/loss", "min")])
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=[script, keep])

    trainer(6).fit()
    folder = tmp_path / "checkpoints"
    assert {path.name: str(path.readlink()) for path in folder.iterdir() if path.is_symlink()} == {
        "last": "step-00000006", "best": "step-00000002", "best-eval-acc": "step-00000002", "best-eval-loss": "step-00000003",
    }  # fmt: skip
    assert trainer(6).fit(resume=folder / "best").progress.origin.step == 2
    assert str((folder / "last").readlink()) == "step-00000006"

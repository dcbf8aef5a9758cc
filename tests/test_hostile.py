"""Files that are not what a run wrote: each is refused or cleaned, and nothing waits, crashes or is read from elsewhere."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cadenza import Callback, Counters, Record, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, LogTraining, SavePredictions
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.content import write_common
from cadenza.checkpoint.store.manifest import canonical
from cadenza.commands.main import main
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, DirectoryError
from cadenza.files.disk import Unflushed
from cadenza.records import branch_files
from cadenza.records.reading import NewRecords, read_decisions, read_records
from cadenza.report.page import page
from cadenza.report.story import story_at
from cadenza.sinks import Csv
from cadenza.status.run_info import RunInfo
from cadenza.testing import tiny_loader, tiny_trainer
from cadenza.timetravel import replay_step
from tests.checkpoint.store.contents import latest, prune

FACTS = {"step": 5, "epoch": 0, "reason": "a test", "exact": True}


def content(step: int = 5) -> Content:
    return Content.of({"weight": torch.zeros(2)}, {"progress": {"step": step}}, {**FACTS, "step": step})


def written(place: Path | str, run: str = "own") -> tuple[Store, Saved]:
    store = Store(place, run)
    return store, store.write(content())


# -- what a run logs -----------------------------------------------------------------------------------


GOOD = '{"epoch": 0, "step": 1, "batch": 1, "samples": 2, "time": 1.5, "a": 0.5}'

BAD_LINES = {
    "a step beyond 64 bits": GOOD.replace('"step": 1', '"step": 9223372036854775808'),
    "a negative step": GOOD.replace('"step": 1', '"step": -1'),
    "an infinite step": GOOD.replace('"step": 1', '"step": 1e400'),
    "a step that is a list": GOOD.replace('"step": 1', '"step": [1]'),
    "a value beyond floats": GOOD.replace("0.5}", f"1{'0' * 400}}}"),
    "a value that is a list": GOOD.replace("0.5}", "[0.5]}"),
    "a value that is a word": GOOD.replace("0.5}", '"word"}'),
    "deep nesting": "[" * 100_000,
    "a time that no calendar has": GOOD.replace("1.5", "1e30"),
    "a time that is none": GOOD.replace("1.5", '"NaN"'),
    "an object in an object": GOOD.replace("0.5}", '{"b": 1}}'),
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_is_passed_over_and_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n{GOOD}\n")
    broken: list[int] = []
    assert [record.step for record in read_records(path, broken=broken)] == [1]
    assert broken == [1]
    reader = NewRecords(path)
    assert ([record.step for record in reader.read()], reader.broken) == ([1], 1)
    story = story_at(tmp_path)
    assert "1 line of metrics.jsonl cannot be read, the first is line 1" in story.problems
    assert "cannot be read" in page([story])


def test_extreme_and_unordered_records_are_shown(tmp_path: Path) -> None:
    lines = [GOOD.replace('"step": 1', f'"step": {step}') for step in (2**63 - 1, 0, 7, 7, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    story = story_at(tmp_path)
    assert story.problems == []
    assert list(story.series["a"].steps) == [0, 3, 7, 7, 2**63 - 1]
    assert "<svg" in page([story])


def test_decisions_and_facts_that_cannot_be_are_passed_over(tmp_path: Path) -> None:
    counters = {"epoch": 0, "step": 2**70, "batch": 0, "batch_in_epoch": 0, "samples": 0}
    decision = {"what": "saved", "who": "x", "why": "y", **counters}
    (tmp_path / "decisions.jsonl").write_text(json.dumps(decision) + "\n")
    (tmp_path / "run.json").write_text("[" * 100_000)
    broken: list[int] = []
    assert list(read_decisions(tmp_path / "decisions.jsonl", broken=broken)) == []
    assert broken == [1]
    assert any(problem.startswith("run.json cannot be read") for problem in story_at(tmp_path).problems)


@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for name in ("metrics.jsonl", "decisions.jsonl", "profile.json", "ranks.json"):
        os.mkfifo(tmp_path / name)
        assert any(problem.startswith(f"{name} cannot be read") for problem in story_at(tmp_path).problems)
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="there are no weights"):
        load_weights(tmp_path, nn.Linear(1, 1))


# -- places that run.json names ------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that are opened."""
    urls: list[str] = []
    monkeypatch.setattr("fsspec.core.url_to_fs", urls.append)
    return urls


READERS: dict[str, Callable[[Path], object]] = {
    "load_weights": lambda run: load_weights(run, nn.Linear(1, 1)),
    "load_weights of the best": lambda run: load_weights(run, nn.Linear(1, 1), which="best"),
    "replay": lambda run: replay_step(tiny_trainer(directory=run), run, 2),
    "list": lambda run: main(["checkpoint", "list", str(run)]),
    "prune": lambda run: main(["checkpoint", "prune", str(run)]),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_a_run_opens_no_url_or_folder_that_only_its_run_json_names(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str], read: Callable[[Path], int]
) -> None:
    tiny_trainer(callbacks=[Checkpoint("2 steps", directory=tmp_path / "own")], directory=tmp_path / "run").fit()
    info = json.loads((tmp_path / "run/run.json").read_text())
    named = ["http://127.0.0.1/taken", "reference://::file:///tmp/refs.json", "//server/taken"]
    (tmp_path / "run/run.json").write_text(json.dumps({**info, "checkpoints": [*info["checkpoints"], *named]}))
    try:
        assert read(tmp_path / "run") == 1
        told = capsys.readouterr().err
    except CheckpointError as error:
        told = str(error)
    assert f"also names '{tmp_path}/own', 'http://127.0.0.1/taken'" in told
    assert "Only a path that you give is opened" in told
    assert opened == []
    assert len(Store(tmp_path / "own").saved()) > 1, "prune deletes nothing there"


@pytest.mark.parametrize("url", ["http://127.0.0.1/taken", "reference://::file:///tmp/refs.json"])
def test_a_run_that_began_at_a_url_continues_there_only_if_the_trainer_names_it(
    tmp_path: Path, opened: list[str], url: str
) -> None:
    tiny_trainer(directory=tmp_path).fit()
    info = json.loads((tmp_path / "run.json").read_text())
    begun = {"branch": 0, "ancestors": [["other", 0, "step-00000002"]], "resumed_at": f"{url}/step-00000002"}
    (tmp_path / "run.json").write_text(json.dumps({**info, "outcome": None, "branch": begun}))
    with pytest.raises(CheckpointError, match=r"is at a URL, which only fit\(resume=URL\) opens"):
        tiny_trainer(directory=tmp_path).fit(resume="auto")
    with pytest.raises(CheckpointError, match="no checkpoint before step 2"):
        replay_step(tiny_trainer(directory=tmp_path), tmp_path, 2)
    assert opened == []


@pytest.mark.parametrize(
    "url", ["reference://refs.json", "simplecache::s3://bucket/a", "zip://a.zip", "dir://a", "x::file://a"]
)
def test_a_url_that_leads_to_another_place_is_refused(opened: list[str], capsys: pytest.CaptureFixture[str], url: str) -> None:
    for act in (Store, lambda place: Checkpoint(directory=place), lambda place: load_weights(place, nn.Linear(1, 1))):
        with pytest.raises(ValueError, match="opens other files or machines: expected one without '::'"):
            act(url)
    assert main(["checkpoint", "list", url]) == 1
    assert "opens other files or machines" in capsys.readouterr().err
    assert opened == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "decisions.jsonl", "console.log", "run.lock", "run.json.new"])
def test_a_run_changes_no_file_that_a_link_in_its_directory_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("other\n")
    tiny_trainer(callbacks=[Checkpoint("2 steps")], directory=tmp_path / "run", steps=2).fit()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    trainer = tiny_trainer(callbacks=[Checkpoint("2 steps")], directory=tmp_path / "run", steps=4)
    if name == "run.json.new":  # which is removed first
        assert trainer.fit(resume="auto").progress.step == 4
    else:
        with pytest.raises(DirectoryError, match=f"holds {name} as a symbolic link, and a run would change its target"):
            trainer.fit(resume="auto")
    assert (tmp_path / "other").read_text() == "other\n"


def test_a_resume_deletes_no_media_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "album/summer").mkdir(parents=True)
    (tmp_path / "album/summer/0000000009.png").touch()
    (tmp_path / "media").symlink_to(tmp_path / "album")
    branch_files.cut(tmp_path, {}, 2)
    assert (tmp_path / "album/summer/0000000009.png").exists()


@pytest.mark.parametrize("content", [{"facts": {}}, {"facts": {}, "state": []}, {"facts": {"why": 5}, "state": {}}])
def test_a_capsule_of_a_wrong_shape_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    (tmp_path / "capsule.json").write_text(json.dumps({"format": 1, **content}))
    assert main(["capsule", str(tmp_path)]) == 1
    assert "capsule.json does not have the format that cadenza writes (the field " in capsys.readouterr().err


# -- checkpoints ---------------------------------------------------------------------------------------


def forge(place: Path, saved: Saved, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest so that its own checksum is right."""
    path = place / saved.name / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("crc32")
    change(manifest)
    path.write_bytes(canonical(manifest))


def sharded(manifest: dict[str, Any], **files: Any) -> None:
    """Make a manifest one of the format with shards, and add files to it."""
    manifest |= {"format": 3, "ranks": 1, "rank_bytes": 0}
    manifest["files"] |= files


ELSEWHERE = ["../../../secret", "/etc/passwd", "..", "inner/file", "a\\b", "", "\0"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    store, saved = written(tmp_path / "place")
    (tmp_path / "secret").write_text("secret")

    none = {"size": 0, "crc32": ""}
    forge(tmp_path / "place", saved, lambda manifest: manifest["files"].update({name: none}))
    with pytest.raises(CheckpointFormatError, match=r"its manifest\.json is not one of cadenza"):
        store.verify(saved)
    assert latest(store)[0] is None


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "time": lambda manifest: manifest.update(time=1e300),
    "epoch": lambda manifest: manifest.update(epoch=2**70),
    "format": lambda manifest: manifest.update(format="2"),
    "files": lambda manifest: manifest.update(files=[*manifest["files"]]),
    "size": lambda manifest: manifest["files"]["state.json"].update(size="1"),
    "a file": lambda manifest: manifest["files"].update({"state.json": None}),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_manifest_of_impossible_facts_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    store, saved = written(tmp_path)
    forge(tmp_path, saved, change)
    with pytest.raises(CheckpointError):
        store.verify(saved)
    assert latest(store)[0] is None


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(Path("moved").absolute()),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": listen,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("replace", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_what_is_no_regular_file_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replace: Any) -> None:
    monkeypatch.chdir(tmp_path)
    store, saved = written("place")
    path = Path("place", saved.name, name)
    path.rename("moved")
    replace(path)
    with pytest.raises(CheckpointDamagedError, match=f"{name} cannot be read: "):
        store.verify(saved)
    assert latest(store)[0] is None


@pytest.mark.timeout(120)
def test_a_pipe_behind_fsspec_is_damage_too(tmp_path: Path) -> None:
    store, saved = written(f"file://{tmp_path}/place")
    path = tmp_path / "place" / saved.name / "state.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointDamagedError, match=r"state\.json cannot be read: .*not a regular file"):
        store.verify(saved)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [10**12], "split": 0}, "larger than its file"),
        ({"shape": [2], "split": 1}, "is split along 1"),
        ({"shape": [2], "split": [[0, 2, 1]]}, "is split over"),
        ({"shape": [2], "split": [[0, -1, 1]]}, "is split over"),
        ({"shape": [2], "split": [[0, 1]]}, "argument"),
        ({"shape": [2]}, "split"),
        ({"shape": ["2"], "split": 0}, "has the shape"),
        ({"shape": [-2], "split": 0}, "has the shape"),
    ],
)
def test_an_index_cannot_ask_for_any_amount_of_memory(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    store, saved = written(tmp_path)
    shard = store.files.write_tensors(f"{saved.name}/model-00001-of-00001.safetensors", {})
    parts = {"model": [[shard["size"], shard["crc32"]]], "state": [None], "rank": [None]}
    index = {"model": {"w": {"dtype": "float32", **entry}}, "state": {}}
    names = {"shards.json": index, "parts.json": parts}
    found = {name: store.files.write(f"{saved.name}/{name}", json.dumps(value).encode()) for name, value in names.items()}
    forge(tmp_path, saved, lambda manifest: sharded(manifest, **found))
    with pytest.raises(CheckpointFormatError, match=message):
        store.read(saved)


def test_of_a_checkpoint_that_is_a_link_the_link_is_removed_and_never_its_target(tmp_path: Path) -> None:
    place, large_disk = tmp_path / "place", tmp_path / "large"
    store = Store(place, "own")
    for step in (5, 6, 7):
        store.write(content(step))
    large_disk.mkdir()
    for name in ("step-00000005", "step-00000006"):
        (place / name).rename(large_disk / name)
        (place / name).symlink_to(large_disk / name)
    (place / ".trash-step-00000001-own-0123abcd").symlink_to(tmp_path / "gone")  # left by an older version
    assert prune(store, ["step-00000006"]) == ["step-00000005"]
    store.sweep()
    assert sorted(path.name for path in place.iterdir()) == ["step-00000006", "step-00000007"]
    assert (large_disk / "step-00000005" / "manifest.json").exists()
    assert store.verify(Saved(6, 1, "step-00000006"))["step"] == 6


def killed_in_a_save(store: Store, step: int) -> None:
    """Write the folder of a save that is killed before its manifest."""
    with Unflushed() as later:
        write_common(store.files, store._new_folder(content(step)), content(step), later)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_folder_of_a_killed_save_behind_fsspec_is_removed_by_its_own_run_alone(tmp_path: Path, scheme: str) -> None:
    place = f"{scheme}://{tmp_path}/place"
    for run in ("own", "other"):
        killed_in_a_save(Store(place, run), 5)
    store = Store(place, "own")
    assert [saved.name for saved in store.saved()] == ["step-00000005", "step-00000005-2"]
    store.files.make("step-00000009")
    store.files.write("step-00000009/notes.txt", b"of a user")
    store.sweep()
    assert [saved.name for saved in store.saved()] == ["step-00000005-2", "step-00000009"]
    kept = store.write(content(8))
    store.sweep()
    assert store.verify(kept)["step"] == 8


def test_a_run_that_is_continued_sweeps_what_it_left_behind_fsspec(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        saving = Checkpoint("2 steps", directory=f"file://{tmp_path}/saved")
        return tiny_trainer(callbacks=[saving], steps=steps, directory=tmp_path / "run", seed=0)

    trainer(2).fit()
    run = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    killed_in_a_save(Store(f"file://{tmp_path}/saved", run), 3)
    trainer(4).fit(resume="auto")
    assert sorted(path.name for path in (tmp_path / "saved").glob("[ls]*")) == ["last", "step-00000002", "step-00000004"]


# -- tables --------------------------------------------------------------------------------------------


def test_names_and_texts_in_tables_and_saved_predictions_are_no_formulas(tmp_path: Path) -> None:
    sink = Csv()
    sink.open(RunInfo("id", tmp_path))
    sink.write([Record(Counters(step=1), 1.0, {"=HYPERLINK(1)": -0.5, "a": 1.0})])
    sink.write([Record(Counters(step=2), 2.0, {"@b": 2.0, "=HYPERLINK(1)": 3.0, "-1": 1.0})])
    sink.close(None)
    head, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert head == "epoch,step,batch,samples,time,'=HYPERLINK(1),a,'@b,-1"
    assert [row.split(",", 4)[4] for row in rows] == ["1.0,-0.5,1.0,,", "2.0,3.0,,2.0,1.0"]

    texts = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "-0.5", "fine"]
    columns = {"=text": lambda batch, outputs: [texts.pop(0) for _ in batch[0]]}
    save = SavePredictions(tmp_path / "p.csv", evaluation="eval", columns=columns)
    tiny_trainer(compute_loss=supervised(mse_loss), callbacks=[save]).evaluate(tiny_loader(1, batch_size=7))
    head, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert "'=text" in head
    cells = [row.rsplit(",", 1)[1] for row in rows]
    assert cells == ["'=1+1", "'+cmd|' /C calc'!A0", "'-2+3", "'@SUM(1)", "'\t=1", "-0.5", "fine"]


def test_a_run_whose_names_are_formulas_is_continued(tmp_path: Path) -> None:
    for steps in (2, 3):
        named = on(Callback.on_step_end)(lambda run: run.log("=SUM(1)", 1))
        callbacks = [named, LogTraining("1 step"), Csv(), Checkpoint("1 step")]
        tiny_trainer(callbacks=callbacks, directory=tmp_path, steps=steps).fit(resume="auto")
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4

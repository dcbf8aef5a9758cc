"""Logged media are files in the run directory, and the report shows as many of them as it has room for."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from threading import Event

import pytest
import torch
from matplotlib.figure import Figure as Drawing
from PIL import Image as Pillow

from cadenza import Audio, Callback, Figure, Histogram, Image, Run, Text, on
from cadenza.callbacks import Checkpoint
from cadenza.hooks.moments import BaseCallback
from cadenza.report import pictures, story_at
from cadenza.report.page import LIMIT
from cadenza.sinks import media_files
from cadenza.testing import tiny_run, tiny_trainer

from .pages import report


def media(side: int = 4) -> BaseCallback:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        step, drawing = run.progress.step, Drawing(figsize=(1, 1))
        drawing.subplots().plot([0, step])
        run.log("train/image", Image(torch.full((3, side, side), step / 10)))
        run.log({"figure": Figure(drawing), "weights": Histogram(torch.arange(10.0)), "note": Text(f"<b>step {step}")})
        run.log("tone", Audio(torch.sin(torch.arange(80.0)), 8000))

    return log


def noise(side: int, steps: int) -> BaseCallback:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        if run.progress.step <= steps:
            run.log("noise", Image(torch.rand(3, side, side, generator=torch.Generator().manual_seed(run.progress.step))))

    return log


def test_each_kind_of_media_is_a_file_that_other_programs_read(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, callbacks=[media()], steps=2)
    folder = tmp_path / "media"
    assert sorted(path.name for path in folder.iterdir()) == ["figure", "note", "tone", "train%2Fimage", "weights"]
    with Pillow.open(folder / "train%2Fimage" / "0000000002.png") as picture:
        assert (picture.size, picture.getpixel((0, 0))) == ((4, 4), (51, 51, 51))
    with wave.open(str(folder / "tone" / "0000000001.wav")) as tone:
        assert (tone.getframerate(), tone.getnframes()) == (8000, 80)
    assert sum(json.loads((folder / "weights" / "0000000001.json").read_text())["counts"]) == 10
    assert (folder / "note" / "0000000002.txt").read_text() == "<b>step 2"


def test_a_run_without_a_directory_or_without_media_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(callbacks=[media()], steps=1)
    assert not list(tmp_path.iterdir())
    tiny_run(directory=tmp_path / "run", steps=1)
    assert not (tmp_path / "run" / "media").exists()


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log({name: Text("x") for name in ("../../out", "..", "/etc/x", "a\\b", "x" * 1000)})

    tiny_run(directory=tmp_path / "run", callbacks=[log], steps=1)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    folders = [path.name for path in (tmp_path / "run" / "media").iterdir()]
    assert len(folders) == 5
    assert not any("." in name or "/" in name for name in folders)


def test_a_full_directory_leaves_media_out_and_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "FILES", 3)
    run = tiny_run(directory=tmp_path, callbacks=[media()], steps=2)
    assert len(list((tmp_path / "media").glob("*/*"))) == 3
    assert "the directory keeps 3 media files and 200 MB at most" in run.why("not kept")
    assert "the directory keeps 3 media files" in " ".join(report(tmp_path).all("p", class_="fault"))


def test_a_continued_run_replaces_files_also_in_a_full_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "FILES", 6)

    def trained(steps: int) -> Run:
        callbacks = [noise(4, 9), Checkpoint(every="4 steps", background=False)]
        trainer = tiny_trainer(directory=tmp_path, batches=9, steps=steps, seed=1, callbacks=callbacks)
        return trainer.fit(resume="auto")

    trained(6)
    for kept in sorted((tmp_path / "checkpoints").glob("step-*6")):  # as if the process was killed after step 4
        shutil.rmtree(kept)
    (tmp_path / "media" / "noise" / "0000000005.png").write_bytes(b"of the earlier attempt")
    run = trained(7)
    assert len(list((tmp_path / "media").glob("*/*"))) == 6
    assert (tmp_path / "media" / "noise" / "0000000005.png").read_bytes().startswith(b"\x89PNG")
    assert "first that is left out is 'noise' of step 7" in run.why("not kept")


def test_media_that_are_logged_faster_than_written_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Event()
    encode = media_files._encoded
    monkeypatch.setattr(media_files, "_encoded", lambda medium: written.wait(200) and encode(medium))

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        if run.progress.step == 9:
            written.set()
        else:
            run.log("large", Image(torch.zeros(1, 7000, 3000, dtype=torch.uint8)))

    run = tiny_run(directory=tmp_path, batches=9, steps=9, callbacks=[log])
    assert "the media of 3 records are left out, the first of step 6" in run.why("not kept")
    assert len(list((tmp_path / "media").glob("*/*"))) == 5


def test_a_disk_that_takes_no_media_does_not_end_the_run(tmp_path: Path) -> None:
    @on(Callback.on_fit_start)
    def block(run: Run) -> None:
        (tmp_path / "media").write_text("a file in its way")

    run = tiny_run(directory=tmp_path, callbacks=[block, media()], steps=3)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert "media cannot be written" in run.why("not kept")


def test_the_report_shows_all_kinds_with_the_last_step_open(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_run(directory=tmp_path / name, callbacks=[media()], steps=3)
    seen = report(tmp_path / "one", tmp_path / "two")
    heads = seen.all("h3")
    assert heads[heads.index("figure") :][:5] == ["figure", "note", "tone", "train/image", "weights"]
    alts = [has["alt"] for tag, has, _ in seen.elements if tag == "img"]
    assert "train/image, two, step 3" in alts
    assert len(alts) == 2 * 2 * 3
    items = [has for tag, has, _ in seen.elements if tag == "div" and "data-step" in has]
    assert {has["data-step"] for has in items if "hidden" not in has} == {"3"}
    assert "<b>step 3" in seen.all("pre")
    sources = [has["src"] or "" for _, has, _ in seen.elements if has.get("src")]
    assert all(source.startswith(("data:image/png;base64,", "data:audio/wav;base64,")) for source in sources)
    assert any("10 values from 0 to 9" in (has.get("aria-label") or "") for _, has, _ in seen.elements)


def test_the_page_has_room_for_some_and_counts_the_others_the_last_and_the_first_of_each_come_first(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, callbacks=[noise(170, 20)], batches=20)
    seen = report(tmp_path)
    assert len(seen.text.encode()) < LIMIT
    steps = [int(has["data-step"] or 0) for _, has, _ in seen.elements if "data-step" in has]
    assert {1, 20} <= set(steps)
    assert 5 <= len(steps) < 20
    assert f"{20 - len(steps)} files left out" in seen.words


def test_a_large_picture_is_made_smaller_and_a_small_one_is_shown_larger_but_not_taller_than_the_screen(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "large", callbacks=[noise(700, 1)], steps=1)
    (source,) = [has["src"] or "" for tag, has, _ in report(tmp_path / "large").elements if tag == "img"]
    assert 1000 < len(source) < 1.4 * pictures.ONE
    small = {"small": Image(torch.rand(1, 8, 8)), "tall": Image(torch.rand(1, 300, 8))}
    log = on(Callback.on_step_end)(lambda run: run.log(dict(small)))
    tiny_run(directory=tmp_path / "small", steps=1, callbacks=[log])
    sizes = [(has["width"], has["height"]) for tag, has, _ in report(tmp_path / "small").elements if tag == "img"]
    assert sizes == [("160", "160"), ("8", "300")]


DAMAGED = {
    "0000000001.png": b"<svg onload=alert(1)>",
    "0000000001.wav": b"x",
    "0000000001.json": b"{}",
    "x.png": b"",
    "0000000001.svg": b"",
}


def test_files_that_are_no_media_are_left_out(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=3)
    folder = tmp_path / "media" / "<i>bad"
    folder.mkdir(parents=True)
    for name, content in DAMAGED.items():
        (folder / name).write_bytes(content)
    (folder / "0000000002.png").symlink_to(tmp_path / "run.json")
    (folder / "0000000009.txt").write_text("a step that the run has not reached")
    seen = report(tmp_path)
    assert not seen.all("i")
    assert "4 files left out" in seen.words
    assert list(pictures.media_of([story_at(tmp_path)])) == ["<i>bad"]

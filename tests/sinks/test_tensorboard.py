"""TensorBoard: what is written is read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy
import PIL.Image
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cadenza import Audio, Callback, Figure, Histogram, Image, Run, Text, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.hooks.subscription import Subscription
from cadenza.records.record import Loggable
from cadenza.sinks import TensorBoard
from cadenza.testing import check_callback, tiny_run, tiny_trainer


def read(directory: Path) -> Any:
    return EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()


def logging(values: Mapping[str, Loggable]) -> Subscription:
    @on(Callback.on_step_end)
    def log_values(run: Run) -> None:
        run.log(dict(values))

    return log_values


def test_numbers_stand_at_their_step_and_time(tmp_path: Path) -> None:
    log = LogTraining(every="2 steps", throughput=False)
    run = tiny_run(callbacks=[log, TensorBoard()], steps=4, directory=tmp_path)
    events = read(tmp_path / "tensorboard").Scalars("train/loss")
    assert [event.step for event in events] == [2, 4]
    assert [event.value for event in events] == [value for _, value in run.history["train/loss"]]
    kept = [json.loads(line)["time"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event.wall_time for event in events] == pytest.approx(kept, abs=0.001)


def test_an_image_comes_back_pixel_by_pixel(tmp_path: Path) -> None:
    whole = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)
    bright = torch.tensor([[[0.0, 0.5], [1.0, 7.0], [-1.0, float("nan")]]])
    tiny_run(callbacks=[logging({"a": Image(whole), "b": Image(bright.bfloat16())}), TensorBoard(tmp_path)], steps=1)
    events = read(tmp_path)
    [image] = events.Images("a")
    assert image.step == 1
    assert (pixels(image) == whole.permute(1, 2, 0).numpy()).all()
    assert pixels(events.Images("b")[0])[:, :, 0].tolist() == [[0, 127], [255, 255], [0, 0]]


def pixels(event: Any) -> Any:
    return numpy.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))


def test_a_sound_comes_back_sample_by_sample(tmp_path: Path) -> None:
    samples = torch.tensor([0.0, 0.5, -1.0, 3.0])
    tiny_run(callbacks=[logging({"tone": Audio(samples, 8000)}), TensorBoard(tmp_path)], steps=1)
    [sound] = read(tmp_path).Audio("tone")
    with wave.open(io.BytesIO(sound.encoded_audio_string)) as file:
        assert file.getframerate() == 8000
        assert numpy.frombuffer(file.readframes(9), "<i2").tolist() == [0, 16383, -32767, 32767]


def test_a_histogram_counts_every_finite_value(tmp_path: Path) -> None:
    values = torch.tensor([-1.0, 0.0, 1.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    tiny_run(callbacks=[logging({"w": Histogram(values)}), TensorBoard(tmp_path)], steps=1)
    [event] = read(tmp_path).Histograms("w")
    counted = event.histogram_value
    assert (counted.num, counted.min, counted.max, counted.sum, sum(counted.bucket)) == (3, -1, 1, 0, 3)


def test_media_that_cannot_be_shown_are_left_out_with_one_remark(tmp_path: Path) -> None:
    nothing: dict[str, Loggable] = {"w": Histogram(torch.tensor(float("nan"))), "tone": Audio(torch.zeros(0), 8000), "a": 1}
    run = tiny_run(callbacks=[logging(nothing), TensorBoard()], steps=3, directory=tmp_path)
    assert run.faults == []
    assert read(tmp_path / "tensorboard").Tags()["histograms"] == []
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "TensorBoard: 'w' of step 1 has no values to show, and is left out",
        "TensorBoard: 'tone' of step 1 has no values to show, and is left out",
    ]


def test_a_figure_becomes_an_image_and_stays_as_it_was(tmp_path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 3, 2])
    canvas = figure.canvas
    tiny_run(callbacks=[logging({"plot": Figure(figure)}), TensorBoard(tmp_path)], steps=1)
    [image] = read(tmp_path).Images("plot")
    assert pixels(image).shape == (50, 100, 3)
    assert len(numpy.unique(pixels(image))) > 10
    assert figure.canvas is canvas


def test_text_comes_back(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging({"note": Text("**bold**")}), TensorBoard(tmp_path)], steps=1)
    [event] = read(tmp_path).Tensors("note/text_summary")
    assert make_ndarray(event.tensor_proto).tolist() == [b"**bold**"]


def test_what_is_logged_last_is_there_too(tmp_path: Path) -> None:
    @on(Callback.on_fit_end)
    def late(run: Run) -> None:
        run.log("late", 1)

    tiny_run(callbacks=[TensorBoard(tmp_path), late], steps=1)
    assert len(list(tmp_path.iterdir())) == 1
    assert read(tmp_path).Scalars("late")[0].value == 1


def test_one_instance_serves_several_runs(tmp_path: Path) -> None:
    sink = TensorBoard("tb")
    for name, steps in (("one", 2), ("two", 3)):
        tiny_run(callbacks=[logging({"a": 1}), sink], steps=steps, directory=tmp_path / name)
    assert len(read(tmp_path / "one" / "tb").Scalars("a")) == 2
    assert len(read(tmp_path / "two" / "tb").Scalars("a")) == 3


def test_a_run_that_is_continued_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    def fit(factor: int, killed_at: int = 100) -> None:
        log = on(Callback.on_step_end)(lambda run: run.log("a", factor * run.progress.step))

        @on(Callback.on_step_end, at=killed_at)
        def kill(run: Run) -> None:
            raise KeyboardInterrupt

        callbacks = [log, TensorBoard(), Checkpoint(every="3 steps", on_exception=False), kill]
        tiny_trainer(callbacks=callbacks, steps=6, directory=tmp_path).fit(resume="auto")

    with pytest.raises(KeyboardInterrupt):
        fit(1, killed_at=5)
    fit(10)
    events = read(tmp_path / "tensorboard").Scalars("a")
    assert [(event.step, event.value) for event in events] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


DISK_FULL = """
import json, resource, sys
import torch
from cadenza import Callback, Image, on
from cadenza.sinks import TensorBoard
from cadenza.testing import tiny_run

resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

@on(Callback.on_step_end)
def log(run):
    run.log({"number": run.progress.step, "noise": Image(torch.rand(3, 64, 64))})

run = tiny_run(callbacks=[log, TensorBoard()], steps=200, directory=sys.argv[1])
print(json.dumps([run.outcome.kind, [fault.callback for fault in run.faults], [decision.what for decision in run.decisions]]))
"""


def test_on_a_full_disk_it_says_what_it_misses_and_the_run_goes_on(tmp_path: Path) -> None:
    script = [sys.executable, "-c", DISK_FULL, str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=500)
    assert json.loads(done.stdout.splitlines()[-1]) == ["finished", ["TensorBoard"], ["failed", "not sent"]]
    assert "TensorBoard failed in " in done.stderr
    assert "File too large" in done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 200


def test_without_any_directory_the_run_does_not_start() -> None:
    with pytest.raises(DirectoryError, match=r"TensorBoard has no directory to write to\. Give Trainer\(directory=...\)"):
        tiny_run(callbacks=[logging({"a": 1}), TensorBoard()])


def test_a_directory_that_cannot_be_made_is_an_error_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"TensorBoard cannot write to .*Give a directory where files can be made"):
        tiny_run(callbacks=[logging({"a": 1}), TensorBoard(tmp_path / "file" / "tb")])


def test_a_missing_package_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"TensorBoard needs .*pip install 'cadenza\[tensorboard\]'"):
        TensorBoard()


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(TensorBoard)

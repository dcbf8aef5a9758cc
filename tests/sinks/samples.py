"""What the tests of sinks log, and how it looks when it is read back."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import torch

from cadenza import Audio, Callback, Histogram, Image, Run, Text, on
from cadenza.hooks.subscription import Subscription
from cadenza.records.record import Loggable

WHOLE = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)
MEDIA: dict[str, Loggable] = {
    "whole": Image(WHOLE),
    "bright": Image(torch.tensor([[[0.0, 0.5], [1.0, 7.0], [-1.0, float("nan")]]]).bfloat16()),
    "tone": Audio(torch.tensor([0.0, 0.5, -1.0, 3.0]), 8000),
    "w": Histogram(torch.tensor([-1.0, 0.0, 1.0, float("nan"), float("inf")])),
    "note": Text("1 < 2"),
}
EMPTY: dict[str, Loggable] = {"w": Histogram(torch.tensor(float("nan"))), "tone": Audio(torch.zeros(0), 8000), "a": 1}


def logging(values: Mapping[str, Loggable]) -> Subscription:
    """Log the same values in each step."""

    @on(Callback.on_step_end)
    def log_values(run: Run) -> None:
        run.log(dict(values))

    return log_values


def failing(at: int, error: BaseException | type[BaseException] = KeyboardInterrupt) -> Subscription:
    """Raise an error at the end of a step."""

    @on(Callback.on_step_end, at=at)
    def fail(run: Run) -> None:
        raise error

    return fail


def metrics_of(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records of a file of lines, as that of a run itself."""
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def check_whole(content: bytes) -> None:
    """Check that a picture is that of `WHOLE`."""
    assert (pixels(content)[..., :3] == WHOLE.permute(1, 2, 0).numpy()).all()


def check_bright(content: bytes) -> None:
    """Check that a picture is that of ``bright``, which leaves the range and is no number in a corner."""
    shown = pixels(content)
    assert (shown if shown.ndim == 2 else shown[..., 0]).tolist() == [[0, 127], [255, 255], [0, 0]]


def check_tone(content: bytes) -> None:
    """Check that a sound is that of ``tone``."""
    with wave.open(io.BytesIO(content)) as file:
        assert file.getframerate() == 8000
        assert numpy.frombuffer(file.readframes(9), "<i2").tolist() == [0, 16383, -32767, 32767]


def pixels(content: bytes) -> Any:
    """Return a picture's pixels, shape (H, W) or (H, W, C)."""
    return numpy.asarray(PIL.Image.open(io.BytesIO(content)))

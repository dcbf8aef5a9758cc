"""Records for TensorBoard."""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.moments import Callback
from cadenza.records import Audio, Figure, Histogram, Image, Media, Text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from cadenza.records import Record
    from cadenza.run import Run

_FLUSH_S = 2  # after a kill, at most this much is missing
_QUEUE = 1000  # events: a step waits for the disk only when so many are under way


class TensorBoard(Callback):
    """Write numbers, and `Image`, `Audio`, `Figure`, `Histogram`, `Text`, as event files: ``tensorboard --logdir`` shows them.

    Each value stands at its step and its time. A writer that fails is disabled, and the run goes on.

    Args:
        directory: Where to write; a relative one lies in the run's directory, if there is one. None: ``tensorboard`` there.

    Raises:
        MissingExtraError: tensorboard is not installed.
        DirectoryError: When a run starts: there is no directory to write in, or it cannot be written.
    """

    on_fault: Literal["raise", "disable"] = "disable"

    def __init__(self, directory: str | PathLike[str] | None = None) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", needed_by="TensorBoard", extra="tensorboard")
        self.directory = None if directory is None else Path(directory)
        self._writer: SummaryWriter | None = None
        self._left_out: set[str] = set()

    def on_fit_start(self, run: Run) -> None:
        self._writer, self._left_out = None, set()
        if run.is_main:
            self.on_fault = "raise"  # that it cannot start is for the user to know now
            self._writer = _opened(_place(self.directory, run.directory))
            self.on_fault = "disable"
            run.at_end(self._close)

    def on_log(self, run: Run, record: Record) -> None:
        if self._writer is None:  # it could not start, and these are the last records before the run ends for it
            return
        try:
            self._write(self._writer, run, record)
        except BaseException:
            self._abandon(self._writer)
            raise

    def _write(self, writer: SummaryWriter, run: Run, record: Record) -> None:
        for name, value in record.values.items():
            writer.add_scalar(name, value, record.step, record.time)
        for name, medium in record.media.items():
            if not _written(writer, name, medium, record.step, record.time) and name not in self._left_out:
                run.warn(f"TensorBoard: {name!r} of step {record.step} holds nothing that can be shown, and is left out")
                self._left_out.add(name)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _abandon(self, writer: SummaryWriter) -> None:
        self._writer = None
        try:
            writer.close()
        except Exception:  # the echo of the error that is on its way
            return


def _place(own: Path | None, runs: Path | None) -> Path:
    if own is None and runs is None:
        raise DirectoryError(
            "TensorBoard has nowhere to write: give Trainer(directory=...), and it writes to its 'tensorboard' folder, or "
            "TensorBoard(directory)"
        )
    return (runs or Path()) / (own or "tensorboard")


def _opened(directory: Path) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # 0.8 s, so only when a run starts

    try:
        return SummaryWriter(str(directory), max_queue=_QUEUE, flush_secs=_FLUSH_S)
    except OSError as error:
        raise DirectoryError(
            f"TensorBoard cannot write to {str(directory)!r}: {error.strerror or error}. Give a directory in which files can "
            "be made."
        ) from error


def _written(writer: SummaryWriter, name: str, medium: Media, step: int, when: float) -> bool:
    """Write a medium; return False if there is nothing in it that could be shown."""
    match medium:
        case Text(text):
            writer.add_text(name, text, step, when)
        case Image(pixels):
            writer.add_image(name, _shown(pixels), step, when)
        case Figure(figure):
            _write_figure(writer, name, figure, step, when)
        case Audio(samples, rate):
            if len(samples) < 2:
                return False
            writer.add_audio(name, torch.nan_to_num(samples.float()).clamp(-1, 1), step, rate, when)
        case Histogram(values):
            numbers = values.float()
            finite = numbers[numbers.isfinite()]
            if not len(finite):
                return False
            writer.add_histogram(name, finite, step, bins=64, walltime=when)
    return True


def _shown(pixels: Tensor) -> Tensor:
    return pixels if pixels.dtype == torch.uint8 else torch.nan_to_num(pixels.float())


def _write_figure(writer: SummaryWriter, name: str, figure: Any, step: int, when: float) -> None:
    canvas = figure.canvas  # drawing puts another in its place, and a window of the user's would go dead
    try:
        writer.add_figure(name, figure, step, close=False, walltime=when)
    finally:
        figure.set_canvas(canvas)

"""Write records for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.errors import DirectoryError
from cadenza.files.paths import local_path
from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.sink import Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_FLUSH_S = 2  # a kill loses at most this much
_QUEUE = 1000  # events; a step waits for the disk only if the queue is full


class TensorBoard(Sink):
    """Write numbers, and `Image`, `Audio`, `Figure`, `Histogram`, `Text`, as event files for ``tensorboard --logdir``.

    Each value has its step and time. After an error, the sink is tried again in a new file; see `Sink`.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        directory: The directory of the files. A relative path starts at the directory of the run, if it has one. None:
            ``tensorboard`` in the directory of the run.

    Raises:
        MissingExtraError: tensorboard is not installed.
        DirectoryError: At the start of a run: no directory is given, or it cannot be written.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tiny_run(callbacks=[LogTraining("1 step"), TensorBoard()], directory=folder)
    ...     [one.name.split(".")[0] for one in Path(folder, "tensorboard").iterdir()]
    ['events']
    """

    _package = "tensorboard"

    def __init__(self, directory: str | PathLike[str] | None = None) -> None:
        super().__init__()
        self.directory: Path | None = None if directory is None else local_path(directory)
        self._writer: SummaryWriter | None = None
        self._left_out: set[str] = set()

    def open(self, info: RunInfo) -> None:
        self._left_out = set()
        self._writer = _opened(_folder(self.directory, info), info)

    def write(self, records: Sequence[Record]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._writer is not None, "open comes first"
        files: Any = self._writer.file_writer
        for record in records:
            # One event for all numbers: add_scalar makes one event per number, and takes four times as long.
            numbers = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
            if numbers:
                files.add_summary(Summary(value=numbers), record.at.step, record.time)
            self._write_media(self._writer, record)
        self._writer.flush()  # an error is that of these records, which are then written again

    def _write_media(self, writer: SummaryWriter, record: Record) -> None:
        for name, medium in record.media.items():
            if not _written(writer, name, medium, record.at.step, record.time) and name not in self._left_out:
                self.remarks.append(f"{name!r} of step {record.at.step} has no values to show, and is left out")
                self._left_out.add(name)

    def close(self, outcome: Outcome | None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _folder(own: Path | None, info: RunInfo) -> Path:
    if own is None and info.directory is None:
        raise DirectoryError(
            "TensorBoard has no directory to write to. Give Trainer(directory=...) for 'tensorboard' in it, or "
            "TensorBoard(directory)."
        )
    return info.base / (own or "tensorboard")


def _wait_for_a_later_name(directory: Path) -> None:
    """Return when a new event file comes after those that are there, at most a second later.

    TensorBoard reads them in the order of their names, which begin with the second in which the file was made. What follows in
    the name, such as the process, does not count upwards.
    """
    seconds = [name.split(".")[3:4] for name in os.listdir(directory)] if directory.is_dir() else []
    newest = max((int(second) for [second] in filter(None, seconds) if second.isdecimal()), default=0)
    while int(time.time()) == newest:
        time.sleep(0.01)


def _opened(directory: Path, info: RunInfo) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # 0.8 s, so only when a run starts

    # A continued run repeats the steps after its checkpoint; TensorBoard then drops the earlier values.
    purge = info.step + 1 if info.continued else None
    if info.continued:
        _wait_for_a_later_name(directory)
    try:
        return SummaryWriter(str(directory), max_queue=_QUEUE, flush_secs=_FLUSH_S, purge_step=purge)
    except OSError as error:
        raise DirectoryError(
            f"TensorBoard cannot write to {str(directory)!r}: {error.strerror or error}. Give a directory where files can be "
            "made."
        ) from error


def _written(writer: SummaryWriter, name: str, medium: Media, step: int, when: float) -> bool:
    """Write a medium. Return False if it has no values to show."""
    match medium:
        case Text(text):
            writer.add_text(name, text, step, when)
        case Image(pixels):
            writer.add_image(name, _shown(pixels), step, when)
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

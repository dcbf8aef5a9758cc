"""A run on a disk that fails closes its files all the same, so that the disk can be unmounted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.errors import CheckpointLostError
from cadenza.files.locking import is_held
from cadenza.testing import tiny_run


def open_below(folder: Path) -> list[str]:
    paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [path for path in paths if path.startswith(str(folder))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the open files of a process are known on Linux only")
@pytest.mark.parametrize("keeps", [True, False], ids=["with a checkpoint", "without"])
def test_no_file_stays_open_after_a_disk_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    @on(Callback.on_step_end, at=2)
    def break_disk(run: Run) -> None:
        monkeypatch.setattr(os, "fsync", failing)

    saves = [Checkpoint("1 step", background=False)] if keeps else []
    with pytest.raises(CheckpointLostError if keeps else OSError):
        tiny_run(directory=tmp_path, steps=4, callbacks=[LogTraining("1 step"), break_disk, *saves])
    assert open_below(tmp_path) == []
    assert not is_held(tmp_path)

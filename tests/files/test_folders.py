"""Folders that cannot be flushed do not refuse a run, and a disk that fails does."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.files import disk
from cadenza.files.disk import flush
from cadenza.testing import tiny_run


@pytest.fixture
def folders_fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the flush of each folder fail, or its opening."""
    disk._warn_of_folders.cache_clear()

    def begin(number: int, *, opening: bool = False) -> None:
        fsync, open_ = os.fsync, os.open

        def failing_fsync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        def failing_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None and os.path.isdir(path):
                raise OSError(number, os.strerror(number), path)
            return open_(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(*(("os.open", failing_open) if opening else ("os.fsync", failing_fsync)))

    return begin


@pytest.mark.parametrize(
    "number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EPERM], ids=errno.errorcode.get
)
def test_a_file_system_that_flushes_no_folders_holds_runs_and_says_so_once(
    number: int, folders_fail_with: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders_fail_with(number)
    for name in ("first", "second"):
        tiny_run(directory=tmp_path / name, steps=3, callbacks=[Checkpoint("1 step", keep_last=None)])
        store = Store(tmp_path / name / "checkpoints")
        assert [store.verify(one)["step"] for one in store.saved()] == [1, 2, 3]
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and "flushes no folders" in one.msg]
    assert len(told) == 1
    assert os.strerror(number) in told[0]


def test_a_folder_that_may_be_written_and_not_opened_holds_files(
    folders_fail_with: Callable[..., None], tmp_path: Path
) -> None:
    folders_fail_with(errno.EACCES, opening=True)
    flush(tmp_path)


def test_a_disk_that_fails_is_an_error(folders_fail_with: Callable[..., None], tmp_path: Path) -> None:
    folders_fail_with(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        flush(tmp_path)


def test_a_file_that_cannot_be_flushed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "file").touch()
    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        flush(tmp_path / "file")

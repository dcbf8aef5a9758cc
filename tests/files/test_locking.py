"""One run at a time uses a directory: whatever other code of the process opens, forks or copies, and without locks as well."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import DirectoryError
from cadenza.files import locking
from cadenza.files.locking import HOLDER, FolderLock, HeldError
from cadenza.testing import tiny_run, tiny_trainer

TRIES = """
import sys
from pathlib import Path
from cadenza.files.locking import FolderLock
FolderLock(Path(sys.argv[1]))
print("held")
"""


def taken_elsewhere(folder: Path) -> str:
    """Return what another process says when it takes the folder."""
    done = subprocess.run([sys.executable, "-c", TRIES, str(folder)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_copy_of_the_directory_made_by_a_callback_does_not_free_it(tmp_path: Path) -> None:
    told: list[str] = []

    @on(Callback.on_step_end, at=1)
    def back_up(run: Run) -> None:
        assert run.info.directory is not None
        shutil.copytree(run.info.directory, tmp_path / "backup")
        told.append(taken_elsewhere(run.info.directory))

    tiny_run(directory=tmp_path / "run", callbacks=[back_up], steps=1)
    assert f"HeldError: process {os.getpid()} on " in told[0]
    assert taken_elsewhere(tmp_path / "run") == "held\n"


@pytest.mark.parametrize("name", ["run", "link"])
def test_two_trainers_of_one_process_cannot_both_have_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("run")

    @on(Callback.on_step_end, at=1)
    def second(run: Run) -> None:
        with pytest.raises(DirectoryError, match=r"in use by process \d+ on .*, by a run that has not ended\. Wait for"):
            tiny_trainer(directory=tmp_path / name, steps=1).fit(resume="auto")

    assert tiny_run(directory=tmp_path / "run", callbacks=[second], steps=2).progress.step == 2


def test_of_threads_that_start_together_one_gets_it(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def take(_: int) -> FolderLock | HeldError:
        together.wait()
        try:
            return FolderLock(tmp_path)
        except HeldError as error:
            return error

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(take, range(8)))
    assert sum(isinstance(result, FolderLock) for result in results) == 1


def test_a_run_that_came_and_went_before_the_lock_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = FolderLock.__init__

    def later(self: FolderLock, folder: Path) -> None:
        monkeypatch.undo()
        tiny_run(directory=tmp_path, steps=1)
        taken(self, folder)

    monkeypatch.setattr(FolderLock, "__init__", later)
    with pytest.raises(DirectoryError, match="already holds a run that finished"):
        tiny_run(directory=tmp_path, steps=2)
    tiny_trainer(directory=tmp_path, steps=1).fit(resume="auto")  # the lock of the refused one is free


def forked(act: Any) -> int:
    """Run `act` in a forked child; return its process id. Also for tests/alone/test_directory_lock.py."""
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(0)
    return child


def test_a_forked_child_takes_a_directory_of_its_own_and_not_that_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lock = FolderLock(tmp_path / "a")

    def child() -> None:
        lock.release()  # a copy: it frees nothing
        own = FolderLock(tmp_path / "b")
        try:
            FolderLock(tmp_path / "a")
        except HeldError as error:
            (tmp_path / "told").write_text(str(error))
        own.release()

    os.waitpid(forked(child), 0)
    assert (tmp_path / "told").read_text().startswith(f"process {os.getpid()} on ")
    assert "HeldError" in taken_elsewhere(tmp_path / "a")
    lock.release()


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of open files")
def test_a_kernel_without_locks_of_open_files_is_served_by_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    lock = FolderLock(tmp_path)
    assert not (tmp_path / HOLDER).exists()
    with (tmp_path / "run.lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.release()


# -- file systems without locks ------------------------------------------------------------------------


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system have no locks: no such file system can be mounted here."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)


def holder(folder: Path, **changes: object) -> Path:
    """Write the holder file of another process, by default one that lives: this one's parent."""
    path = folder / HOLDER
    path.write_text(json.dumps(locking._identity(os.getppid()) | changes))
    return path


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_starts_and_leaves_nothing(tmp_path: Path) -> None:
    seen: list[Any] = []

    @on(Callback.on_step_end, at=1)
    def look(run: Run) -> None:
        seen.append(json.loads((tmp_path / HOLDER).read_text()))
        with pytest.raises(DirectoryError, match="by a run that has not ended"):
            tiny_trainer(directory=tmp_path, steps=1).fit(resume="auto")

    tiny_run(directory=tmp_path, callbacks=[look, Checkpoint()], steps=1)
    assert (seen[0]["pid"], seen[0]["host"]) == (os.getpid(), platform.node())
    assert seen[0]["start"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(HOLDER)]


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, rf"in use by process {os.getppid()} on .*if that process has ended, remove '.*run\.holder'\. Else wait for it"),
        ({"host": "other"}, r"process \d+ on other, which is not visible from here\. This file system has no locks"),
        ({"namespace": "pid:[1]"}, "which is not visible from here"),
    ],
)
def test_without_locks_a_holder_that_may_live_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = holder(tmp_path, **changes)
    before = path.read_text()
    with pytest.raises(DirectoryError, match=message):
        tiny_trainer(directory=tmp_path, steps=1).fit(resume="auto")
    assert path.read_text() == before


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_process_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    os.waitpid(ended := forked(lambda: None), 0)
    for changes in ({"pid": ended, "start": "1"}, {"start": "another time"}):
        holder(tmp_path, **changes)
        FolderLock(tmp_path).release()
    (tmp_path / HOLDER).write_text("")
    with pytest.raises(HeldError, match=r"a process that 'run\.holder' does not name"):
        FolderLock(tmp_path)
    os.utime(tmp_path / HOLDER, (1, 1))  # its writer was killed before it wrote
    FolderLock(tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("name", ["run.json", "run.lock"])
def test_a_pipe_instead_of_a_file_is_an_error_and_no_endless_wait(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DirectoryError):
        tiny_run(directory=tmp_path, steps=1)

"""The lock of a run's directory when its process is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cadenza.files.locking import FolderLock
from tests.files.test_locking import forked, taken_elsewhere


def test_a_forked_child_keeps_nothing_when_its_parent_is_killed(tmp_path: Path) -> None:
    read, write = os.pipe()

    def wait() -> None:
        os.write(write, f"{os.getpid()}\n".encode())  # by the child: what it does after a fork is done
        time.sleep(60)

    def parent() -> None:
        lock = FolderLock(tmp_path)
        forked(wait)
        time.sleep(60)
        lock.release()

    first = forked(parent)
    worker = int(os.read(read, 20))
    try:
        assert "HeldError" in taken_elsewhere(tmp_path)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.kill(worker, 0)  # it lives
        FolderLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)

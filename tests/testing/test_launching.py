"""Functions in several processes: how they end if one of them dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time

import pytest

from cadenza.testing import launch, launching


def test_the_other_processes_are_ended_soon_after_one_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending() -> None:
        if os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "5"], close_fds=False)  # it keeps the files of rank 1 open, as a loader's worker does
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    monkeypatch.setattr(launching, "GRACE_S", 0.5)
    with pytest.raises(BaseExceptionGroup, match=r"ranks \[0\] had not ended 0.5 s later, and were killed") as caught:
        launch(ending)
    assert [str(error) for error in caught.value.exceptions] == ["rank 1 ended without a result: signal SIGKILL"]


class Held:
    """Garbage that is destroyed by the process that made it alone: its destructor may wait for a thread of it."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(3)


def test_what_is_garbage_in_this_process_is_not_destroyed_in_the_others() -> None:
    gc.disable()
    try:
        Held()
        assert launch(gc.collect, 2) is not None
    finally:
        gc.enable()

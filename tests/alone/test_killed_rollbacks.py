"""A run that is killed in a rollback of `Recover` ends with the bits of a whole run."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run
from tests.callbacks.test_recover import decided, equal, recorded, trainer_in, weights_of

BAD = {100: math.nan}


class Kill(Callback):
    """Kills the process at a step of the part of the run with this many rollbacks, or when it begins again."""

    def __init__(self, step: int, rollbacks: int) -> None:
        self.step, self.rollbacks = step, rollbacks

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step and len(decided(run, "went back")) == self.rollbacks:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_setup(self, run: Run) -> None:
        if self.step == 0 and json.loads((run.info.directory / "run.json").read_text())["continued"]:  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trainer_in(tmp_path_factory.mktemp("whole"), BAD, epochs=1).fit()


@pytest.mark.parametrize("case", ["between", "while repeating", "later"])
def test_a_run_that_is_killed_in_a_rollback_ends_with_the_same_bits(tmp_path: Path, case: str, whole: Run) -> None:
    (went,) = decided(whole, "went back")
    kills: dict[str, Any] = {"between": (0, 0), "while repeating": (went["to"] + 1, 1), "later": (went["step"] + 3, 1)}
    if (child := os.fork()) == 0:
        try:
            trainer_in(tmp_path, BAD, Kill(*kills[case]), epochs=1).fit()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    run = trainer_in(tmp_path, BAD, epochs=1).fit(resume="auto")
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert equal(weights_of(run), weights_of(whole))
    assert run.history["train/loss"] == whole.history["train/loss"]
    assert recorded(run, "batch left out") == recorded(whole, "batch left out")

"""What a start and an end say to a person: where a run goes on, how to continue it, and what a changed script changes."""

from __future__ import annotations

import logging
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, ClipGradients
from cadenza.sinks import Console
from cadenza.testing import tiny_trainer


def test_a_signal_and_a_resume_say_where_the_run_goes_on_if_it_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @on(Callback.on_step_end)
    def kill(run: Run) -> None:
        if run.progress.step in (7, 8):
            os.kill(os.getpid(), signal.SIGTERM)

    def start(*more: Callback, resume: Any = "auto") -> str:
        with suppress(SystemExit):
            tiny_trainer(epochs=2, directory=tmp_path / "a", callbacks=[Checkpoint(), *more]).fit(resume=resume)
        return capsys.readouterr().err

    assert 'the run is saved as step-00000007: fit(resume="auto") goes on there\n' in start(kill, Console(), resume=False)
    assert "the run is saved as step-00000008: the same command again goes on there\n" in start(kill, Console())
    assert re.search(
        r"^resumed at step-00000008: step 8, epoch 2; it was written \d+:\d\d ago$", start(Console()), re.MULTILINE
    )
    assert "resumed at step-00000008: step 8, epoch 2" in (tmp_path / "a" / "console.log").read_text()


def test_nothing_is_said_of_a_resume_without_anyone_who_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (1, 2):
        tiny_trainer(epochs=epochs, directory=tmp_path / "a", callbacks=[Checkpoint()]).fit(resume="auto")
    assert capsys.readouterr().err == ""


def test_the_start_of_a_changed_script_after_the_end_of_its_run_says_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(rate: float, *more: Callback) -> None:
        callbacks = [Checkpoint(), *more]
        one = tiny_trainer(directory=tmp_path / "a", optimizer=lambda those: torch.optim.Adam(those, rate), callbacks=callbacks)
        one.fit(resume="auto")

    start(0.1)
    with caplog.at_level(logging.WARNING, "cadenza"):
        start(0.1)
        assert "other arguments" not in caplog.text
        start(0.5, ClipGradients(1.0))
    assert "other arguments, which changed nothing: callbacks + ClipGradients; lr 0.1 -> 0.5. To train with them" in caplog.text

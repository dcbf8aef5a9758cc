"""`Checkpoint(grace_s=...)`: when a save may take longer than the process has, the weights are written first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from cadenza import Callback, Run, load_weights, on
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.files.disk import Unflushed
from cadenza.testing import tiny_model, tiny_run, tiny_trainer


class SlowFiles(LocalFiles):
    """A storage where the state of a checkpoint takes long, or never arrives."""

    fails = False

    def write_tensors(self, path: str, *arguments: object) -> Facts:
        if "state" in path and ".tmp-" in path:
            time.sleep(0.1)
        if "state" in path and self.fails and arguments[0]:
            raise KeyboardInterrupt("killed")  # as a kill would: nothing after it takes place
        return super().write_tensors(path, *arguments)  # type: ignore[arg-type]


def names_written(directory: Path, grace_s: float | None, *, fails: bool = False) -> list[tuple[str, bool]]:
    """Save at step 2, then end by a signal at step 4; return each manifest that was written, and whether weights only."""
    written: list[tuple[str, bool]] = []

    @on(Callback.on_fit_start)
    def slow(run: Run) -> None:
        checkpoint.store.files = files = SlowFiles(directory / "checkpoints")
        commit = checkpoint.store._commit

        def noted(folder: str, facts: dict[str, object], parts: dict[str, object], later: Unflushed) -> object:
            written.append((f"step {facts['step']}", bool(facts["weights_only"])))
            return commit(folder, facts, parts, later)

        checkpoint.store._commit = noted  # type: ignore[method-assign, assignment]
        files.fails = False

    @on(Callback.on_step_end, at=4)
    def send(run: Run) -> None:
        assert isinstance(checkpoint.store.files, SlowFiles)
        checkpoint.store.files.fails = fails
        os.kill(os.getpid(), signal.SIGTERM)

    checkpoint = Checkpoint("2 steps", grace_s=grace_s, background=False)
    with pytest.raises(KeyboardInterrupt if fails else SystemExit):
        tiny_trainer(directory=directory, steps=9, callbacks=[checkpoint, slow, send]).fit()
    return written


def test_with_enough_time_or_no_limit_only_the_whole_checkpoint_is_written(tmp_path: Path) -> None:
    for name, grace_s in (("none", None), ("long", 60.0)):
        assert names_written(tmp_path / name, grace_s) == [("step 2", False), ("step 4", False)]


def test_with_too_little_the_weights_come_first_and_the_whole_checkpoint_replaces_them(tmp_path: Path) -> None:
    assert names_written(tmp_path, 0.05) == [("step 2", False), ("step 4", True), ("step 4", False)]
    newest, skipped = Store(tmp_path / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, skipped) == (4, [])
    assert len(Store(tmp_path / "checkpoints").saved()) == 2  # of steps 2 and 4


def test_who_is_killed_in_between_has_the_weights_and_continues_at_the_checkpoint_before(tmp_path: Path) -> None:
    assert names_written(tmp_path, 0.05, fails=True) == [("step 2", False), ("step 4", True)]
    newest, [skipped] = Store(tmp_path / "checkpoints").latest()
    assert newest is not None
    assert newest.step == 2
    assert "it holds weights only" in skipped
    model = tiny_model()
    load_weights(tmp_path, model)
    expected = dict(tiny_run(steps=4).model.named_parameters())
    assert torch.equal(model.weight, expected["weight"])


def test_a_grace_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="grace_s must be above 0 seconds, or None if no limit is known; got 0"):
        Checkpoint(grace_s=0)

"""A run with callbacks of Lightning that SIGTERM ends continues to the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the callbacks are those of Lightning: pip install lightning")

import lightning.pytorch as pl
import torch

from cadenza.callbacks import Checkpoint
from tests.adapters.lightning.home import Recorder, native_trainer


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_start", "on_train_epoch_end"])
def test_a_run_that_a_signal_ended_continues_to_the_same_bits(tmp_path: Path, hook: str) -> None:
    class Signal(pl.Callback):
        def __init__(self) -> None:
            setattr(self, hook, self.send)

        def send(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == (2 if hook == "on_train_batch_end" else 3) and not trainer.received_sigterm:
                os.kill(os.getpid(), signal.SIGTERM)

    def make(directory: str, *others: Any) -> Any:
        stop = pl.callbacks.EarlyStopping("val_loss", patience=9, min_delta=1.0)
        callbacks = [*others, stop, Checkpoint(every="2 steps")]
        return native_trainer(callbacks, max_epochs=3, directory=tmp_path / directory), stop

    recorder = Recorder()
    with pytest.raises(SystemExit):
        make("cut", Signal(), recorder)[0].fit()
    assert "on_train_end" not in recorder.names()
    (trainer, stop), (whole, other) = make("cut"), make("whole")
    again, run = trainer.fit(resume="auto"), whole.fit()
    assert torch.equal(again.model.weight, run.model.weight)
    assert stop.state_dict() == other.state_dict()
    assert again.history["eval/loss"] == run.history["eval/loss"]

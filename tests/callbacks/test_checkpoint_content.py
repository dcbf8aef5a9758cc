"""Checkpoint: what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from cadenza import Callback, load_weights
from cadenza.callbacks import Checkpoint
from cadenza.errors import CheckpointError, CheckpointMismatchError, StateError
from cadenza.testing import Recorder, tiny_model, tiny_run, tiny_trainer


def test_weights_only_writes_the_model_alone_and_no_run_continues_there(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[Checkpoint("5 steps", weights_only=True)], seed=1)
    saved = tmp_path / "checkpoints" / "step-00000005"
    assert json.loads((saved / "state.json").read_text(encoding="utf-8")) == {}
    model = tiny_model()
    load_weights(saved, model)
    assert torch.equal(model.weight, cast("nn.Linear", run.model).weight)
    with pytest.raises(CheckpointError, match="step-00000005: it holds weights only"):
        tiny_trainer(directory=tmp_path, epochs=2, seed=1).fit(resume="auto")
    with pytest.raises(CheckpointMismatchError, match="holds weights only, and a run cannot continue there: use load_weights"):
        tiny_trainer(directory=tmp_path / "other", epochs=2, seed=1).fit(resume=saved)


def test_a_state_that_cannot_be_saved_is_named_before_the_first_step(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"open": {"file": print}}

    recorder = Recorder(Callback.on_step_start)
    with pytest.raises(StateError, match=r"Odd\.open\.file cannot be saved: .* got builtin_function_or_method"):
        tiny_run(directory=tmp_path, callbacks=[recorder, Odd(), Checkpoint()])
    assert not recorder.seen

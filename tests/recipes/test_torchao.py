"""The quantized optimizer states of torchao in checkpoints: the same bits after a resume, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit

from cadenza import Callback, Run, Trainer, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.errors import CheckpointFormatError, CheckpointMismatchError, StateError
from cadenza.loading import TensorBatches
from cadenza.status.plain import decode, encode, first_difference, same


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def make(kind: Any, directory: Path, *callbacks: Any, dtype: torch.dtype = torch.float32) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(96, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)
    return Trainer(
        model,
        lambda parameters: kind(parameters, lr=1e-3),
        TensorBatches(inputs.to(dtype), torch.arange(96) % 8, batch_size=16, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=3,
        directory=directory,
        progress=False,
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
            Checkpoint("2 steps"),
            *callbacks,
        ],
    )


@on(Callback.on_batch_start, at=8)
def cut(run: Run, batch: Any) -> None:
    raise KeyboardInterrupt


def interrupted(kind: Any, directory: Path, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(kind, directory, cut, **options).fit(resume="auto")


@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit, AdamW4bit, AdamWFp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_continues_has_the_weights_and_states_of_one_that_does_not_stop(
    kind: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    interrupted(kind, tmp_path / "resumed", dtype=dtype)
    resumed, whole = make(kind, tmp_path / "resumed", dtype=dtype), make(kind, tmp_path / "whole", dtype=dtype)
    first, second = resumed.fit(resume="auto"), whole.fit()
    assert first.progress.origin.step == 6
    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    states = [run.optimizers[0].state_dict() for run in (first, second)]
    assert first_difference(states[0], states[1]) is None
    assert isinstance(states[0]["param_groups"][0]["lr"], torch.Tensor)


def test_a_difference_of_one_bit_in_a_quantized_state_is_found() -> None:
    one, other = OptimState8bit.zeros((64, 64)), OptimState8bit.zeros((64, 64))
    assert same(one, other)
    other.codes[3, 5] += 1
    assert first_difference({"exp_avg": one}, {"exp_avg": other}, "state") is not None


def test_a_checkpoint_holds_the_parts_of_a_state_and_no_more(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make(AdamW8bit, tmp_path).fit()
    tensors = load_file(sorted((tmp_path / "checkpoints").glob("step-*"))[-1] / "state.safetensors")
    state = {name.split("].state.0.")[1]: tensor for name, tensor in tensors.items() if "].state.0." in name}
    assert {name: tensor.dtype for name, tensor in state.items() if "exp_avg." in name} == {
        "exp_avg.tensors.codes": torch.uint8,
        "exp_avg.tensors.scale": torch.float32,
        "exp_avg.tensors.qmap": torch.float32,
    }


def test_without_the_class_weights_can_be_loaded_and_a_resume_names_it(tmp_path: Path) -> None:
    interrupted(AdamW8bit, tmp_path)
    allowed = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()
        load_weights(tmp_path, make(AdamW8bit, tmp_path).model)
        with pytest.raises(
            CheckpointMismatchError, match=r"torchao\.optim\.subclass_8bit\.OptimState8bit, which torch may not"
        ):
            make(AdamW8bit, tmp_path).fit(resume=str(sorted((tmp_path / "checkpoints").glob("step-*"))[0]))
        with pytest.raises(StateError, match=r"torch\.serialization\.add_safe_globals\(\[OptimState8bit\]\)"):
            encode({"state": OptimState8bit.zeros((64, 64))})
    finally:
        torch.serialization.add_safe_globals(allowed)


def test_parts_that_do_not_fit_and_an_unknown_number_format_are_refused() -> None:
    plain, tensors = encode(OptimState8bit.zeros((64, 64)))
    plain["$built"]["tensors"]["codes"] = plain["$built"]["tensors"]["scale"]
    with pytest.raises(CheckpointFormatError, match="OptimState8bit in the checkpoint do not fit"):
        decode(plain, tensors)
    with pytest.raises(CheckpointFormatError, match="number format 'load', which torch does not have"):
        decode({"$dtype": "load"}, {})


def test_a_quantized_weight_is_an_error_at_the_start(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    trainer = make(torch.optim.SGD, tmp_path)
    quantize_(trainer.model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    with pytest.raises(StateError, match=r"the weight '0\.weight' cannot be saved.*quantize the model after the training"):
        trainer.fit()

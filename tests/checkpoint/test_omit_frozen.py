"""`OmitFrozen`: small checkpoints, exact resumes, and errors for another base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, OmitFrozen
from cadenza.errors import CheckpointMismatchError
from cadenza.loading import TensorBatches


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 2))
    network[0].requires_grad_(False)
    return network


def make(directory: Path, *callbacks: Any, seed: int = 0, **options: Any) -> Trainer:
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return Trainer(
        model(seed),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        TensorBatches(inputs, (inputs[:, 0] > 0).long(), batch_size=8, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=1,
        directory=directory,
        progress=False,
        driver="single",
        device="cpu",
        callbacks=[OmitFrozen(), Checkpoint("4 steps", **options), *callbacks],
    )


def files(directory: Path) -> list[dict[str, Tensor]]:
    return [load_file(one / "model.safetensors") for one in sorted((directory / "checkpoints").glob("step-*"))]


@on(Callback.on_batch_start, at=11)
def cut(run: Run, batch: Any) -> None:
    raise KeyboardInterrupt


def test_a_checkpoint_has_what_is_trained_and_buffers_and_a_resume_is_exact(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "resumed", cut).fit(resume="auto")
    assert all(not {"0.weight", "0.bias"} & held.keys() and "1.running_mean" in held for held in files(tmp_path / "resumed"))
    resumed, whole = make(tmp_path / "resumed"), make(tmp_path / "whole")
    assert resumed.fit(resume="auto").progress.origin.step in (8, 10)
    whole.fit()
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_are_loaded_into_a_model_with_the_same_base_and_no_other(weights_only: bool, tmp_path: Path) -> None:
    trainer = make(tmp_path, weights_only=weights_only)
    trainer.fit()
    same, other = model(), model(seed=5)
    load_weights(tmp_path, same)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in trainer.model.state_dict().items())
    before = other.state_dict()["3.weight"].clone()
    with pytest.raises(CheckpointMismatchError, match=r"2 of them differ in this model: 0\.weight, 0\.bias"):
        load_weights(tmp_path, other)
    assert torch.equal(other.state_dict()["3.weight"], before)


def test_a_resume_with_another_base_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, cut).fit(resume="auto")
    newest = str(sorted((tmp_path / "checkpoints").glob("step-*"))[-1])
    with pytest.raises(CheckpointMismatchError, match="Build the model from the same pretrained weights"):
        make(tmp_path, seed=5).fit(resume=newest)


def test_a_frozen_weight_that_changes_is_saved_from_then_on(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=6)
    def change(run: Run) -> None:
        with torch.no_grad():
            run.model.get_parameter("0.bias").add_(1.0)
            run.model.get_parameter("0.weight").add_(0.0)

    make(tmp_path, change, keep_last=None).fit()
    first, *later = ["0.bias" in held for held in files(tmp_path)]
    assert not first
    assert all(later)
    assert later
    assert not any("0.weight" in held for held in files(tmp_path))


def test_a_weight_that_a_fused_optimizer_trains_later_is_saved(tmp_path: Path) -> None:
    """A fused optimizer changes a tensor without a new version in autograd."""

    @on(Callback.on_step_start)
    def thaw(run: Run) -> None:
        run.model.get_parameter("0.bias").requires_grad_(run.progress.step >= 5)

    trainer = make(tmp_path, thaw)
    run = trainer.fit()
    assert run.optimizers[0].param_groups[0]["fused"]
    assert "0.bias" in files(tmp_path)[-1]
    assert torch.equal(files(tmp_path)[-1]["0.bias"], trainer.model.get_parameter("0.bias"))


def test_without_frozen_weights_it_is_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.model.requires_grad_(True)
    with pytest.raises(ValueError, match="every parameter of the model has requires_grad=True"):
        trainer.fit()

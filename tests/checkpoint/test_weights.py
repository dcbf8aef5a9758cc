"""Weights alone: out of checkpoints and safetensors files into models, and checkpoints without frozen weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, load_weights, on, save_weights, supervised
from cadenza.callbacks import Checkpoint, OmitFrozen
from cadenza.errors import CheckpointError, CheckpointFormatError, CheckpointMismatchError
from cadenza.loading import TensorBatches
from cadenza.status.encoding import same
from cadenza.testing import tiny_model, tiny_trainer
from tests.checkpoint.store.contents import Bomb


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def run_with_checkpoints(folder: Path, steps: int = 4) -> nn.Module:
    trainer = tiny_trainer(steps=steps, directory=folder, callbacks=[Checkpoint("2 steps", keep_last=None)])
    trainer.fit()
    return trainer.model


def test_what_is_saved_is_loaded_with_buffers_dtypes_and_ties_and_other_tools_read_the_file(tmp_path: Path) -> None:
    model = network().to(torch.bfloat16)
    model(torch.ones(4, 2, dtype=torch.bfloat16))
    save_weights(model, tmp_path / "new" / "weights.safetensors")
    other = network().to(torch.bfloat16)
    assert load_weights(tmp_path / "new" / "weights.safetensors", other) == []
    assert same(dict(other.state_dict()), dict(model.state_dict()))

    tied, fresh = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    tied[1].weight = tied[0].weight
    save_weights(tied, tmp_path / "tied.safetensors")
    load_weights(tmp_path / "tied.safetensors", fresh)
    assert same(dict(fresh.state_dict()), dict(tied.state_dict()))

    save_weights(tiny_model(), tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["bias", "weight"]
        assert file.get_tensor("weight").tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("", 4),
        ("checkpoints", 4),
        ("checkpoints/", 4),
        ("checkpoints/step-00000002", 2),
        ("checkpoints/step-00000004/model.safetensors", 4),
    ],
)
def test_a_run_a_folder_of_checkpoints_one_of_them_and_its_file_are_all_taken(tmp_path: Path, path: str, step: int) -> None:
    run_with_checkpoints(tmp_path / "run")
    expected = run_with_checkpoints(tmp_path / "other", steps=step)
    model = tiny_model()
    load_weights(f"{tmp_path}/run/{path}", model)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))


def test_the_newest_that_verifies_is_taken(tmp_path: Path) -> None:
    run_with_checkpoints(tmp_path)
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").unlink()
    model = tiny_model()
    load_weights(tmp_path, model)
    expected = run_with_checkpoints(tmp_path / "other", steps=2)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"4: state\.json is missing; step-00000002: state\.json is missing"):
        load_weights(tmp_path, model)


def test_a_misfit_is_an_error_that_lists_every_difference_and_changes_nothing(tmp_path: Path) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), tmp_path / "w.safetensors")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as caught:
        load_weights(tmp_path / "w.safetensors", model)
    text = str(caught.value)
    assert "It differs in 8: 0.weight has shape (4, 2), the model's (3, 2); 0.bias has shape (4,), the model's (3,)" in text
    assert "2.weight is missing; 2.bias is missing" in text
    assert text.endswith("strict=False to take what fits.")
    assert same(dict(model.state_dict()), before)


def test_what_fits_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4), nn.Identity(), nn.Linear(1, 1)), tmp_path / "w.safetensors")
    model = network()
    kept = model.get_parameter("2.weight").clone()
    misfits = load_weights(tmp_path / "w.safetensors", model, strict=False)
    assert {name.split()[0] for name in misfits} == {
        *(f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")), "2.weight", "2.bias", "3.weight", "3.bias"
    }  # fmt: skip
    assert torch.equal(model.get_parameter("2.weight"), kept)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_pickle_is_refused_whatever_its_name_and_never_runs(tmp_path: Path, name: str) -> None:
    path, bomb = tmp_path / name, Bomb(tmp_path / "mark")
    torch.save(bomb, tmp_path / "bomb")
    for content in (pickle.dumps(bomb), (tmp_path / "bomb").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CheckpointFormatError, match=r"A pickle \(.pt, .*could run code and is not read here: load it with"):
            load_weights(path, tiny_model())
        assert not (tmp_path / "mark").exists()


def test_a_folder_without_weights_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", "nowhere"):
        with pytest.raises(
            CheckpointError, match=r"no weights at .*: expected a checkpoint, a run directory or a .safetensors"
        ):
            load_weights(path, tiny_model())


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_extra_state_of_a_module_is_no_misfit(tmp_path: Path) -> None:
    trainer = tiny_trainer(model=WithExtraState(1, 1), directory=tmp_path, callbacks=[Checkpoint()])
    trainer.fit()
    model = WithExtraState(1, 1)
    assert load_weights(tmp_path, model) == []
    assert torch.equal(model.weight, trainer.model.get_parameter("weight"))


# -- OmitFrozen -----------------------------------------------------------------------------------------


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

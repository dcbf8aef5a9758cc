"""What training makes of a model and its optimizers is resumed: buffers of another shape, parameter groups, compiled names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, export_weights, load_weights, on
from cadenza.callbacks import BestWeights, Checkpoint, Ema, Evaluate, Swa
from cadenza.errors import CheckpointMismatchError
from cadenza.status.encoding import first_difference
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer


class Filled(nn.Module):
    """Its forward pass fills a buffer that is None, and lets a queue grow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.scale: Tensor | None
        self.register_buffer("scale", None)
        self.register_buffer("queue", torch.zeros(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = x.detach().mean(0) if self.scale is None else self.scale
            self.queue: Tensor = torch.cat([self.queue, x.detach()])[-7:]
        return self.inner(x) + (self.queue.mean() if len(self.queue) else 0)  # type: ignore[no-any-return]


class Observed(Filled):
    """Loads buffers of another shape itself, as the observers of quantization do."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
        for name in ("scale", "queue"):
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, torch.empty_like(state_dict[f"{prefix}{name}"]))
        super()._load_from_state_dict(state_dict, prefix, *more)


def trainer(directory: Path, model: nn.Module, *callbacks: Callback, **arguments: Any) -> Trainer:
    saves = Checkpoint("2 steps", background=False)
    return tiny_trainer(
        model=model, callbacks=[*callbacks, saves], directory=directory, **{"epochs": 2, "seed": 1, **arguments}
    )


def failing_at(step: int) -> Callback:
    def fail(run: Run) -> None:
        raise KeyboardInterrupt

    return on(Callback.on_step_start, at=step)(fail)


def state(one: Trainer) -> dict[str, Any]:
    averages = {callback.name: callback.state_dict() for callback in one.callbacks if isinstance(callback, Ema | Swa)}
    return {name.replace("_orig_mod.", ""): value for name, value in one.model.state_dict().items()} | averages


def resumed(directory: Path, make: Callable[..., Trainer], step: int = 6, then: Callable[..., Trainer] | None = None) -> Run:
    """Interrupt a run and continue it; compare it with one that was not interrupted."""
    whole, cut, continued = (
        make(directory / "whole"),
        make(directory / "cut", failing_at(step)),
        (then or make)(directory / "cut"),
    )
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    run = continued.fit(resume="auto")
    assert run.progress.origin.step == step - 2 + step % 2
    assert first_difference(state(whole), state(continued)) is None
    return run


@pytest.mark.parametrize("kind", [Filled, Observed])
def test_buffers_that_get_their_shape_in_training_come_back_also_in_averages(kind: type[Filled], tmp_path: Path) -> None:
    def make(directory: Path, *more: Callback) -> Trainer:
        torch.manual_seed(0)
        averages = Ema(0.9, "3 steps"), Swa(0.5, "1 step", use_at_end=False)
        evaluations = Evaluate(tiny_loader(), weights="ema"), BestWeights("eval/loss", "max")
        return trainer(directory, kind(), *averages, *evaluations, *more)

    run = resumed(tmp_path, make)
    own = {name: value.clone() for name, value in run.model.state_dict().items()}
    made, loaded = make(tmp_path / "cut"), kind()
    made.evaluate(tiny_loader(), which="last")
    assert made.model.state_dict()["queue"].shape == (0, 1), "the evaluation leaves the shape"
    load_weights(tmp_path / "cut", loaded, weights="model")
    assert len(loaded.queue) == 7
    load_weights(tmp_path / "cut", loaded, weights="ema")
    assert first_difference(own, dict(run.model.state_dict())) is None


def test_a_model_decides_itself_which_weights_of_a_file_it_takes(tmp_path: Path) -> None:
    trainer(tmp_path / "run", Observed()).fit()
    export_weights(tmp_path / "run", tmp_path / "weights.safetensors")
    load_weights(tmp_path / "weights.safetensors", taken := Observed())
    assert len(taken.queue) == 7
    refused = Filled()
    before = {name: value.clone() for name, value in refused.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"queue has shape \(7, 1\), the model's \(0, 1\)"):
        load_weights(tmp_path / "weights.safetensors", refused)
    assert first_difference(before, dict(refused.state_dict())) is None


@pytest.mark.parametrize(("first", "then"), [("whole", "not"), ("not", "whole"), ("part", "not"), ("part", "whole")])
def test_the_names_of_a_compiled_model_are_those_of_the_model(first: str, then: str, tmp_path: Path) -> None:
    def make(compiled: str, directory: Path, *more: Callback) -> Trainer:
        torch.manual_seed(0)
        part: Any = torch.compile(nn.Linear(1, 1), backend="eager") if compiled == "part" else nn.Linear(1, 1)
        model: Any = nn.Sequential(part)
        model = torch.compile(model, backend="eager") if compiled == "whole" else model
        return trainer(directory, model, Ema(0.9, use_at_end=False), *more)

    def of(compiled: str) -> Callable[..., Trainer]:
        return lambda directory, *more: make(compiled, directory, *more)

    resumed(tmp_path, of(first), then=of(then))
    load_weights(tmp_path / "whole", nn.Sequential(nn.Linear(1, 1)), weights="ema")


class Unfreezes(Callback):
    """Lets the optimizer have the second layer from the second epoch on."""

    def on_epoch_start(self, run: Run) -> None:
        if run.progress.epoch == 1:
            layer: Any = run.model[1]  # type: ignore[index]  # a Sequential
            run.optimizers[0].add_param_group({"params": list(layer.requires_grad_(True).parameters()), "lr": 0.5})


@pytest.mark.parametrize("step", [4, 14])
def test_parameter_groups_that_a_hook_added_come_back(step: int, tmp_path: Path) -> None:
    def make(directory: Path, *more: Callback) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[0].parameters(), 0.1)
        return trainer(directory, model, Unfreezes(), *more, optimizer=optimizer, epochs=4)

    resumed(tmp_path, make, step)


def test_what_cannot_come_back_is_named_at_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_fit_start)
    def add(run: Run) -> None:
        run.model.head = nn.Linear(1, 1)
        run.optimizers[0].add_param_group({"params": list(run.model.head.parameters())})

    with caplog.at_level(logging.WARNING, "cadenza"):
        trainer(tmp_path, tiny_model(), add).fit()
    told = [one.message for one in caplog.records if "changed what the run trains" in one.message]
    assert len(told) == 1
    assert "head.weight, head.bias" in told[0]


def test_other_values_of_tied_weights_are_not_lost_in_silence(tmp_path: Path) -> None:
    def layers(*, tied: bool) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        if tied:
            model[1].weight = model[0].weight
        return model

    trainer(tmp_path / "own", layers(tied=False)).fit()
    trainer(tmp_path / "tied", layers(tied=True)).fit()
    model = layers(tied=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"1\.weight and 0\.weight have other values, and the model ties them"):
        load_weights(tmp_path / "own", model)
    assert first_difference(before, dict(model.state_dict())) is None
    assert load_weights(tmp_path / "tied", model) == []
    assert load_weights(tmp_path / "tied", layers(tied=False)) == []
    assert len(load_weights(tmp_path / "own", model, strict=False)) == 1
    with pytest.raises(CheckpointMismatchError, match=r"1\.weight is tied to 0\.weight now|parameter groups"):
        trainer(tmp_path / "own", layers(tied=True), epochs=3).fit(resume="auto")

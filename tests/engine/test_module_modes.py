"""The modes of modules: who trains in evaluation mode, from the start of a run to its end, and after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on
from cadenza.callbacks import Checkpoint, Evaluate, FindLearningRate, Recover
from cadenza.callbacks.freezing import Freeze
from cadenza.testing import tiny_loader, tiny_trainer


class Network(nn.Module):
    """A backbone with statistics and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.backbone(inputs))
        return outputs


class Defining(Network):
    """A model whose `train` leaves its backbone in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.backbone.eval()
        return self


def with_frozen_backbone() -> Network:
    model = Network()
    model.backbone.requires_grad_(False).eval()
    return model


def in_evaluation_mode(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if not module.training}


BACKBONE = {"backbone", "backbone.0", "backbone.1", "backbone.2"}


class Modes(Callback):
    """Notes the modules that are in evaluation mode in a step."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_before_backward(self, run: Run, outputs: Any) -> None:
        self.seen.append(in_evaluation_mode(run.model))


def by_fit(model: nn.Module, **arguments: Any) -> None:
    trained(model, **arguments).fit(resume="auto")


def by_steps(model: nn.Module, **arguments: Any) -> None:
    for step in trained(model, **arguments).steps(resume="auto"):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))


def by_attach(model: nn.Module, *, epochs: int, **arguments: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer, max_steps=5 * epochs, resume="auto", progress=False, **arguments) as loop:
        while not loop.over():
            with loop.step():
                loop.backward(model(torch.ones(2, 1)).square().mean())
                loop.update()


def trained(model: nn.Module, **arguments: Any) -> Trainer:
    return tiny_trainer(**{"model": model, "seed": 1, **arguments})


@pytest.mark.parametrize("train", [by_fit, by_steps, by_attach])
@pytest.mark.parametrize("make", [with_frozen_backbone, Defining])
def test_a_part_in_evaluation_mode_stays_so_after_evaluations_in_later_epochs_and_after_a_resume(
    make: Callable[[], Network], train: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modes = Modes()
    evaluate = Evaluate(tiny_loader(1), every="3 steps", compute=lambda model, batch: model(batch[0]).mean())
    for epochs in (1, 3):
        model = make()
        train(model, epochs=epochs, directory=tmp_path, callbacks=[evaluate, Checkpoint("5 steps"), modes])
        statistics = model.backbone.get_submodule("1").get_buffer("running_mean")
        assert torch.equal(statistics, torch.zeros(4))
    assert modes.seen == [BACKBONE] * 15
    assert "evaluation mode" not in caplog.text


def test_a_model_in_evaluation_mode_is_put_into_training_mode_whole(caplog: pytest.LogCaptureFixture) -> None:
    modes, trainer = Modes(), trained(with_frozen_backbone().eval())
    trainer.callbacks.append(modes)
    plan = str(trainer.plan())
    trainer.fit()
    assert modes.seen == [set()] * 5
    assert "evaluation mode" not in plan + caplog.text


def test_frozen_parts_in_evaluation_mode_are_a_line_of_the_plan_and_trained_ones_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "stay in evaluation mode: backbone\n" in str(trained(with_frozen_backbone()).plan())
    model = Network()
    model.backbone[1:].eval()
    trainer = trained(model, epochs=2)
    assert "stay in evaluation mode: backbone.2\n" in str(trainer.plan())
    trainer.fit()
    warning = "1 module with parameters that are trained, in evaluation mode: backbone.1. Their dropout is off"
    assert warning in caplog.text
    assert "Call model.train() before the run" in caplog.text
    caplog.clear()
    trainer.model.train()
    trainer.fit()
    assert "evaluation mode" not in caplog.text


@pytest.mark.parametrize("fails", [False, True], ids=["a rollback", "an error"])
def test_a_run_that_goes_back_has_the_flags_of_its_checkpoint(fails: bool, tmp_path: Path) -> None:
    """A hook changes them in step 4, step 5 fails, and the run goes back to step 3."""
    modes, seen = Modes(), list[bool]()
    broken = tiny_loader(9)[4][0][0]

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0]).mean()
        if not torch.equal(batch[0][0], broken):
            seen.append(all(one.requires_grad for one in model.parameters()))
        elif fails and len(seen) == 4:
            raise MemoryError("on purpose")
        return outputs * (1 if fails or not torch.equal(batch[0][0], broken) else math.nan)

    @on(Callback.on_step_end, at=4)
    def freeze(run: Run) -> None:
        run.model.get_submodule("backbone").requires_grad_(False).eval()

    callbacks = [Checkpoint("3 steps"), modes, freeze, *([] if fails else [Recover()])]
    trainer = trained(Network(), compute_loss=compute_loss, callbacks=callbacks, directory=tmp_path, steps=6, batches=9)
    with pytest.raises(MemoryError) if fails else nullcontext():
        trainer.fit()
    if fails:
        trainer.fit(resume="step-00000003")
    assert modes.seen[-3:] == [set(), BACKBONE, BACKBONE]
    assert seen[-2:] == [True, False]


def test_freeze_leaves_layers_in_evaluation_mode_that_were_in_it() -> None:
    model = Network()
    model.backbone[1].eval()
    trained(model, callbacks=[Freeze("backbone", until="2 steps")]).fit()
    assert in_evaluation_mode(model) == {"backbone.1"}


def test_a_trial_has_the_modes_of_the_run() -> None:
    modes = list[set[str]]()
    model = with_frozen_backbone()
    model.head.register_forward_pre_hook(lambda *_: modes.append(in_evaluation_mode(model)))
    trained(model, callbacks=[FindLearningRate(steps=10)]).fit()
    assert modes == [BACKBONE] * 15


def test_the_start_walks_over_the_modules_of_a_model_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks, walk = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), list[nn.Module](), nn.Module.named_modules

    def note(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        walks.append(module)
        return walk(module, *arguments, **options)

    monkeypatch.setattr(nn.Module, "named_modules", note)
    counts: list[int] = []
    count = on(Callback.on_step_start)(lambda run: counts.append(sum(module is model for module in walks)))
    tiny_trainer(model=model, steps=1, callbacks=[count]).fit()
    assert counts[0] <= 5


@pytest.mark.parametrize("on_instance", [True, False])
def test_a_module_with_its_own_train_is_asked_also_in_training_mode(on_instance: bool) -> None:
    class Own(nn.Linear):
        def train(self, mode: bool = True) -> Own:
            self.asked = True
            return super().train(mode)

    model = (nn.Linear if on_instance else Own)(1, 1)
    model.asked = False  # type: ignore[assignment]
    if on_instance:
        model.train = lambda mode=True: setattr(model, "asked", True)  # type: ignore[assignment,return-value]
    tiny_trainer(model=model, steps=1).fit()
    assert model.asked

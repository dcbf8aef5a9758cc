"""The state of an optimizer comes back in the number formats in which it was saved, whatever those of the weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer
from cadenza.timetravel import replay_step

FORMATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool]


class Formats(Optimizer):
    """Keeps a tensor of each number format, and takes its step from the moment of one of them."""

    def __init__(self, parameters: Iterable[nn.Parameter], moment: torch.dtype = torch.bfloat16) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.moment = moment

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(count=0, nested={"kinds": [torch.ones(3).to(one) for one in FORMATS]})
                state["moment"] = torch.zeros_like(parameter, dtype=self.moment)
            state["count"] += 1
            state["moment"].mul_(0.9).add_(parameter.grad.to(self.moment), alpha=0.3)
            parameter.sub_(self.param_groups[0]["lr"] * state["moment"].to(parameter.dtype))


class Masters(Optimizer):
    """Trains weights of fp32, of which the model has copies in bf16."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.detach().float())
            master.sub_(self.param_groups[0]["lr"] * parameter.grad.float())
            parameter.copy_(master)


class Lookahead(Optimizer):
    """Wraps Adam. Its state has a form of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        held = list(parameters)
        super().__init__(held, {"lr": 0.05})
        self.inner, self.steps = torch.optim.Adam(held, lr=0.05), 0
        self.param_groups, self.slow = self.inner.param_groups, [one.detach().clone() for one in held]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.steps = self.inner.param_groups, state_dict["steps"]
        self.slow = [one.clone() for one in state_dict["slow"]]


class Listed(Lookahead):
    """Has the names of torch's own optimizers in its state, for other things."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {"state": [state.pop("inner")], "param_groups": self.inner.state_dict()["param_groups"], **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "inner": state_dict["state"][0]})


Made = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, tuple[Made, torch.dtype]] = {
    "bf16 moments of fp32 weights": (Formats, torch.float32),
    "fp64 moments of fp32 weights": (lambda parameters: Formats(parameters, torch.float64), torch.float32),
    "fp32 masters of bf16 weights": (Masters, torch.bfloat16),
    "a state of its own form": (Lookahead, torch.float32),
    "a state of its own form under the names of torch": (Listed, torch.float32),
}


def trainer(directory: Path, optimizer: Made, weights: torch.dtype, *callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(40, 3, dtype=weights)
    loader = [(part, part.sum(1, keepdim=True)) for part in inputs.split(4)]
    keep = Checkpoint("3 steps", keep_last=None)
    model = nn.Linear(3, 1, dtype=weights)
    return Trainer(
        model,
        optimizer,
        loader,
        supervised(nn.MSELoss()),
        max_epochs=1,
        seed=1,
        directory=directory,
        callbacks=[keep, *callbacks],
    )


def formats(tree: Any) -> Any:
    """Return a nested state with the number format of each tensor in its place."""
    if isinstance(tree, Tensor):
        return tree.dtype
    if isinstance(tree, dict):
        return {key: formats(value) for key, value in tree.items()}
    return [formats(value) for value in tree] if isinstance(tree, list | tuple) else type(tree)


def weight_of(trained: Trainer) -> Tensor:
    return trained.model.get_parameter("weight")


@on(Callback.on_step_start, at=8)
def cut(run: Run) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_formats_and_the_bits_of_one_that_was_not_cut(name: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", *OPTIMIZERS[name])
    expected = whole.fit().optimizers[0].state_dict()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", *OPTIMIZERS[name], cut).fit()
    resumed = trainer(tmp_path / "cut", *OPTIMIZERS[name])
    run = resumed.fit(resume="auto")
    assert run.progress.origin.step > 0
    assert formats(run.optimizers[0].state_dict()) == formats(expected)
    assert torch.equal(weight_of(resumed), weight_of(whole))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repeated_step_has_the_loss_of_the_record(name: str, tmp_path: Path) -> None:
    losses: list[float] = []

    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        assert run.loss is not None
        losses.append(run.loss.item())

    trainer(tmp_path, *OPTIMIZERS[name], note).fit()
    with replay_step(trainer(tmp_path, *OPTIMIZERS[name]), tmp_path, 8) as again:
        assert again.step_once() == losses[7]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_a_loop_keeps_has_the_formats_and_the_bits_too(name: str, tmp_path: Path) -> None:
    make, weights = OPTIMIZERS[name]

    def trained(directory: Path, steps: int) -> tuple[Any, Tensor]:
        beside = nn.Linear(1, 1, bias=False, dtype=weights)
        nn.init.zeros_(beside.weight)
        optimizer = make(beside.parameters())
        with tiny_trainer(steps=steps, directory=directory, callbacks=[Checkpoint("1 step")]).steps(resume="auto") as loop:
            loop.keep("beside", beside)
            loop.keep("optimizer", optimizer)
            for step in loop:
                for inputs, targets in step:
                    step.backward(nn.functional.mse_loss(step.run.model(inputs), targets))
                optimizer.zero_grad()
                (beside.weight - 3).square().sum().backward()
                optimizer.step()
        return formats(optimizer.state_dict()), beside.weight

    expected, weight = trained(tmp_path / "whole", 7)
    trained(tmp_path / "cut", 4)
    found, resumed = trained(tmp_path / "cut", 7)
    assert found == expected
    assert torch.equal(resumed, weight)

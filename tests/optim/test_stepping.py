"""The update of the weights without torch's record for a profiler: only where nobody could tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, ExponentialLR, LRScheduler, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

from cadenza.optim import stepping
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer

Make = Callable[[Any], Optimizer]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    made = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))]
    for one in made:
        one.grad = torch.randn_like(one)
    return made


def has_gone_through_torchs_wrapper(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Step, and return whether ``optimizer.step`` as torch makes it was called: it opens a record by this name."""
    names: list[str] = []

    class Noted(torch.autograd.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            names.append(name)
            super().__init__(name, args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "record_function", Noted)
        stepping.step(optimizer)
    return any(one.startswith("Optimizer.step#") for one in names)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda given: torch.optim.SGD(given, lr=0.1), id="SGD"),
        pytest.param(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True), id="momentum"),
        pytest.param(lambda given: torch.optim.AdamW(given, lr=0.1), id="AdamW"),
        pytest.param(lambda given: torch.optim.AdamW(given, lr=0.1, fused=True), id="fused AdamW"),
        pytest.param(lambda given: torch.optim.Adam(given, lr=0.1, amsgrad=True, foreach=True), id="foreach Adam"),
        pytest.param(lambda given: torch.optim.RMSprop(given, lr=0.1, centered=True), id="RMSprop"),
        pytest.param(lambda given: torch.optim.Adagrad(given, lr=0.1), id="Adagrad"),
        pytest.param(lambda given: torch.optim.NAdam(given, lr=0.1), id="NAdam"),
    ],
)
def test_the_bits_are_those_of_optimizer_step_and_the_wrapper_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = parameters(), parameters()
    one, other = make(here), make(there)
    for _ in range(3):
        assert not has_gone_through_torchs_wrapper(one, monkeypatch)
        other.step()
    assert all(map(torch.equal, here, there))
    assert all(one.requires_grad and one.is_leaf for one in here)
    held, expected = one.state_dict()["state"], other.state_dict()["state"]
    assert [*held] == [*expected]
    for index, state in held.items():
        assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[index][name])) for name in state)


def test_a_profiler_sees_its_record() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with torch.profiler.profile() as profile:
        stepping.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    with torch.autograd.profiler.profile() as older:
        stepping.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in older.key_averages()}


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_an_optimizer_and_of_all_are_called(of_all: bool) -> None:
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), list[str]()
    own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    everyone = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    for name, register in zip(("before", "after"), everyone if of_all else own, strict=True):
        handle = register(lambda *_, name=name: calls.append(name))
        stepping.step(optimizer)
        handle.remove()
    stepping.step(optimizer)
    assert calls == ["before", "after"]


def test_a_class_with_a_step_of_its_own_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return super().step(closure)

    optimizer = Own(parameters(), lr=0.1)
    assert has_gone_through_torchs_wrapper(optimizer, monkeypatch)
    assert optimizer.calls == 1


SCHEDULERS = [
    pytest.param(lambda given: [StepLR(given, 1, 0.5)], id="StepLR"),
    pytest.param(lambda given: [CosineAnnealingLR(given, 3)], id="CosineAnnealingLR"),
    pytest.param(lambda given: [SequentialLR(given, [ConstantLR(given), ExponentialLR(given, 0.9)], [1])], id="SequentialLR"),
    pytest.param(lambda given: [StepLR(given, 1, 0.5), ExponentialLR(given, 0.9)], id="two"),
    pytest.param(lambda given: [SWALR(given, 0.01, anneal_epochs=2)], id="SWALR"),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_with_a_scheduler_the_bits_are_the_same_and_both_wrappers_are_left_out(
    make: Callable[[Optimizer], list[LRScheduler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = parameters(), parameters()
    one, other = torch.optim.SGD(here, lr=0.1, momentum=0.9), torch.optim.SGD(there, lr=0.1, momentum=0.9)
    ours, theirs = make(one), make(other)
    for _ in range(3):
        assert not has_gone_through_torchs_wrapper(one, monkeypatch)
        other.step()
        for scheduler in (*ours, *theirs):
            scheduler.step()  # without the warning that it comes before optimizer.step()
    assert all(map(torch.equal, here, there))
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_torch_still_warns_of_a_scheduler_that_is_stepped_first() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


def test_hooks_and_profilers_see_an_optimizer_with_a_scheduler() -> None:
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), list[str]()
    scheduler = StepLR(optimizer, 1)
    with torch.profiler.profile() as profile:
        stepping.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    stepping.step(optimizer)
    scheduler.step()
    assert calls == ["after"]


def counted(inside: Any, calls: list[str]) -> Any:
    """Wrap a step as tools do, with its mark and its ``__wrapped__``."""

    @functools.wraps(inside)
    def step(*arguments: Any) -> Any:
        calls.append("tool")
        return inside(*arguments)

    return step


@pytest.mark.parametrize("where", ["class", "class before a scheduler", "scheduler", "instance", "instance without a mark"])
def test_a_step_that_a_tool_has_replaced_or_wrapped_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), list[str]()
    if where == "scheduler":
        StepLR(optimizer, 1)
    if where in ("scheduler", "instance"):
        vars(optimizer)["step"] = counted(optimizer.step, calls)
    elif where == "instance without a mark":
        vars(optimizer)["step"] = lambda *_: calls.append("tool")
    else:
        monkeypatch.setattr(torch.optim.SGD, "step", counted(torch.optim.SGD.step, calls))
    if where == "class before a scheduler":
        StepLR(optimizer, 1)
        monkeypatch.undo()
    stepping.step(optimizer)
    assert calls == ["tool"]


def test_the_step_of_another_optimizer_is_called() -> None:
    """As a tool may give it to a wrapper: the scheduler of the other one wrapped it."""
    weights, others = parameters(), parameters()
    optimizer, other = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(others, lr=0.1)
    StepLR(other, 1)
    vars(optimizer)["step"] = vars(other)["step"]
    stepping.step(optimizer)
    assert all(map(torch.equal, weights, parameters()))
    assert not any(map(torch.equal, others, parameters()))


def test_a_version_of_torch_with_another_wrapper_of_schedulers_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stepping._code_within(LRScheduler.__init__, "no such function", "wrapper") is None
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    StepLR(optimizer, 1)
    assert not has_gone_through_torchs_wrapper(optimizer, monkeypatch)
    monkeypatch.setattr(stepping, "_TRACKER", None)
    assert has_gone_through_torchs_wrapper(optimizer, monkeypatch)


def test_what_is_no_optimizer_of_torch_is_called_by_its_step() -> None:
    class Wrapper(Optimizer):  # as those of accelerate
        def __init__(self, inside: Optimizer) -> None:
            self.inside = inside

        def step(self, closure: Any = None) -> Any:
            return self.inside.step(closure)

    weights = parameters()
    before = weights[0].clone()
    stepping.step(Wrapper(torch.optim.SGD(weights, lr=0.1)))
    assert not torch.equal(weights[0], before)


@pytest.mark.parametrize("missing", ["__code__", "__wrapped__"])
def test_a_version_of_torch_that_wraps_in_another_way_is_called(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Method:
        hooked = True
        calls = 0

        def __call__(self, *arguments: Any) -> None:
            Method.calls += 1

    method: Any = Method()
    method.__module__ = "torch.optim.sgd"
    if missing == "__wrapped__":
        method.__code__ = stepping._WRAPPER
    monkeypatch.setattr(torch.optim.SGD, "step", method)
    stepping.step(torch.optim.SGD(parameters(), lr=0.1))
    assert Method.calls == 1


def test_a_run_ends_with_the_bits_of_a_loop_that_calls_optimizer_step() -> None:
    def weights(model: nn.Module) -> Tensor:
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    by_hand, trained = tiny_model(), tiny_model()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    for batch in tiny_loader(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(batch[0]), batch[1]).backward()
        optimizer.step()
    tiny_trainer(model=trained, optimizer=torch.optim.AdamW(trained.parameters(), lr=0.01)).fit()
    assert torch.equal(weights(by_hand), weights(trained))

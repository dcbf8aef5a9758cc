"""Number formats, the backward pass, and the update without torch's record for a profiler: only where nobody could tell."""

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

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, Evaluate, LearningRate
from cadenza.engine.session import session_of
from cadenza.optim import fast_step
from cadenza.optim.optimizers import fuse
from cadenza.optim.precision import BackwardPass, precision_of
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer


class Spy(nn.Module):
    """Keeps the number format in which its layer works."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = tiny_model()
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        self.seen.add((self.training, outputs.dtype))
        return outputs


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_works_in_the_format_in_training_and_evaluation(name: str, dtype: torch.dtype) -> None:
    model = Spy()
    losses: list[float] = []
    look = on(Callback.on_step_end)(lambda run: losses.append(float(run.loss)))  # type: ignore[arg-type]  # it is there
    run = tiny_run(model=model, precision=name, epochs=5, callbacks=[look, Evaluate(tiny_loader(1))])
    assert model.seen == {(True, dtype), (False, dtype)}
    assert all(parameter.dtype is torch.float32 for parameter in run.model.parameters())
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


def small(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that can be scaled: the scale begins at 65536, and fp16 ends there."""
    return 1e-3 * nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_fp16_are_unscaled_when_callbacks_see_them(accumulate: int) -> None:
    def gradients(precision: str) -> Tensor:
        seen: list[Tensor] = []

        @on(Callback.on_before_optimizer_step)
        def look(run: Run) -> None:
            seen.append(torch.cat([one.grad.flatten() for one in run.model.parameters() if one.grad is not None]))

        tiny_run(precision=precision, callbacks=[look], batches=3, accumulate=accumulate, compute_loss=small)
        return torch.stack(seen)

    torch.testing.assert_close(gradients("fp16"), gradients("fp32"), rtol=1e-2, atol=1e-5)


def test_an_overflow_leaves_the_update_out_and_the_schedule_waits() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss * float("inf") if run_step[0] == 0 else loss

    run_step = [0]
    updated: list[bool] = []

    @on(Callback.on_after_optimizer_step)
    def look(run: Run) -> None:
        updated.append(session_of(run).step.updated)
        run_step[0] += 1

    halve = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    run = tiny_run(compute_loss=compute_loss, precision="fp16", steps=3, callbacks=[look, halve, ClipGradients(1.0)])
    assert updated == [False, True, True]
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_the_scaler_goes_round_a_save_and_a_load() -> None:
    first, second = precision_of("fp16", "cpu"), precision_of("fp16", "cpu")
    second.load_state_dict({**first.state_dict(), "scale": 8.0})
    assert second.state_dict()["scale"] == 8.0
    assert precision_of("bf16", "cpu").state_dict() == {}


def branching(loss_of: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight and a loss that depends on it in two ways."""
    weight = torch.linspace(-1, 1, 7, dtype=dtype, requires_grad=True)
    return weight, loss_of(weight * weight + torch.tanh(weight))


@pytest.mark.parametrize(
    ("dtype", "shares"),
    [
        (torch.float32, [None, 1 / 3, 1 / 3, 1.0, torch.tensor(0.25), torch.tensor(0.75), 1 / 3]),
        (torch.float64, [None, None]),
        (torch.bfloat16, [None, None]),
    ],
)
def test_the_backward_pass_adds_the_gradients_that_torch_adds(dtype: torch.dtype, shares: list[Any]) -> None:
    backward = BackwardPass()
    for share in shares:  # from the second on with the gradient that was kept; a share of a loss counts for that much
        ours, loss = branching(Tensor.mean, dtype)
        backward(loss, *([] if share is None else [share]))
        theirs, loss = branching(Tensor.mean, dtype)
        (loss if share is None else loss * share).backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_version_of_torch_without_the_entry_of_its_engine_adds_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    backward = BackwardPass()
    monkeypatch.undo()  # torch's own backward pass calls it
    for share in (1.0, 0.25, torch.tensor(0.75)):
        ours, loss = branching(Tensor.mean, torch.float32)
        backward(loss, share)
        theirs, loss = branching(Tensor.mean, torch.float32)
        (loss * share).backward()
        assert torch.equal(torch.as_tensor(ours.grad), torch.as_tensor(theirs.grad))


def test_a_hook_that_changes_the_gradient_of_the_loss_in_place_changes_it_once() -> None:
    backward = BackwardPass()
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    loss.register_hook(lambda gradient: gradient.mul_(5))
    backward(loss)
    backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6]


def test_a_loss_that_is_a_weight_gets_a_gradient_of_its_own() -> None:
    backward = BackwardPass()
    weight = torch.tensor(2.0, requires_grad=True)
    backward(weight)
    assert weight.grad is not None
    weight.grad.zero_()
    backward(weight)
    assert weight.grad.item() == 1


def test_a_loss_of_a_class_of_its_own_goes_the_public_way() -> None:
    called: list[str] = []

    class Noting(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    weight = torch.ones(2, requires_grad=True)
    BackwardPass()(weight.as_subclass(Noting).sum())
    assert "backward" in called
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_code_that_writes_into_the_gradient_of_the_loss_unseen_changes_that_step_alone() -> None:
    class Doubling(torch.autograd.Function):
        """Doubles the gradient that it is given where it lies, in ways that raise no version counter."""

        @staticmethod
        def forward(ctx: Any, values: Tensor, way: str) -> Tensor:
            ctx.way = way
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if ctx.way == "numpy":
                gradients[0].numpy()[...] *= 2
            else:
                gradients[0].data.mul_(2)
            return gradients[0], None

    backward = BackwardPass()
    for way in ("numpy", "data"):
        for share in (1.0, 0.5):
            for _ in range(3):
                weight = torch.ones(2, requires_grad=True)
                backward(Doubling.apply(weight.sum(), way), share)  # type: ignore[no-untyped-call]  # torch has no types there
                assert weight.grad is not None
                assert weight.grad.tolist() == [2 * share, 2 * share]


# -- fp16: each optimizer for itself ------------------------------------------------------------------


def halving(place: int) -> LearningRate:
    return LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), optimizer=place)


def apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]


def test_gradients_that_a_callback_drops_before_the_update_leave_the_scaler_in_order() -> None:
    @on(Callback.on_before_optimizer_step, every=2)
    def drop(run: Run) -> None:
        for parameter in run.model.parameters():
            parameter.grad = None

    weights: list[float] = []
    look = on(Callback.on_step_end)(lambda run: weights.append(float(run.model.get_parameter("weight").detach())))
    run = tiny_run(precision="fp16", steps=5, callbacks=[drop, look], compute_loss=small)
    moved = [after != before for before, after in zip([0.5, *weights], weights, strict=False)]
    assert moved == [True, False, True, False, True]
    assert session_of(run).precision.state_dict()["_growth_tracker"] == 5


@pytest.mark.parametrize("by_step_fn", [False, True])
def test_of_two_optimizers_the_one_that_does_not_overflow_goes_on_with_its_schedule(by_step_fn: bool) -> None:
    model, steps = tiny_model(), [0]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        steps[0] += 1
        factor = float("inf") if steps[0] == 1 else 1e-3
        loss: Tensor = model.get_parameter("weight").sum() * factor + model.get_parameter("bias").sum() * 1e-3
        return loss

    def step(run: Run, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        run.backward(loss)
        for optimizer in run.optimizers:
            run.update(optimizer)
        return loss

    way: dict[str, Any] = {"step_fn": step} if by_step_fn else {"compute_loss": loss_of}
    run = tiny_run(model=model, optimizer=apart(model), precision="fp16", steps=3, callbacks=[halving(0), halving(1)], **way)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers]
    assert rates == pytest.approx([0.1 / 4, 0.1 / 8])
    assert model.bias.item() == pytest.approx(-1e-3 * 0.1 * (1 + 1 / 2 + 1 / 4), rel=1e-4)


def test_an_overflow_of_one_optimizer_does_not_change_the_scale_of_gradients_that_the_other_still_has() -> None:
    model = tiny_model()

    def step(run: Run, batch: Any) -> Tensor:
        first, second = (optimizer.param_groups[0]["params"][0] for optimizer in run.optimizers)
        loss: Tensor = second.sum() * 1e-3
        run.backward(first.sum() * float("inf"))
        run.backward(loss)
        for optimizer in run.optimizers:
            run.update(optimizer)
        return loss

    run = tiny_run(model=model, optimizer=apart(model), precision="fp16", steps=1, step_fn=step)
    assert model.bias.item() == pytest.approx(-1e-4, rel=1e-4)
    assert session_of(run).precision.state_dict()["scale"] == 65536 / 2


def test_after_an_update_in_a_step_fn_the_forward_pass_has_the_new_weights() -> None:
    model, seen = nn.Linear(4, 1), list[tuple[float, float]]()

    def step(run: Run, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = run.model(torch.ones(1, 4)).square().mean()
        run.backward(loss)
        run.update()
        after = run.model(torch.ones(1, 4)).item()
        with torch.autocast("cpu", enabled=False):
            seen.append((after, run.model(torch.ones(1, 4)).item()))
        return loss

    tiny_run(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), precision="bf16", steps=2, step_fn=step)
    for after, exact in seen:
        assert after == pytest.approx(exact, rel=0.02)


# -- the update without torch's record for a profiler ------------------------------------------------


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
        fast_step.step(optimizer)
    return any(one.startswith("Optimizer.step#") for one in names)


def fused_by_choice(optimizer: Optimizer) -> Optimizer:
    fuse(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda given: torch.optim.SGD(given, lr=0.1), id="SGD"),
        pytest.param(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True), id="momentum"),
        pytest.param(lambda given: torch.optim.AdamW(given, lr=0.1), id="AdamW"),
        pytest.param(lambda given: torch.optim.AdamW(given, lr=0.1, fused=True), id="fused AdamW"),
        pytest.param(lambda given: fused_by_choice(torch.optim.AdamW(given, lr=0.1)), id="AdamW of a function"),
        pytest.param(lambda given: fused_by_choice(torch.optim.SGD(given, lr=0.1, momentum=0.9)), id="momentum of a function"),
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


@pytest.mark.parametrize("scheduled", [False, True])
def test_profilers_see_its_record_and_hooks_are_called_also_with_a_scheduler(scheduled: bool) -> None:
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), list[str]()
    scheduler = StepLR(optimizer, 1) if scheduled else None
    for profiler in (torch.profiler.profile(), torch.autograd.profiler.profile()):
        with profiler as profile:
            fast_step.step(optimizer)
        assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fast_step.step(optimizer)
    if scheduler:
        scheduler.step()
    assert calls == ["after"]


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_an_optimizer_and_of_all_are_called(of_all: bool) -> None:
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), list[str]()
    own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    everyone = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    for name, register in zip(("before", "after"), everyone if of_all else own, strict=True):
        handle = register(lambda *_, name=name: calls.append(name))
        fast_step.step(optimizer)
        handle.remove()
    fast_step.step(optimizer)
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


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda given: [StepLR(given, 1, 0.5)], id="StepLR"),
        pytest.param(lambda given: [CosineAnnealingLR(given, 3)], id="CosineAnnealingLR"),
        pytest.param(
            lambda given: [SequentialLR(given, [ConstantLR(given), ExponentialLR(given, 0.9)], [1])], id="SequentialLR"
        ),
        pytest.param(lambda given: [StepLR(given, 1, 0.5), ExponentialLR(given, 0.9)], id="two"),
        pytest.param(lambda given: [SWALR(given, 0.01, anneal_epochs=2)], id="SWALR"),
    ],
)
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
    fast_step.step(optimizer)
    assert calls == ["tool"]


def test_the_step_of_another_optimizer_is_called() -> None:
    """As a tool may give it to a wrapper: the scheduler of the other one wrapped it."""
    weights, others = parameters(), parameters()
    optimizer, other = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(others, lr=0.1)
    StepLR(other, 1)
    vars(optimizer)["step"] = vars(other)["step"]
    fast_step.step(optimizer)
    assert all(map(torch.equal, weights, parameters()))
    assert not any(map(torch.equal, others, parameters()))


def test_a_version_of_torch_with_another_wrapper_of_schedulers_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_step._code_within(LRScheduler.__init__, "no such function", "wrapper") is None
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    StepLR(optimizer, 1)
    assert not has_gone_through_torchs_wrapper(optimizer, monkeypatch)
    monkeypatch.setattr(fast_step, "_TRACKER", None)
    assert has_gone_through_torchs_wrapper(optimizer, monkeypatch)


def test_what_is_no_optimizer_of_torch_is_called_by_its_step() -> None:
    class Wrapper(Optimizer):  # as those of accelerate
        def __init__(self, inside: Optimizer) -> None:
            self.inside = inside

        def step(self, closure: Any = None) -> Any:
            return self.inside.step(closure)

    weights = parameters()
    before = weights[0].clone()
    fast_step.step(Wrapper(torch.optim.SGD(weights, lr=0.1)))
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
        method.__code__ = fast_step._WRAPPER
    monkeypatch.setattr(torch.optim.SGD, "step", method)
    fast_step.step(torch.optim.SGD(parameters(), lr=0.1))
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

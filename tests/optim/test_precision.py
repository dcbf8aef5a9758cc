"""Number formats: they train, are really used, and fp16 survives an overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, Evaluate, LearningRate
from cadenza.engine.session import session_of
from cadenza.optim.precision import BackwardPass, precision_of
from cadenza.testing import tiny_loader, tiny_model, tiny_run


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_fp16_are_unscaled_when_callbacks_see_them(accumulate: int) -> None:
    def gradients(precision: str) -> Tensor:
        seen: list[Tensor] = []

        @on(Callback.on_before_optimizer_step)
        def look(run: Run) -> None:
            seen.append(torch.cat([one.grad.flatten() for one in run.model.parameters() if one.grad is not None]))

        def small(model: nn.Module, batch: Any) -> Tensor:
            # The scale begins at 65536, and fp16 ends there.
            loss: Tensor = 1e-3 * nn.functional.mse_loss(model(batch[0]), batch[1])
            return loss

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


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16; got 'fp8'"):
        precision_of("fp8", "cpu")


def branching(loss_of: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight and a loss that depends on it in two ways."""
    weight = torch.linspace(-1, 1, 7, dtype=dtype, requires_grad=True)
    return weight, loss_of(weight * weight + torch.tanh(weight))


SHARES = [None, 1 / 3, 1 / 3, 1.0, torch.tensor(0.25), torch.tensor(0.75), 1 / 3]


@pytest.mark.parametrize(
    ("dtype", "shares"), [(torch.float32, SHARES), (torch.float64, [None, None]), (torch.bfloat16, [None, None])]
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


def test_gradients_add_up_over_backward_passes() -> None:
    backward = BackwardPass()
    weight = torch.ones(3, requires_grad=True)
    for _ in range(3):
        backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3]


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

    def small(model: nn.Module, batch: Any) -> Tensor:
        return 1e-3 * nn.functional.mse_loss(model(batch[0]), batch[1])

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

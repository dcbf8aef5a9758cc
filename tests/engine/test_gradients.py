"""Groups of batches train as the joined batch would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import StopOnNonFinite
from cadenza.testing import tiny_loader, tiny_model, tiny_run


def dropout_free_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def regression(samples: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def weights_after(loader: list[Any], **arguments: Any) -> Tensor:
    run = tiny_run(
        model=dropout_free_model(), optimizer=lambda p: torch.optim.Adam(p, 0.05), loader=loader, epochs=3, **arguments
    )
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_three_batches_of_two_train_as_one_of_six() -> None:
    joined, grouped = weights_after(regression(24, 6)), weights_after(regression(24, 2), accumulate=3)
    torch.testing.assert_close(grouped, joined, rtol=1e-5, atol=1e-6)


def test_a_short_last_group_is_normalised_by_its_own_length() -> None:
    # 10 samples: groups of 6 and of 4, that is three batches of two and then two.
    inputs, targets = (torch.cat(parts) for parts in zip(*regression(10, 2), strict=True))
    joined = list(zip(inputs.split([6, 4]), targets.split([6, 4]), strict=True))
    torch.testing.assert_close(weights_after(regression(10, 2), accumulate=3), weights_after(joined), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
def test_batches_of_unequal_weight_train_as_the_joined_batch(as_tensor: bool) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        size = torch.tensor(float(len(inputs))) if as_tensor else len(inputs)
        return {"loss": nn.functional.mse_loss(model(inputs), targets), "weight": size}

    inputs, targets = (torch.cat(parts) for parts in zip(*regression(12, 2), strict=True))
    parts = [1, 3, 2, 4, 2]
    unequal = list(zip(inputs.split(parts), targets.split(parts), strict=True))
    joined = list(zip(inputs.split(6), targets.split(6), strict=True))
    grouped = weights_after(unequal, accumulate=3, compute_loss=compute_loss)
    torch.testing.assert_close(grouped, weights_after(joined), rtol=1e-5, atol=1e-6)


def test_a_batch_of_no_weight_counts_for_nothing() -> None:
    weights = iter([0, 5, 0, 0])

    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1]), "weight": next(weights)}

    loader = tiny_loader(4)
    weighted = tiny_run(loader=loader, accumulate=2, compute_loss=compute_loss)
    alone = tiny_run(loader=loader[1:2])
    torch.testing.assert_close(weighted.model.weight, alone.model.weight)


def test_batches_of_a_step_that_disagree_on_weights_are_an_error() -> None:
    weights: Iterator[dict[str, float]] = iter([{"weight": 2.0}, {}])

    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean(), **next(weights)}

    with pytest.raises(TypeError, match=r"either all batches of a step report outputs\['weight'\], or none"):
        tiny_run(accumulate=2, compute_loss=compute_loss)


def test_a_parameter_that_two_optimizers_hold_is_normalised_once() -> None:
    gradients: list[float] = []

    @on(Callback.on_before_optimizer_step)
    def look(run: Run) -> None:
        gradients.extend(float(one.grad) for one in run.model.parameters() if one.grad is not None)

    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, 0.1), torch.optim.SGD(parameters, 0.1)]

    tiny_run(batches=1, accumulate=2, callbacks=[look], optimizer=two)
    tiny_run(batches=1, accumulate=2, callbacks=[look])
    assert len(gradients) == 4
    assert gradients[:2] == gradients[2:]


def test_the_loss_of_a_run_is_the_undivided_mean_of_its_last_step() -> None:
    losses: list[float | None] = []
    look = on(Callback.on_step_end)(lambda run: losses.append(None if run.loss is None else float(run.loss)))
    tiny_run(losses=[1.0, 3.0, 5.0], accumulate=2, callbacks=[look])
    assert losses == [2.0, 5.0]


def test_the_loss_of_the_last_step_can_be_read_until_the_next_one_is_done() -> None:
    losses: list[float | None] = []
    look = on(Callback.on_batch_end)(lambda run, *_: losses.append(None if run.loss is None else float(run.loss)))
    tiny_run(losses=[1.0, 3.0, 5.0, 7.0], accumulate=2, callbacks=[look])
    assert losses == [None, None, 2.0, 2.0]


def test_a_loss_that_a_callback_puts_in_its_place_is_the_one_that_trains() -> None:
    @on(Callback.on_before_backward)
    def ten_times(run: Run, outputs: Any) -> None:
        outputs["loss"] = outputs["loss"] * 10

    def small(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    replaced = tiny_run(callbacks=[ten_times], optimizer=small, batches=1)
    torch.testing.assert_close(replaced.model.weight, tiny_run(batches=1).model.weight)


def test_a_batch_changed_in_place_reaches_the_model() -> None:
    @on(Callback.on_batch_start)
    def zero(run: Run, batch: Any) -> None:
        batch[0].zero_()

    run = tiny_run(callbacks=[zero], batches=1)
    assert torch.equal(run.model.weight, tiny_model().weight)  # type: ignore[arg-type]  # the tiny model is a Linear


def test_gradients_left_from_before_the_fit_are_dropped() -> None:
    model = tiny_model()
    model(torch.ones(1, 1)).sum().backward()
    torch.testing.assert_close(tiny_run(model=model, batches=1).model.weight, tiny_run(batches=1).model.weight)


def test_an_optimizer_with_a_zero_grad_of_its_own_has_it_called() -> None:
    class Own(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Own.zeroed += 1
            super().zero_grad(set_to_none)

    tiny_run(optimizer=lambda parameters: Own(parameters, lr=0.1), steps=2)
    assert Own.zeroed == 3  # once before the first step


def test_the_loader_and_its_sampler_are_told_the_epoch() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    class Loader(list[Any]):
        sampler = Sampler()

    loader = Loader(tiny_loader(1))
    tiny_run(loader=loader, epochs=2)
    assert loader.sampler.told == [0, 1]


@pytest.mark.parametrize("through_a_view", [False, True])
def test_two_parameters_that_share_one_gradient_are_normalised_once(through_a_view: bool) -> None:
    model, seen = nn.ParameterList([torch.ones(1), torch.ones(1)]), list[float]()

    @on(Callback.on_after_backward)
    def share(run: Run, outputs: Any) -> None:
        gradient = model[0].grad
        assert gradient is not None
        model[1].grad = gradient.detach() if through_a_view else gradient

    @on(Callback.on_before_optimizer_step)
    def look(run: Run) -> None:
        seen.extend(float(one.grad) for one in model if one.grad is not None)

    one_of_four: dict[str, Any] = {"loader": [torch.ones(2, 1)], "accumulate": 4}
    tiny_run(model=model, compute_loss=lambda model, batch: model[0].sum(), callbacks=[share, look], **one_of_four)
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_batches_of_no_weight_is_nothing_though_it_is_nan(accumulate: int, as_tensor: bool) -> None:
    losses: list[float] = []
    look = on(Callback.on_step_end)(lambda run: losses.append(float(run.loss)))  # type: ignore[arg-type]
    weights = iter([2.0, 0.0, 0.0, 0.0])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        # What cross_entropy gives for targets that are all ignored: NaN, and gradients of 0.
        weight = next(weights)
        targets = torch.tensor([0, 1] if weight else [-100, -100])
        loss = nn.functional.cross_entropy(model(batch[0]).repeat(1, 2), targets)
        return {"loss": loss, "weight": torch.tensor(weight) if as_tensor else weight}

    run = tiny_run(batches=4, accumulate=accumulate, compute_loss=compute, callbacks=[look, StopOnNonFinite()])
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert losses == pytest.approx([math.log(2), 0.0, 0.0, 0.0] if accumulate == 1 else [math.log(2), 0.0])
    assert run.model.weight.isfinite().all()  # type: ignore[operator]


@pytest.mark.parametrize("kind", [float, int, np.float32, np.float64, torch.tensor])
def test_a_batch_of_weight_0_on_the_host_adds_no_gradient_though_that_is_nan(kind: Callable[[float], Any]) -> None:
    weights = iter([kind(1.0), kind(0.0)])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        weight = next(weights)
        return {"loss": (model(batch[0]) * weight).sum() / weight if weight else model(batch[0]).sum() / 0.0, "weight": weight}

    run = tiny_run(batches=2, accumulate=2, compute_loss=compute)
    assert run.model.weight.isfinite().all()  # type: ignore[operator]


def test_the_loss_of_a_float64_model_keeps_its_digits() -> None:
    model, losses = tiny_model().double(), list[Tensor]()

    def compute(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0].double()).sum() * 0 + 1 + 1e-12
        return loss

    look = on(Callback.on_step_end)(lambda run: losses.append(run.loss))  # type: ignore[arg-type]
    tiny_run(model=model, batches=4, accumulate=2, compute_loss=compute, callbacks=[look])
    assert {loss.dtype for loss in losses} == {torch.float64}
    assert losses[0].item() - 1 == pytest.approx(1e-12, rel=1e-3)

"""Groups of batches train as the joined batch would, and a run keeps no graph of batches that are done."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Callable as Function
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, StopOnNonFinite
from cadenza.testing import tiny_loader, tiny_model, tiny_run


def regression(samples: int, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def weights_after(loader: list[Any], **arguments: Any) -> Tensor:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run = tiny_run(model=model, optimizer=partial(torch.optim.Adam, lr=0.05), loader=loader, epochs=3, **arguments)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


@pytest.mark.parametrize(
    ("samples", "sizes", "joined"),
    [
        pytest.param(24, [2] * 12, [6] * 4, id="three batches of two train as one of six"),
        pytest.param(10, [2] * 5, [6, 4], id="a short last group is normalised by its own length"),
    ],
)
def test_a_group_of_batches_trains_as_the_joined_batch(samples: int, sizes: list[int], joined: list[int]) -> None:
    grouped = weights_after(regression(samples, sizes), accumulate=3)
    torch.testing.assert_close(grouped, weights_after(regression(samples, joined)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
def test_batches_of_unequal_weight_train_as_the_joined_batch(as_tensor: bool) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        size = torch.tensor(float(len(inputs))) if as_tensor else len(inputs)
        return {"loss": nn.functional.mse_loss(model(inputs), targets), "weight": size}

    grouped = weights_after(regression(12, [1, 3, 2, 4, 2]), accumulate=3, compute_loss=compute_loss)
    torch.testing.assert_close(grouped, weights_after(regression(12, [6, 6])), rtol=1e-5, atol=1e-6)


def test_batches_of_a_step_that_disagree_on_weights_are_an_error() -> None:
    weights: Iterator[dict[str, float]] = iter([{"weight": 2.0}, {}])
    with pytest.raises(TypeError, match=r"either all batches of a step report outputs\['weight'\], or none"):
        tiny_run(accumulate=2, compute_loss=lambda model, batch: {"loss": model(batch[0]).mean(), **next(weights)})


def gradients_of(callbacks: Sequence[Callback] = (), **arguments: Any) -> list[float]:
    """Return the gradients of all parameters before each update."""
    seen: list[float] = []

    @on(Callback.on_before_optimizer_step)
    def look(run: Run) -> None:
        seen.extend(float(one.grad) for one in run.model.parameters() if one.grad is not None)

    tiny_run(callbacks=[*callbacks, look], **arguments)
    return seen


def test_a_parameter_that_two_optimizers_hold_is_normalised_once() -> None:
    held_twice = gradients_of(batches=1, accumulate=2, optimizer=lambda weights: [SGD(weights, 0.1), SGD(weights, 0.1)])
    assert len(held_twice) == 2
    assert held_twice == gradients_of(batches=1, accumulate=2)


@pytest.mark.parametrize(
    ("moment", "given", "expected"),
    [
        (Callback.on_step_end, [1.0, 3.0, 5.0], [2.0, 5.0]),
        (Callback.on_batch_end, [1.0, 3.0, 5.0, 7.0], [None, None, 2.0, 2.0]),
    ],
)
def test_the_loss_of_a_run_is_the_undivided_mean_of_its_last_step_until_the_next_one_is_done(
    moment: Any, given: list[float], expected: list[float | None]
) -> None:
    losses: list[float | None] = []
    look = on(moment)(lambda run, *_: losses.append(None if run.loss is None else float(run.loss)))
    tiny_run(losses=given, accumulate=2, callbacks=[look])
    assert losses == expected


def test_a_loss_that_a_callback_puts_in_its_place_is_the_one_that_trains() -> None:
    ten_times = on(Callback.on_before_backward)(lambda run, outputs: outputs.update(loss=outputs["loss"] * 10))
    replaced = tiny_run(callbacks=[ten_times], optimizer=partial(SGD, lr=0.01), batches=1)
    torch.testing.assert_close(replaced.model.weight, tiny_run(batches=1).model.weight)


def test_a_batch_changed_in_place_reaches_the_model() -> None:
    run = tiny_run(callbacks=[on(Callback.on_batch_start)(lambda run, batch: batch[0].zero_())], batches=1)
    assert torch.equal(run.model.weight, tiny_model().weight)  # type: ignore[arg-type]  # the tiny model is a Linear


def test_gradients_left_from_before_the_fit_are_dropped_by_the_zero_grad_of_the_optimizer() -> None:
    model = tiny_model()
    model(torch.ones(1, 1)).sum().backward()
    torch.testing.assert_close(tiny_run(model=model, batches=1).model.weight, tiny_run(batches=1).model.weight)

    class Own(SGD):
        zeroed = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Own.zeroed += 1
            super().zero_grad(set_to_none)

    tiny_run(optimizer=partial(Own, lr=0.1), steps=2)
    assert Own.zeroed == 3  # once before the first step


@pytest.mark.parametrize("through_a_view", [False, True])
def test_two_parameters_that_share_one_gradient_are_normalised_once(through_a_view: bool) -> None:
    model = nn.ParameterList([torch.ones(1), torch.ones(1)])

    @on(Callback.on_after_backward)
    def share(run: Run, outputs: Any) -> None:
        gradient = model[0].grad
        assert gradient is not None
        model[1].grad = gradient.detach() if through_a_view else gradient

    one_of_four: dict[str, Any] = {"loader": [torch.ones(2, 1)], "accumulate": 4, "callbacks": [share]}
    assert gradients_of(model=model, compute_loss=lambda model, batch: model[0].sum(), **one_of_four) == [1.0, 1.0]


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
@pytest.mark.parametrize(("accumulate", "whole"), [(1, 0), (2, 0), (2, 1)])
def test_batches_of_no_weight_count_for_nothing_though_their_loss_is_nan(accumulate: int, whole: int, as_tensor: bool) -> None:
    losses: list[float] = []
    look = on(Callback.on_step_end)(lambda run: losses.append(float(run.loss)))  # type: ignore[arg-type]
    weights = iter([2.0 if index == whole else 0.0 for index in range(4)])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        # What cross_entropy gives for targets that are all ignored: NaN, and gradients of 0.
        weight = next(weights, 2.0)
        targets = torch.tensor([0, 1] if weight else [-100, -100])
        loss = nn.functional.cross_entropy(model(batch[0]).repeat(1, 2), targets)
        return {"loss": loss, "weight": torch.tensor(weight) if as_tensor else weight}

    loader = tiny_loader(4)
    run = tiny_run(loader=loader, accumulate=accumulate, compute_loss=compute, callbacks=[look, StopOnNonFinite()])
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert losses == pytest.approx([math.log(2), 0.0, 0.0, 0.0] if accumulate == 1 else [math.log(2), 0.0])
    torch.testing.assert_close(run.model.weight, tiny_run(loader=loader[whole : whole + 1], compute_loss=compute).model.weight)


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


class Token:
    """Lives as long as the graph of one loss."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def marking(tokens: list[weakref.ref[Token]]) -> Function[[nn.Module, Any], dict[str, Any]]:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        token = Token()
        tokens.append(weakref.ref(token))
        loss: Any = Marked.apply(model(batch).square().mean(), token)  # type: ignore[no-untyped-call]  # torch has no types there
        return {"loss": loss}

    return compute


@pytest.mark.parametrize("by", ["compute_loss", "weighted compute_loss", "step_fn"])
def test_when_a_batch_starts_no_graph_of_an_earlier_one_is_alive(by: str) -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    compute = marking(tokens)

    def step(run: Run, batch: Tensor) -> Tensor:
        run.backward(loss := compute(run.model, batch)["loss"])
        run.update()
        return loss  # type: ignore[no-any-return]

    ways: dict[str, dict[str, Any]] = {
        "compute_loss": {"compute_loss": compute, "accumulate": 3},
        "weighted compute_loss": {"compute_loss": lambda *given: {**compute(*given), "weight": 2}, "accumulate": 3},
        "step_fn": {"step_fn": step},
    }
    count = on(Callback.on_batch_start)(lambda run, batch: alive.append(sum(token() is not None for token in tokens)))
    run = tiny_run(loader=[torch.ones(2, 1)] * 9, callbacks=[count], **ways[by])
    assert alive == [0] * 9
    assert run.loss is not None
    assert run.loss.grad_fn is None


def test_an_evaluation_with_gradients_of_its_own_keeps_no_graph() -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    count = on(Callback.on_eval_batch_start)(lambda run, *_: alive.append(sum(token() is not None for token in tokens)))
    judged = torch.enable_grad()(marking(tokens))
    tiny_run(batches=1, callbacks=[Evaluate([torch.ones(2, 1)] * 4, compute=judged), count])
    assert max(alive) <= 1  # the outputs of a batch are there until the next one is computed


def test_no_batch_but_the_one_under_way_is_kept_while_a_group_is_filled() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Fresh:
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.ones(2, 1) for _ in range(6))

    @on(Callback.on_batch_start)
    def count(run: Run, batch: Tensor) -> None:
        seen.append(weakref.ref(batch))
        assert [one() is not None for one in seen] == [False] * (len(seen) - 1) + [True]

    tiny_run(loader=Fresh(), accumulate=3, compute_loss=lambda model, batch: model(batch).mean(), callbacks=[count])
    assert len(seen) == 6

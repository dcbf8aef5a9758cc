"""A batch that one rank drops alone: the step is the mean over the others, as in one process with gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run
from cadenza.callbacks import LogTraining, StopOnNonFinite
from cadenza.drivers import DdpDriver
from cadenza.drivers.nothing import leaves_of
from cadenza.errors import NonFiniteError
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, rank, squared_error, trainer, weights_of


def spoiled(model: nn.Module, batch: Batch, *, samples: set[int], weighted: bool = False) -> Any:
    """Return a loss that is NaN in all its parts if the batch has one of these samples."""
    bad = bool(samples & set(batch[2].tolist()))
    loss = squared_error(model, (batch[0] * (math.nan if bad else 1.0), batch[1]))
    return {"loss": loss, "weight": 1.0 + float(batch[2][0] % 3)} if weighted else loss


def trained(
    samples: set[int],
    *,
    accumulate: int = 1,
    weighted: bool = False,
    callbacks: Callable[[], list[Callback]] = list,
    **options: Any,
) -> tuple[Tensor, int, list[tuple[int, float]]]:
    """Train on two ranks, or in one process with twice the accumulation. A rank takes every second batch of 4 samples."""
    several = rank() is not None
    compute = partial(spoiled, samples=samples, weighted=weighted)
    one = trainer(
        loader(40, shuffle=False),
        compute_loss=compute,
        accumulate=accumulate if several else 2 * accumulate,
        max_epochs=2,
        callbacks=[StopOnNonFinite("skip"), LogTraining(1, throughput=False)],
    )
    run = one.fit()
    return weights_of(one), run.progress.step, run.history["train/loss"]


def equals_one_process(**arguments: Any) -> None:
    expected, steps, losses = trained(**arguments)
    for weights, own_steps, own_losses in launch(lambda: trained(**arguments)):
        assert weights.isfinite().all()
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own_steps == steps
        assert dict(own_losses) == pytest.approx(dict(losses), rel=1e-5)


ONE, SOME = {13}, {1, 13, 22, 30}  # sample 13 is in the fourth batch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("samples", "accumulate"), [(ONE, 1), (ONE, 2), (SOME, 1), (SOME, 3)])
def test_a_dropped_batch_leaves_the_mean_over_the_others(samples: set[int], accumulate: int, weighted: bool) -> None:
    equals_one_process(samples=samples, accumulate=accumulate, weighted=weighted)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_of_which_all_batches_are_dropped_updates_nothing(weighted: bool) -> None:
    equals_one_process(samples={9, 13}, weighted=weighted)


def test_a_dropped_batch_with_parameters_that_are_not_used() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)  # type: ignore[no-any-return]

    def training() -> Tensor:
        options: dict[str, Any] = {} if rank() is None else {"driver": DdpDriver("cpu", find_unused_parameters=True)}
        one = trainer(
            loader(40, shuffle=False),
            model=Partly(),
            compute_loss=partial(spoiled, samples=ONE),
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
            **options,
        )
        one.fit()
        return weights_of(one)

    expected = training()
    for weights in launch(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_dropped_batch_of_a_model_with_sparse_gradients() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rows, self.last = nn.Embedding(40, 3, sparse=True), nn.Linear(3, 1)

        def forward(self, numbers: Tensor) -> Tensor:
            return self.last(self.rows(numbers))  # type: ignore[no-any-return]

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[2]) * (math.nan if 13 in batch[2] else 1.0), batch[1])

    def training() -> Tensor:
        one = trainer(
            loader(40, shuffle=False),
            model=Rows(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            compute_loss=compute,
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
        )
        one.fit()
        return weights_of(one)

    expected = training()
    for weights in launch(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_loop_of_ones_own_drops_the_batch_of_one_rank() -> None:
    def training() -> tuple[Tensor, list[str]]:
        one = trainer(
            loader(40, shuffle=False),
            compute_loss=None,
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
        )
        for step in one.steps():
            for batch in step:
                step.backward(step.forward(partial(spoiled, samples=ONE), batch))
        return weights_of(one), [decision.what for decision in one.run.decisions]

    expected, decisions = training()
    for weights, own in launch(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own == decisions == ["batch skipped"] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_stop_at_the_step_of_the_loss_that_is_not_finite(accumulate: int) -> None:
    def training() -> tuple[int, str]:
        compute = partial(spoiled, samples=ONE)
        run = trainer(
            loader(40, shuffle=False), compute_loss=compute, accumulate=accumulate, callbacks=[StopOnNonFinite()]
        ).fit()
        return run.progress.step, run.why("batch skipped")

    (first, why), (second, other) = launch(training)
    assert first == second == 2 // accumulate
    assert "the loss of another rank is not finite" in why
    assert "the loss is nan" in other


def test_all_ranks_raise_the_error_of_a_loss_that_is_not_finite_before_the_update() -> None:
    def training() -> tuple[str, Tensor]:
        one = trainer(
            loader(40, shuffle=False), compute_loss=partial(spoiled, samples=ONE), callbacks=[StopOnNonFinite("raise")]
        )
        with pytest.raises(NonFiniteError) as raised:
            one.fit()
        return str(raised.value), weights_of(one)

    (first, weights), (second, others) = launch(training)
    assert first.startswith("the loss of another rank is not finite in batch 2")
    assert second.startswith("the loss is nan in batch 2")
    assert torch.equal(weights, others)
    assert weights.isfinite().all()


@pytest.mark.parametrize("setting", ["asks", "skips"])
def test_a_callback_that_never_asks_may_not_skip_a_batch_on_several_ranks(setting: str) -> None:
    class Quiet(Callback):
        asks, skips = setting != "asks", setting != "skips"

        def on_batch_start(self, run: Run, batch: Any) -> None:
            run.skip_batch("unexpected")

    def training() -> str:
        with pytest.raises(RuntimeError, match=f"{setting} = False") as raised:
            trainer(callbacks=[Quiet()]).fit()
        return str(raised.value)

    first, _ = launch(training)
    assert first.startswith(f"Quiet has {setting} = False, so the other ranks do not expect it to skip a batch")


def test_the_leaves_of_a_loss_are_the_tensors_that_get_a_gradient() -> None:
    model, other = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    assert leaves_of((model(torch.ones(2)) * other).sum()) == {model.weight, model.bias, other}
    assert leaves_of(model(torch.ones(2)).detach()) == set()

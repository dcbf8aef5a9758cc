"""A batch that one rank drops alone: the step is the mean over the others, as in one process with gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer
from cadenza.callbacks import LogTraining, StopOnNonFinite
from cadenza.errors import NonFiniteError
from tests.distributed.drivers import ddp
from tests.distributed.parts import Batch, loader, rank, squared_error, trainer, weights_of
from tests.distributed.standing import on_ranks


def spoiled(model: nn.Module, batch: Batch, *, samples: set[int], weighted: bool = False) -> Any:
    """Return a loss that is NaN in all its parts if the batch has one of these samples."""
    bad = bool(samples & set(batch[2].tolist()))
    loss = squared_error(model, (batch[0] * (math.nan if bad else 1.0), batch[1]))
    return {"loss": loss, "weight": 1.0 + float(batch[2][0] % 3)} if weighted else loss


def trained(samples: set[int], *, accumulate: int = 1, weighted: bool = False) -> tuple[Tensor, int, dict[int, float]]:
    """Train on two ranks, or in one process with twice the accumulation. A rank takes every second batch of 4 samples."""
    one = trainer(
        loader(40, shuffle=False),
        compute_loss=partial(spoiled, samples=samples, weighted=weighted),
        accumulate=accumulate if rank() is not None else 2 * accumulate,
        callbacks=[StopOnNonFinite("skip"), LogTraining(1, throughput=False)],
    )
    run = one.fit()
    return weights_of(one), run.progress.step, dict(run.history["train/loss"])


ONE, SOME = {13}, {1, 13, 22, 30}  # sample 13 is in the fourth batch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("samples", "accumulate"), [(ONE, 1), (ONE, 2), (SOME, 1), (SOME, 3), pytest.param({9, 13}, 1, id="all of a step")]
)
def test_a_dropped_batch_leaves_the_mean_over_the_others(samples: set[int], accumulate: int, weighted: bool) -> None:
    train = partial(trained, samples, accumulate=accumulate, weighted=weighted)
    expected, steps, losses = train()
    for weights, own_steps, own_losses in on_ranks(train):
        assert weights.isfinite().all()
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own_steps == steps
        assert own_losses == pytest.approx(losses, rel=1e-5)


class Partly(nn.Module):
    """Has parameters that are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(40, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.last(self.rows(numbers))  # type: ignore[no-any-return]


def of_rows(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[2]) * (math.nan if 13 in batch[2] else 1.0), batch[1])


@pytest.mark.parametrize(("model", "compute"), [(Partly, partial(spoiled, samples=ONE)), (Rows, of_rows)])
def test_a_batch_is_dropped_with_parameters_that_are_not_used_and_with_sparse_gradients(
    model: type[nn.Module], compute: Callable[..., Any]
) -> None:
    def training() -> Tensor:
        torch.manual_seed(0)
        one = trainer(
            loader(40, shuffle=False),
            model=model(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            compute_loss=compute,
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
            driver=None if rank() is None else ddp(find_unused_parameters=model is Partly),
        )
        one.fit()
        return weights_of(one)

    expected = training()
    for weights in on_ranks(training):
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
    for weights, own in on_ranks(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own == decisions == ["batch skipped"] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_stop_at_the_step_of_the_loss_that_is_not_finite_or_raise_before_its_update(accumulate: int) -> None:
    compute = partial(spoiled, samples=ONE)

    def training(action: Literal["stop", "raise"]) -> Trainer:
        data, callbacks = loader(40, shuffle=False), [StopOnNonFinite(action)]
        return trainer(data, compute_loss=compute, accumulate=accumulate, callbacks=callbacks)

    def stopping() -> tuple[int, str, str, Tensor]:
        run, raising = training("stop").fit(), training("raise")
        with pytest.raises(NonFiniteError) as raised:
            raising.fit()
        return run.progress.step, run.why("batch skipped"), str(raised.value), weights_of(raising)

    (first, why, main, weights), (second, other_why, other, others) = on_ranks(stopping)
    assert first == second == 2 // accumulate
    assert "the loss of another rank is not finite" in why
    assert "the loss is nan" in other_why
    assert main.startswith("the loss of another rank is not finite in batch 2")
    assert other.startswith("the loss is nan in batch 2")
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

    first, _ = on_ranks(training)
    assert first.startswith(f"Quiet has {setting} = False, so the other ranks do not expect it to skip a batch")

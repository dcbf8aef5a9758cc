"""The sums of an evaluation: what counts for nothing, what keeps its digits, and errors of hooks that stay what they are."""

from __future__ import annotations

import math
from collections.abc import Callable as Function
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, supervised
from cadenza.callbacks import Evaluate
from cadenza.errors import DataError
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer

MSE = supervised(nn.functional.mse_loss)


def weighing(*pairs: tuple[float, float | Tensor]) -> Function[[nn.Module, Any], dict[str, Any]]:
    """Return a compute that gives these losses and weights, batch by batch."""
    script = iter(pairs)

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss, weight = next(script)
        return {"loss": torch.tensor(loss), "weight": weight}

    return compute


@pytest.mark.parametrize("nothing", [0, 0.0, torch.tensor(0)], ids=["int", "float", "tensor"])
def test_a_batch_of_weight_0_counts_for_nothing_though_its_loss_is_nan(nothing: float | Tensor) -> None:
    compute = weighing((1.0, 3), (math.nan, nothing), (5.0, 1))
    assert tiny_trainer().evaluate(tiny_loader(3), compute=compute) == {"eval/loss": 2.0}


def test_an_empty_batch_counts_for_nothing() -> None:
    full = tiny_loader(2)
    with_empty = [full[0], (torch.empty(0, 1), torch.empty(0, 1)), full[1]]
    one = tiny_trainer(compute_loss=MSE)
    assert one.evaluate(with_empty) == one.evaluate(full)


def test_an_evaluation_of_no_weight_at_all_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="'valid' has no mean loss: its batches have a total weight of 0"):
        tiny_trainer().evaluate(tiny_loader(2), compute=weighing((math.nan, 0), (math.nan, 0)), name="valid")


def test_the_loss_of_a_float64_model_keeps_its_digits() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].double()).sum() * 0 + 1 + 1e-12  # type: ignore[no-any-return]

    (loss,) = tiny_trainer(model=tiny_model().double(), compute_loss=compute).evaluate(tiny_loader()).values()
    assert loss - 1 == pytest.approx(1e-12, rel=1e-3)


# -- StopIteration ends nothing in silence ------------------------------------------------------------


def ending(moment: Any) -> Callback:
    """Return a callback that raises StopIteration, as a ``next`` without a default does, in one hook."""

    def end(*arguments: Any) -> None:
        raise StopIteration("no more colours")

    name = moment.__name__
    hooks: dict[str, Any] = {
        "on_eval_batch_start": lambda self, run, evaluation, batch: end(),
        "on_eval_batch_end": lambda self, run, evaluation, batch, outputs: end(),
        "on_batch_start": lambda self, run, batch: end(),
    }
    one: Callback = type("Ends", (Callback,), {name: hooks.get(name, lambda self, run: end())})()
    return one


@pytest.mark.parametrize("moment", [Callback.on_eval_batch_start, Callback.on_eval_batch_end], ids=lambda one: one.__name__)
def test_a_stop_iteration_of_a_hook_of_an_evaluation_stays_what_it_is(moment: Any) -> None:
    one = tiny_trainer(compute_loss=MSE, callbacks=[ending(moment)])
    for judge in (one.evaluate, one.predict):
        with pytest.raises(StopIteration, match="no more colours"):
            judge(tiny_loader())
    with pytest.raises(StopIteration, match="no more colours"):
        tiny_run(compute_loss=MSE, callbacks=[Evaluate(tiny_loader()), ending(moment)])


@pytest.mark.parametrize(
    "moment", [Callback.on_fetch_start, Callback.on_fetch_end, Callback.on_batch_start, Callback.on_step_end]
)
def test_a_stop_iteration_of_a_hook_of_the_training_stays_what_it_is(moment: Any) -> None:
    with pytest.raises(StopIteration, match="no more colours"):
        tiny_run(callbacks=[ending(moment)])


class Short(Dataset[Tensor]):
    """Says that it has 6 samples, and raises StopIteration at the third."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return next(iter([torch.ones(1)] if index < 2 else []))


def emptying(samples: list[Tensor]) -> Tensor:
    return next(iter([]))


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (DataLoader(Short(), batch_size=2), r"the data set raised StopIteration for index \[2, 3\]"),
        (DataLoader(Short(), batch_size=1, collate_fn=emptying), "collate_fn raised StopIteration"),
    ],
)
def test_a_stop_iteration_of_a_data_set_does_not_end_the_epoch(loader: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        tiny_run(loader=loader, compute_loss=lambda model, batch: model(batch).mean())

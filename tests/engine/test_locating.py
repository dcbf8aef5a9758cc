"""The second pass over the batches of a step that broke."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from cadenza.engine.locating import locate
from cadenza.loading.rng import RNGState
from tests.callbacks.breaking import Root


@pytest.mark.parametrize("inner", [Root, lambda: nn.Linear(1, 1)])
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_pass_that_leaves_the_gradients_alone_finds_the_same(inner: type[nn.Module], value: float) -> None:
    def compute(module: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = module(batch).square().sum()
        return loss

    model, batch = nn.Sequential(inner(), nn.Linear(1, 1)), torch.tensor([[value], [1.0]])
    called: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    given = model, compute, [batch], [RNGState.capture()]
    alone = locate(*given, accumulates=False)
    assert not called
    assert all(one.grad is None for one in model.parameters())
    again = locate(*given)
    assert alone.found == (value != 0 or inner is Root)
    assert (alone.parameter, alone.module, alone.rows) == (again.parameter, again.module, again.rows)

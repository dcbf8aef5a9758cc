"""From a batch to a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.errors import DataError, LossError
from cadenza.testing import tiny_model


def test_supervised_gives_the_loss_the_predictions_and_the_targets() -> None:
    inputs, targets = torch.ones(3, 1), torch.zeros(3, 1)
    outputs = supervised(nn.functional.mse_loss)(tiny_model(), (inputs, targets))
    assert outputs["targets"] is targets
    assert torch.equal(outputs["loss"], nn.functional.mse_loss(outputs["predictions"], targets))


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"x": 1, "y": 2}, r"a mapping with \['x', 'y'\]"),
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        ((1, 2, 3), "a tuple of 3"),
        ([1], "a list of 1"),
        (torch.zeros(3, 2, 2), r"a tensor of shape \(3, 2, 2\)"),
        (5, "a int"),
    ],
)
def test_other_batches_are_an_error_that_describes_them(batch: Any, got: str) -> None:
    with pytest.raises(DataError, match=rf"expects batches \(inputs, targets\); got {got}\. For other batches give a function"):
        supervised(nn.functional.mse_loss)(nn.Identity(), batch)


def test_a_loss_that_is_no_function_is_an_error() -> None:
    wrong: Any = "mse"
    with pytest.raises(TypeError, match=r"supervised takes a function \(predictions, targets\) -> loss; got 'mse'"):
        supervised(wrong)


@pytest.mark.parametrize(
    ("batch", "precision", "what"),
    [
        ((torch.zeros(2, 1), torch.zeros(2, 1)), "fp32", "the forward pass of the model"),
        (torch.zeros(2, 1), "fp32", "the loss that the model returned"),
        (torch.zeros(2, 1), "bf16", "the loss that the model returned"),
    ],
)
def test_a_model_that_gives_no_loss_because_compute_loss_is_missing_says_so(batch: Any, precision: str, what: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises((TypeError, LossError)) as raised:
        Trainer(nn.Linear(1, 1), optimizer, [batch], max_epochs=1, precision=precision, progress=False).fit()
    note = raised.value.__notes__[0]
    assert note.startswith(f"context: {what}")
    assert "likely cure: the trainer has no compute_loss" in note

"""A plain fit on several ranks says if no gradient reaches an optimizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from cadenza import Callback, on
from cadenza.testing import launch
from tests.distributed.parts import trainer

OTHER = nn.Linear(4, 1)


def of_another_model(model: nn.Module, batch: Any) -> Any:
    return OTHER(batch[0][:, :1].float().expand(-1, 4)).square().mean()


without_gradients = on(Callback.on_before_optimizer_step)(lambda run: run.optimizers[0].zero_grad())
with_zeros = on(Callback.on_before_optimizer_step)(lambda run: run.model.zero_grad(set_to_none=False))


@pytest.mark.parametrize(
    ("options", "driver", "steps"),
    [
        ({"compute_loss": of_another_model}, "ddp", "1 step"),
        ({"callbacks": [without_gradients]}, "ddp", "1 step"),
        ({"callbacks": [without_gradients]}, "fsdp", "1 step"),
        ({"callbacks": [with_zeros], "max_steps": 2}, "ddp", "2 steps"),  # the whole run
        ({}, "ddp", ""),
    ],
)
def test_a_run_on_two_ranks_in_which_no_gradient_reaches_the_optimizer_is_warned_once(
    options: Any, driver: str, steps: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer(driver=driver, **options).fit()
        return [text for text in caplog.messages if "has had a gradient" in text]

    for said in launch(train):
        assert len(said) == bool(steps)
        assert all(f"after {steps} of this run, no update of run.optimizers[0] (" in text for text in said)

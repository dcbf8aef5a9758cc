"""The loss that a bar shows is that of the step beside it, whatever the renderer, and however rarely it draws."""

from __future__ import annotations

import re
import time
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer
from cadenza.sinks import ProgressBar

SHOWN = re.compile(r"(\d+)/\d+ [^\r\n]*?loss ([\d.]+)")


@pytest.mark.parametrize("renderer", ["plain", "tqdm"])
def test_each_refresh_shows_the_loss_of_its_step(renderer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of step n is n."""
    numbers = count(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.002)
        outputs: Tensor = model(batch)
        return outputs.sum() * 0 + float(next(numbers))

    bar = ProgressBar(renderer, interval_s=0.02)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Trainer(model, optimizer, [torch.ones(1, 1)] * 100, loss, max_steps=100, device="cpu", callbacks=[bar]).fit()
    rows = [(int(step), float(value)) for step, value in SHOWN.findall("".join(capsys.readouterr()))]
    assert len(rows) > 2
    assert [step for step, value in rows if step != value] == []
    assert rows[-1] == (100, 100.0)

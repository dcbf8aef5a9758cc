"""Samples on several ranks: each rank counts its own, and what the outputs say is added when the ranks exchange numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.testing import launch
from tests.distributed.parts import driver, samples


def as_list(parts: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    return parts


def mean_of(model: nn.Module, parts: Any) -> Tensor:
    return model(torch.stack([inputs for inputs, *_ in parts])).square().mean()  # type: ignore[no-any-return]


def counted(samples_of: Any = None) -> int:
    def compute(model: nn.Module, parts: Any) -> dict[str, Any]:
        own = {} if samples_of is None else {"samples": samples_of(parts)}
        return {"loss": mean_of(model, parts), **own}

    loader: Any = DataLoader(samples(37), batch_size=4, collate_fn=as_list)
    one = Trainer(
        nn.Linear(3, 1),
        lambda p: torch.optim.SGD(p, 0.01),
        loader,
        compute,
        max_epochs=2,
        driver=driver(),
        seed=1,
        progress=False,
    )
    run: Run = one.fit()
    return run.progress.samples


def test_a_list_of_samples_is_counted_as_on_one_process() -> None:
    assert launch(lambda: (counted(), counted(lambda parts: 2 * len(parts)))) == [(74, 148)] * 2

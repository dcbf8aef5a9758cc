"""Schedules over tokens with multiple ranks: they count the tokens of all, and set the same rates."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from cadenza import Callback, Run, on
from cadenza.callbacks import LearningRate, Warmup
from tests.distributed.parts import own_rank, trainer
from tests.distributed.standing import on_ranks


def test_ranks_with_other_numbers_of_tokens_have_the_same_rates() -> None:
    def seen() -> tuple[list[int], list[float]]:
        tokens, rates = list[int](), list[float]()

        @on(Callback.on_before_optimizer_step)
        def look(run: Run) -> None:
            tokens.append(run.progress.tokens)
            rates.append(run.optimizers[0].param_groups[0]["lr"])

        fall = LearningRate(lambda optimizer, total: LambdaLR(optimizer, lambda done: 1 - done / total))
        limits: dict[str, Any] = {"max_epochs": None, "max_tokens": 100, "tokens": lambda batch: 7 + 4 * own_rank()}
        trainer(callbacks=[fall, Warmup("20%"), look], **limits).fit()
        return tokens, rates

    (tokens, rates), *others = on_ranks(seen)
    assert others == [(tokens, rates)]
    assert tokens == [18, 36, 54, 72, 90, 108]
    warm = [min(1.0, now / 20) * (1 - before / 100) for before, now in zip([0, *tokens], tokens, strict=False)]
    assert rates == pytest.approx([0.05 * factor for factor in warm])

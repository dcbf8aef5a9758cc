"""What an evaluation leaves behind can be trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cadenza import Callback, Evaluation, Run, Trainer, on, supervised
from cadenza.callbacks import Evaluate
from cadenza.testing import tiny_loader, tiny_run


class Caching(nn.Module):
    """Makes a tensor in its first forward pass and keeps it, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.scale: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0, 1, inputs.size(0)).unsqueeze(1)
        scaled: Tensor = self.linear(inputs) * self.scale
        return scaled


def test_a_model_that_fills_a_cache_in_the_sanity_evaluation_is_trained_with_it() -> None:
    model = Caching()
    run = tiny_run(model=model, callbacks=[Evaluate(tiny_loader(), sanity_batches=1)])
    assert run.progress.step == 5
    assert model.scale is not None


def test_predictions_that_a_callback_keeps_may_be_targets_later() -> None:
    kept: list[Tensor] = []

    @on(Callback.on_eval_batch_end)
    def keep(run: Run, evaluation: Evaluation, batch: object, outputs: Mapping[str, Any]) -> None:
        kept.append(outputs["predictions"])

    loss = supervised(nn.functional.mse_loss)
    tiny_run(compute_loss=loss, callbacks=[keep, Evaluate(tiny_loader())])
    distilled = tiny_run(compute_loss=loss, loader=list(zip((x for x, _ in tiny_loader()), kept, strict=True)))
    assert distilled.progress.step == 5


def test_inference_mode_is_there_for_who_asks_for_it() -> None:
    seen: list[bool] = []

    def compute(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        seen.append(loss.is_inference())
        return {"loss": loss}

    trainer = Trainer(
        nn.Linear(1, 1), lambda p: torch.optim.SGD(p, 0.1), tiny_loader(), compute, max_epochs=1, device="cpu", progress=False
    )
    plain = trainer.evaluate(tiny_loader())
    asked = trainer.evaluate(tiny_loader(), compute=torch.inference_mode()(compute))
    assert plain == asked
    assert seen == [False] * 5 + [True] * 5

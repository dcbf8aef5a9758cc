"""Gradients in hooks after the update: Lightning keeps them until the next batch; here code that names ``grad`` sees them."""

from __future__ import annotations

from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch", reason="gradients are compared with those of Lightning: pip install lightning")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from cadenza import Trainer  # noqa: E402


def norm(gradient: Tensor | None) -> float:
    assert gradient is not None
    return float(gradient.norm())


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]  # a module that may be absent
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.linear(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(norm(self.linear.weight.grad))

    def on_train_epoch_end(self) -> None:
        self.seen.append(norm(self.linear.weight.grad))


class Norms(pl.Callback):  # type: ignore[misc,name-defined]  # a module that may be absent
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(norm(module.linear.weight.grad))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(norm(module.linear.weight.grad))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_and_modules_read_the_gradients_of_the_last_update(accumulate: int) -> None:
    rows: Any = torch.arange(8.0).reshape(4, 2)
    seen = []
    for native in (False, True):
        module, norms = Module(), Norms()
        loader: Any = torch.utils.data.DataLoader(rows, 1)
        if native:
            Trainer.from_lightning(
                module, loader, max_epochs=2, accumulate=accumulate, callbacks=[norms], progress=False, device="cpu"
            ).fit()
            assert module.linear.weight.grad is None
        else:
            pl.Trainer(
                max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[norms], logger=False, accelerator="cpu",
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            ).fit(module, loader)  # fmt: skip
        assert len(norms.seen) == 10
        seen.append(norms.seen + module.seen)
    assert seen[0] == seen[1]

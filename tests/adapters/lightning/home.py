"""The same training in Lightning's own trainer and in a native one, with a callback that records what it gets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning's own trainer is compared with native ones: pip install lightning")

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import Evaluate

for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}
CPU: dict[str, Any] = {"device": "cpu", "progress": False}
HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
Call = tuple[Any, ...]


class Recorder(pl.Callback):
    """Records each hook, with the counters that it sees and its plain arguments."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def names(self) -> list[str]:
        return [str(call[0]) for call in self.calls]


def _recording(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Any, pl_module: Any, *values: Any, **keywords: Any) -> None:
        plain = [one for one in (*values, *keywords.values()) if isinstance(one, int | str) and not isinstance(one, bool)]
        where = (trainer.state.fn.value, trainer.state.stage.value if trainer.state.stage else None)
        losses = [one["loss"] for one in values if isinstance(one, dict) and isinstance(one.get("loss"), Tensor)]
        losses += [one.detach() for one in values] if name == "on_before_backward" else []
        seen = [round(float(loss), 5) for loss in losses if name.startswith(("on_train", "on_before"))]
        self.calls.append((name, trainer.current_epoch, trainer.global_step, *where, *plain, *seen))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name))


class Lit(pl.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=len(batch[0]))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.model(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.model.parameters())


def model_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def batches_of(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def loader_of(count: int, seed: int = 1) -> Any:
    return torch.utils.data.DataLoader(batches_of(count, seed), batch_size=None)  # type: ignore[arg-type]  # a list will do


def by_lightning(module: pl.LightningModule, *data: Any, **arguments: Any) -> pl.Trainer:
    """Train a module with Lightning's own trainer; return the trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**{**QUIET, **arguments})
        trainer.fit(module, *data)
    return trainer


def at_home(callbacks: list[Any], root: Path, *, batches: int = 3, valid: int = 2, **arguments: Any) -> pl.Trainer:
    """Train the linear model with Lightning's own trainer."""
    validation = loader_of(valid, 2) if valid else None
    return by_lightning(Lit(), loader_of(batches), validation, callbacks=callbacks, default_root_dir=root, **arguments)


def native(callbacks: list[Any], **arguments: Any) -> Run:
    """Train it with a native trainer."""
    return native_trainer(callbacks, **arguments).fit()


def native_trainer(
    callbacks: list[Any], *, batches: int = 3, valid: int = 2, every: Any = "1 epoch", sanity: int = 0, **arguments: Any
) -> Trainer:
    evaluate = [Evaluate(batches_of(valid, 2), every=every, sanity_batches=sanity)] if valid else []
    loss = supervised(nn.MSELoss())
    limits = arguments if "max_steps" in arguments or "max_epochs" in arguments else {"max_epochs": 2, **arguments}
    return Trainer(
        model_of(0), optimizer_of, batches_of(batches), loss, callbacks=[*evaluate, *callbacks], progress=False, **limits
    )

"""A toy training with five features, n rows and batches of four; and callbacks that record their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Run
from cadenza.compat.fastnlp import Callback, Trainer
from cadenza.compat.fastnlp.translation import EVENTS

Seen = tuple[str, int, int, int]
Rows = list[dict[str, Tensor]]


class Toy(nn.Module):
    """Predicts one number from five features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        with torch.no_grad():
            self.linear.weight.fill_(0.1)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"pred": self.linear(x)}

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(x), y)}

    def evaluate_step(self, x: Tensor) -> dict[str, Tensor]:
        return {"pred": self.linear(x)}


class Scripted:
    """A metric that reports given values: the first for the sanity check, then one per evaluation."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def update(self, pred: Tensor) -> None:
        """Take a batch."""

    def get_metric(self) -> dict[str, float]:
        return {"acc": next(self.values)}

    def reset(self) -> None:
        """Start anew."""


class Error:
    """The mean absolute error, with fastNLP's methods."""

    def __init__(self) -> None:
        self.reset()

    def update(self, pred: Tensor, y: Tensor) -> None:
        self.sum += float((pred - y).abs().sum())
        self.count += len(y)

    def get_metric(self) -> float:
        return self.sum / self.count

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0


def rows(count: int) -> Rows:
    generator = torch.Generator().manual_seed(count)
    features = torch.rand(count, 5, generator=generator)
    return [{"x": row, "y": row.sum().reshape(1)} for row in features]


def loader(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=options.pop("batch_size", 4), **options)  # type: ignore[arg-type]  # a list is one


def toy_trainer(count: int = 8, callbacks: Any = None, metrics: Mapping[str, Any] | None = None, **arguments: Any) -> Trainer:
    """Return a trainer on `count` rows; it evaluates on as many if there are metrics."""
    model = arguments.pop("model", None) or Toy()
    given = arguments.pop("train_dataloader", None)
    return Trainer(
        model,
        loader(count) if given is None else given,
        arguments.pop("optimizers", None) or torch.optim.SGD(model.parameters(), 0.1),
        evaluate_dataloaders=arguments.pop("evaluate_dataloaders", loader(count) if metrics else None),
        metrics=metrics,
        callbacks=callbacks,
        progress_bar=None,
        **arguments,
    )


def trained(count: int = 8, callbacks: Any = None, metrics: Mapping[str, Any] | None = None, **arguments: Any) -> Trainer:
    """Return a `toy_trainer` after its run."""
    trainer = toy_trainer(count, callbacks, metrics, **arguments)
    trainer.run()
    return trainer


def live(trainer: Trainer) -> Run:
    """Return the native run of a trainer."""
    assert trainer.live is not None
    return trainer.live


def weights_of(trained: Trainer | nn.Module) -> Tensor:
    model = trained.model if isinstance(trained, Trainer) else trained
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Scribe(Callback):
    """Writes down each event, with the counters then."""

    def __init__(self, *only: str) -> None:
        self.seen: list[Seen] = []
        for event in only or EVENTS:
            setattr(self, event, self._hearing(event))

    def _hearing(self, event: str) -> Callable[..., None]:
        def record(trainer: Any, *_: Any) -> None:
            at = trainer.cur_epoch_idx, trainer.batch_idx_in_epoch, trainer.global_forward_batches
            self.seen.append((event, *at))

        return record

    def at(self, event: str) -> list[tuple[int, int, int]]:
        """Return the counters at each firing of an event."""
        return [(e, b, g) for name, e, b, g in self.seen if name == event]

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.seen]


class Raising(Callback):
    """Raises something at one event, when so many batches are complete."""

    def __init__(self, event: str, at_batch: int, error: BaseException) -> None:
        def record(trainer: Any, *_: Any) -> None:
            if trainer.global_forward_batches == at_batch:
                raise error

        setattr(self, event, record)


class Hooks(Callback):
    """Calls functions at events: ``Hooks(on_train_end=lambda trainer: ...)``."""

    def __init__(self, **functions: Callable[..., object]) -> None:
        for event, function in functions.items():
            setattr(self, event, function)


def batches_seen(into: list[list[float]]) -> Callback:
    """Return a callback that notes the targets of each batch that is trained on."""
    return Hooks(on_train_batch_begin=lambda trainer, batch, indices: into.append(batch["y"].flatten().tolist()))

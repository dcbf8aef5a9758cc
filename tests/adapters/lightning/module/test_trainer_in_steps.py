"""What the code of a step reads of ``self.trainer``: the values of Lightning, at each place where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Trainer
from cadenza.callbacks import LearningRate
from cadenza.errors import CallbackError, DataError
from tests.adapters.lightning.module.home import Regression, at_home, batches, configured, native, rows, sgd, weights


class Looks(Regression):
    """Notes the position in the epoch wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def look(self, where: str) -> None:
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        counted = trainer.is_last_batch, loop.batch_idx, loop.total_batch_idx, trainer.global_step, trainer.current_epoch
        self.seen.append((where, *counted, trainer.num_training_batches, trainer.training, trainer.sanity_checking))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("training_step")
        return super().training_step(batch, batch_idx)


def _looking(name: str) -> Callable[..., Any]:
    def hook(self: Any, *given: Any) -> Any:
        self.look(name)
        return getattr(Regression, name)(self, *given)

    return hook


for _name in ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end", "lr_scheduler_step"):
    setattr(Looks, _name, _looking(_name))


class ByHand(Looks):
    """Accumulates gradients by hand, as in the documentation of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            schedule.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")


def _decaying(self: Any) -> Any:
    return [optimizer := sgd(self)], [ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("kind", [Looks, ByHand])
def test_the_position_in_the_epoch_is_that_of_lightning(kind: type[Any]) -> None:
    make = configured(_decaying, kind)
    theirs, ours = at_home(make, batches(), max_epochs=2), native(make, batches(), max_epochs=2)
    assert ours.seen == theirs.seen
    assert [one[0] for one in ours.seen if one[1]].count("training_step") == 2
    assert ours.rates == theirs.rates
    assert torch.equal(weights(ours), weights(theirs))


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(8))


def test_the_last_batch_of_a_loader_without_a_length_is_not_known() -> None:
    with pytest.raises(DataError, match="is_last_batch is not known"):
        native(ByHand, DataLoader(Stream(), 4), max_epochs=1)


def test_two_schedules_of_one_optimizer_are_refused() -> None:
    halved = LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5), per="epoch")
    arguments: dict[str, Any] = {"max_epochs": 1, "device": "cpu", "progress": False, "callbacks": [halved]}
    trainer = Trainer.from_lightning(configured(_decaying)(), batches(), **arguments)
    for start in (trainer.plan, trainer.fit):
        with pytest.raises(CallbackError, match=r"LearningRate.*ExponentialLR.*same optimizer\. Keep one"):
            start()
    assert Trainer.from_lightning(Regression(), batches(), **arguments).fit().outcome is not None


class Logging(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss


def test_a_module_that_logs_is_evaluated_before_any_fit() -> None:
    torch.manual_seed(1)
    trainer = Trainer.from_lightning(Logging(), batches(), max_epochs=1, device="cpu", progress=False)
    before = trainer.evaluate(batches(8))
    run = trainer.fit()
    assert trainer.evaluate(batches(8)) != before
    assert len(run.history["train_loss_step"]) == 10

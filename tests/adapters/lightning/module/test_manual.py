"""Manual optimization: GANs and other modules that call their optimizers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from cadenza import Trainer
from cadenza.callbacks import Checkpoint
from cadenza.errors import AdapterError
from cadenza.testing import launch
from tests.adapters.lightning.module.home import (
    Regression,
    at_home,
    batches,
    lightning,
    native,
    native_run,
    trained_alike,
    weights,
)
from tests.adapters.lightning.module.test_trainer_in_steps import Unfreezes

# -- a GAN ---------------------------------------------------------------------------------------------


class Gan(lightning.LightningModule):  # type: ignore[misc]
    """Draws points like those of the data. One network makes them, the other tells them from real ones."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[tuple[float, float]] = []
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        make, judge = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(make)
        assert not any(one.requires_grad for one in self.discriminator.parameters())
        fooled = self.against(self.generator(self.noise(batch_idx, len(real))), ones)
        make.zero_grad()
        self.manual_backward(fooled)
        self.clip_gradients(make, gradient_clip_val=0.5)
        make.step()
        self.untoggle_optimizer(make)

        with judge.toggle_model():
            made = self.generator(self.noise(batch_idx, len(real))).detach()
            told = (self.against(real, ones) + self.against(made, zeros)) / 2
            judge.zero_grad()
            self.manual_backward(told)
            judge.step()
        self.losses.append((fooled.item(), told.item()))

    def noise(self, batch_idx: int, count: int) -> torch.Tensor:
        return torch.randn(count, 2, generator=torch.Generator().manual_seed(batch_idx))

    def against(self, points: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.discriminator(points), target)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(f"step {self.trainer.global_step} {self.trainer.current_epoch}")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.calls.append(f"backward {loss.item():.4f}")

    def on_after_backward(self) -> None:
        self.calls.append("after")

    def on_train_epoch_end(self) -> None:
        for one in self.lr_schedulers():
            one.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"end {batch_idx} {self.trainer.global_step} {outputs.get('loss')}")

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam(self.generator.parameters(), self.hparams.rate)
        judge = torch.optim.SGD(self.discriminator.parameters(), self.hparams.rate, momentum=0.9)
        return [make, judge], [StepLR(make, 1, 0.5), {"scheduler": StepLR(judge, 1, 0.9), "interval": "epoch"}]


def test_a_gan_trains_as_in_lightning_with_the_same_calls_of_hooks() -> None:
    theirs, ours, run = trained_alike(Gan, max_epochs=2)
    assert len(ours.losses) == 20
    assert ours.calls == theirs.calls
    assert ours.trainer.global_step == theirs.trainer.global_step == 40
    assert run.loss is not None
    assert run.loss.item() == pytest.approx(sum(ours.losses[-1]))  # of all backward passes of the step


def test_a_gan_that_continues_in_mid_epoch_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = native_run(Gan, batches(), max_epochs=2, seed=1)
    save: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint(every="7 steps")], "seed": 1}
    first, run = native_run(Gan, batches(), max_steps=7, **save)
    assert (run.progress.step, first.trainer.global_step) == (7, 14)
    again, run = native_run(Gan, batches(), resume="auto", max_epochs=2, **save)
    assert (run.progress.step, again.trainer.global_step) == (20, 40)
    assert torch.equal(weights(again), weights(whole))
    assert again.losses == whole.losses[7:]


# -- other uses ----------------------------------------------------------------------------------------


class Accumulating(Regression):
    """Updates after every third batch, keeps its gradients in between, and closes over a second backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, (x, y) = self.optimizers(), batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.manual_backward(loss / 3, retain_graph=True)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        return {"loss": loss, "rows": len(x)}


class WithClosure(Regression):
    """Gives the optimizer a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, (x, y) = self.optimizers(), batch

        def closure() -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("make", [Accumulating, WithClosure])
def test_gradients_stay_between_batches_and_closures_are_called(make: type[Any]) -> None:
    trained_alike(make, max_epochs=2)


def test_gradients_that_wait_for_their_update_are_in_the_checkpoint(tmp_path: Path) -> None:
    whole = native(Accumulating, batches(), max_epochs=2, seed=1)
    save: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint(every="4 steps")], "seed": 1}
    native(Accumulating, batches(), max_steps=4, **save)
    again, _ = native_run(Accumulating, batches(), resume="auto", max_epochs=2, **save)
    assert again.losses == whole.losses[4:]
    assert torch.equal(weights(again), weights(whole))


def test_what_belongs_to_automatic_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate=1"):
        Trainer.from_lightning(Gan(), batches(), max_epochs=1, accumulate=2, device="cpu")

    class Confused(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))

    for fit in (at_home, native):
        with pytest.raises(Exception, match="automatic_optimization` as False"):
            fit(Confused, batches(), max_epochs=1)


# -- two processes -------------------------------------------------------------------------------------


class WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Contrastive(Regression):
    """Compares its embeddings with those of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = nn.functional.normalize(self.net[:2](batch[0]), dim=1)
        every = self.all_gather(own, sync_grads=True)
        assert not self.trainer.strategy.all_gather(own).requires_grad or self.trainer.world_size == 1
        every = every.flatten(0, 1) if self.trainer.world_size > 1 else every
        return torch.logsumexp(every @ every.T, 1).mean() + 0 * self.net[2](own).sum()


def test_two_processes_train_as_one_with_the_whole_batch() -> None:
    def fits() -> list[Any]:
        torch.set_num_threads(1)
        found = list[Any]()
        for make in (Regression, Gan, Contrastive, Unfreezes):
            module, run = native_run(make, batches(40, 4), max_epochs=1)
            found.append((weights(module), run.progress.step, module.trainer.global_step, type(run.driver).__name__))
        split = [native(WithAdam, batches(40, 4), max_epochs=1, driver=driver).losses for driver in ("ddp", "fsdp")]
        with pytest.raises(AdapterError, match="manual optimization, which works with one process and with DDP"):
            native(Gan, batches(40, 4), max_epochs=1, driver="fsdp")
        return [found, split]

    (first, split), (second, _) = launch(fits)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert [one[1:] for one in first] == [(5, 5, "DdpDriver"), (5, 10, "DdpDriver"), *[(5, 5, "DdpDriver")] * 2]
    assert split[1] == pytest.approx(split[0], rel=1e-5)
    for index, make in ((0, Regression), (2, Contrastive), (3, Unfreezes)):
        alone = native(make, batches(40, 8), max_epochs=1)
        torch.testing.assert_close(first[index][0], weights(alone))

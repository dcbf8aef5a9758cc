"""Steps: what their code reads of ``self.trainer``, those that optimize by hand, capsules and rollbacks, and two processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Trainer
from cadenza.callbacks import (
    Best,
    Capsule,
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    LearningRate,
    Limit,
    Recover,
    StopOnNonFinite,
)
from cadenza.compat.lightning import validate
from cadenza.errors import AdapterError, CallbackError, DataError
from cadenza.sinks import Sink
from cadenza.testing import launch
from cadenza.timetravel import replay_capsule, what_if
from tests.compat.lightning.home import CPU, by_lightning
from tests.compat.lightning.module import home as pair
from tests.compat.lightning.module.home import Regression, batches, configured, lightning, rows, sgd, weights

# -- steps -------------------------------------------------------------------------------------------------


class Looks(Regression):
    """Notes the position in the epoch wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def look(self, where: str) -> None:
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        counted = trainer.is_last_batch, loop.batch_idx, loop.total_batch_idx, trainer.global_step, trainer.current_epoch
        progress = loop.batch_progress
        counts = [vars(one)[name] for one in (progress.total, progress.current) for name in ("ready", "processed", "completed")]
        self.seen.append((where, *counted, *counts, trainer.num_training_batches, trainer.training, trainer.state.status))

    def setup(self, stage: str) -> None:
        self.seen.append(
            (self.trainer.estimated_stepping_batches, str(self.trainer.state), type(self.trainer.train_dataloader))
        )

    def on_train_end(self) -> None:
        self.look("on_train_end")

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


class Manual(Regression):
    """Calls its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByHand(Manual, Looks):
    """Accumulates gradients by hand, as in the documentation of Lightning."""

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
    theirs, ours, _ = pair.trained_alike(configured(_decaying, kind), max_epochs=2)
    assert ours.seen == theirs.seen
    assert [one[0] for one in ours.seen if one[1]].count("training_step") == 2
    assert ours.rates == theirs.rates


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(8))


def test_the_last_batch_of_a_loader_without_a_length_is_not_known() -> None:
    with pytest.raises(DataError, match="is_last_batch is not known"):
        pair.native(ByHand, DataLoader(Stream(), 4), max_epochs=1)


def test_two_schedules_of_one_optimizer_are_refused() -> None:
    halved = LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5), every="1 epoch")
    arguments: dict[str, Any] = {"max_epochs": 1, "callbacks": [halved], **CPU}
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
    trainer = Trainer.from_lightning(Logging(), batches(), max_epochs=1, **CPU)
    before = trainer.evaluate(batches(8))
    run = trainer.fit()
    assert trainer.evaluate(batches(8)) != before
    assert len(run.history["train_loss_step"]) == 10


def test_a_limit_is_known_when_schedules_are_made() -> None:
    def one_cycle(self: Any) -> Any:
        optimizer, total = sgd(self), int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total), "interval": "step"}]

    make = configured(one_cycle, Looks)
    limits: dict[str, Any] = {"home": {"limit_train_batches": 4}, "here": {"callbacks": [Limit(train=4)]}}
    theirs, ours, _ = pair.trained_alike(make, max_epochs=2, **limits)
    assert ours.rates == theirs.rates
    assert ours.seen == theirs.seen


class Drawing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        writer, image = self.logger.experiment, torch.rand(8, 6, 3)
        writer.add_scalar("train/mean", batch[0].mean(), self.global_step)
        writer.add_scalars("parts", {"a": 1.0, "b": batch_idx})
        writer.add_text("note", "a text")
        writer.add_histogram("weights", self.net[0].weight, self.global_step)
        writer.add_image("one", image, self.global_step, dataformats="HWC")
        writer.add_images("row", torch.rand(3, 1, 4, 5), self.global_step)
        writer.log({"epoch": 1, "size": len(batch[0])})
        return super().training_step(batch, batch_idx)


class Kept(Sink):
    def __init__(self) -> None:
        super().__init__()
        self.media: dict[str, Any] = {}

    def open(self, info: Any) -> None:
        """Nothing is to be opened."""

    def write(self, records: Sequence[Any]) -> None:
        for record in records:
            self.media |= record.media

    def close(self, outcome: Any) -> None:
        """Nothing is to be closed."""


def test_the_experiment_of_the_logger_takes_the_methods_of_a_summary_writer(tmp_path: Path) -> None:
    kept = Kept()
    _, run = pair.native_run(Drawing, batches(8), max_epochs=1, callbacks=[kept], directory=tmp_path)
    assert run.history.names == ["train/mean", "parts/a", "parts/b", "size"]
    assert run.history["parts/b"] == [(1, 0), (2, 1)]
    kinds = [(name, type(one).__name__) for name, one in kept.media.items()]
    assert kinds == [("note", "Text"), ("weights", "Histogram"), ("one", "Image"), ("row", "Image")]
    assert kept.media["one"].pixels.shape == (3, 8, 6)
    assert kept.media["row"].pixels.shape == (1, 4, 15)


def test_one_name_for_two_values_of_an_epoch_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Both(Logging):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("train_loss_epoch", 1.0)

    _, run = pair.native_run(Both, (batches(), batches(8)), max_epochs=2)
    assert [one.message.split(":")[0] for one in caplog.records if "same epoch" in one.message] == [
        "training_step and validation_step log 'train_loss_epoch' for the same epoch"
    ]
    assert len(run.history["train_loss_epoch"]) == 2


def test_the_trainer_is_known_before_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return batches()

    class Asks(Regression):
        seen: list[Any]

        def configure_callbacks(self) -> Any:
            self.seen = [self.trainer.datamodule is data, data.trainer is self.trainer]
            return []

        def setup(self, stage: str) -> None:
            self.print("set up", stage)
            self.seen += [self.trainer.log_dir, self.device, self.trainer.checkpoint_callback]

        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            self.seen += [len(self.trainer.train_dataloader), self.trainer.fit_loop.max_epochs]
            return super().configure_optimizers()

    data = Data()
    theirs, ours = Asks(), Asks()
    by_lightning(theirs, data, max_epochs=1, default_root_dir=tmp_path)
    Trainer.from_lightning(ours, data, max_epochs=1, device="cpu:0", directory=tmp_path, progress=False).fit()
    assert ours.seen[3] == torch.device("cpu:0")  # before the module is there
    ours.seen[3] = torch.device("cpu")
    assert ours.seen == theirs.seen
    assert capsys.readouterr().out.splitlines().count("set up TrainerFn.FITTING") == 2


class Unfreezes(Regression):
    """Freezes its first layer when the training starts, and trains it from the second epoch on."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False).eval()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True).train()


def test_what_a_module_froze_and_unfroze_stays_so_in_a_run_that_continues(tmp_path: Path) -> None:
    whole = pair.native(Unfreezes, batches(20), max_epochs=3, seed=1)
    assert whole.losses == pair.at_home(Unfreezes, batches(20), max_epochs=3).losses
    keep: dict[str, Any] = {"callbacks": [Checkpoint("1 step", keep_last=99)], "directory": tmp_path, "seed": 1}
    pair.native(Unfreezes, batches(20), max_epochs=3, **keep)
    for step in (7, 10):
        path = tmp_path / "checkpoints" / f"step-{step:08}"
        again, _ = pair.native_run(Unfreezes, batches(20), resume=path, max_epochs=3, seed=1)
        assert again.losses == whole.losses[step:]
        assert torch.equal(weights(again), weights(whole))


class LeavesOut(Regression):
    """Leaves its frozen layer out of checkpoints, as one that loads a large pretrained part does."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.net[0].requires_grad_(False)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return {name: one for name, one in super().state_dict(*arguments, **keywords).items() if not name.startswith("net.0")}


def test_a_module_may_leave_weights_out_of_its_checkpoints(tmp_path: Path) -> None:
    save: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint("3 steps", keep_last=9)]}
    whole = pair.native(LeavesOut, batches(20), max_epochs=2, seed=1, **save)
    again, _ = pair.native_run(LeavesOut, batches(20), tmp_path / "checkpoints" / "step-00000003", max_epochs=2, seed=1)
    assert again.losses == whole.losses[3:]


# -- manual optimization -----------------------------------------------------------------------------------


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
    theirs, ours, run = pair.trained_alike(Gan, max_epochs=2)
    assert len(ours.losses) == 20
    assert ours.calls == theirs.calls
    assert ours.trainer.global_step == theirs.trainer.global_step == 40
    assert run.loss is not None
    assert run.loss.item() == pytest.approx(sum(ours.losses[-1]))  # of all backward passes of the step


class Accumulating(Manual):
    """Updates after every third batch, keeps its gradients in between, and closes over a second backward pass."""

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


class Resumed(Regression):
    """Has what a checkpoint must hold: momentum, two schedules, dropout, and a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])

    def on_train_epoch_end(self) -> None:
        self.log("seen", 1.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        assert batches["total"]["completed"] == checkpoint["global_step"]
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        assert checkpoint["global_step"] == 13

    def configure_optimizers(self) -> Any:
        one = sgd(self)
        plateau = ReduceLROnPlateau(one, patience=1, threshold=10.0)
        return [one], [{"scheduler": plateau, "monitor": "seen"}, {"scheduler": OneCycleLR(one, 0.02, 40), "interval": "step"}]


@pytest.mark.parametrize(("make", "steps", "updates"), [(Gan, 7, 14), (Accumulating, 4, 1), (Resumed, 13, 13)])
def test_a_run_that_continues_in_mid_epoch_ends_with_the_same_bits(
    make: type[Any], steps: int, updates: int, tmp_path: Path
) -> None:
    whole = pair.native(make, batches(), max_epochs=4, seed=1)
    save: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint(every=f"{steps} steps")], "seed": 1}
    first, run = pair.native_run(make, batches(), max_steps=steps, **save)
    assert (run.progress.step, first.trainer.global_step) == (steps, updates)
    again, run = pair.native_run(make, batches(), resume="auto", max_epochs=4, **save)
    assert (run.progress.step, again.trainer.global_step) == (40, whole.trainer.global_step)
    assert torch.equal(weights(again), weights(whole))
    assert again.losses == whole.losses[steps:]
    if make is Resumed:
        assert again.rates == whole.rates[steps:]
        assert again.seen == whole.seen == 160


class WithClosure(Manual):
    """Gives the optimizer a closure."""

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
    pair.trained_alike(make, max_epochs=2)


def test_what_belongs_to_automatic_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate=1"):
        Trainer.from_lightning(Gan(), batches(), max_epochs=1, accumulate=2, device="cpu")

    class Confused(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))

    for fit in (pair.at_home, pair.native):
        with pytest.raises(Exception, match="automatic_optimization` as False"):
            fit(Confused, batches(), max_epochs=1)


# -- capsules, rollbacks and recorded evaluations ----------------------------------------------------------

torchmetrics: Any = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

BAD = 13


class Noted(Logging):
    """Logs a metric too, and notes the counters of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.steps: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(self.net(batch[0]), batch[1])
        self.log("train_error", self.error, on_epoch=True, on_step=False)
        self.steps.append((self.trainer.global_step, self.trainer.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer_in(directory: Path | None, *callbacks: Any, bad: bool = False, **limits: Any) -> Trainer:
    torch.manual_seed(1)
    inputs, targets = rows(40).tensors
    targets = targets.clone()
    if bad:
        targets[BAD] = math.nan
    loaders = DataLoader(TensorDataset(inputs, targets), 4), DataLoader(rows(8), 4)
    arguments: dict[str, Any] = {"max_epochs": 3, "directory": directory, "callbacks": callbacks, **CPU, **limits}
    return Trainer.from_lightning(Noted(), loaders, **arguments)


def test_a_capsule_is_repeated_in_another_process_with_the_counters_of_its_step(tmp_path: Path) -> None:
    trainer_in(tmp_path, Capsule(most=1), bad=True).fit()
    trainer = trainer_in(None)
    again = replay_capsule(trainer, tmp_path)
    assert (again.step, again.same, again.located.rows) == (BAD // 4 + 1, True, [BAD % 4])
    module: Any = trainer.model
    assert {*module.steps} == {(BAD // 4, 0, BAD // 4)}


@pytest.mark.parametrize(
    ("make", "what"), [(Recover, "batch left out"), (partial(StopOnNonFinite, "skip"), "batch skipped")], ids=["back", "on"]
)
def test_the_values_of_a_batch_that_is_left_out_are_not_logged(tmp_path: Path, make: Any, what: str) -> None:
    run = trainer_in(tmp_path / "run", make(), Capsule(), Checkpoint("1 epoch"), bad=True).fit()
    other = trainer_in(tmp_path / "other", make(), Checkpoint("1 epoch"), bad=True).fit()
    assert [one for one in run.decisions if one.what == what]
    for name in ("train_loss_step", "train_loss_epoch", "train_error"):
        assert all(math.isfinite(value) for _, value in run.history[name]), name
        assert run.history[name] == other.history[name]  # the second pass of the capsule counts nothing
    assert len(run.history["train_loss_step"]) == 30 - 3  # once in each epoch
    assert run.outcome is not None
    assert "not finite" not in run.outcome.reason


def test_what_if_knows_the_names_of_a_module(tmp_path: Path) -> None:
    stop = EarlyStopping("val_loss", "min", patience=1, min_delta=10.0)
    trainer_in(tmp_path / "long").fit()
    stopped = trainer_in(tmp_path / "stopped", stop).fit()
    answer = what_if(tmp_path / "long", [EarlyStopping("val_loss", "min", patience=1, min_delta=10.0)])
    assert answer.stopped is not None
    assert (answer.step, answer.stopped.why) == (stopped.progress.step, stopped.outcome.reason)  # type: ignore[union-attr]


def test_native_callbacks_stand_beside_the_module_and_resume_exactly(tmp_path: Path) -> None:
    def fit(folder: str, **limits: Any) -> tuple[Trainer, Any]:
        stop = EarlyStopping("val_loss", "min", patience=2, min_delta=10.0)
        keep = Checkpoint(every="7 steps", keep=Best("val_loss", mode="min"))
        callbacks = [ClipGradients(max_norm=0.5), Ema(decay=0.9), stop, keep]
        trainer = trainer_in(tmp_path / folder, *callbacks, **{"max_epochs": 9, "seed": 1, **limits})
        return trainer, trainer.fit(resume="auto")

    trainer, run = fit("whole")
    assert run.outcome.kind == "stopped"
    assert "val_loss" in run.why("stopped")
    [result] = validate(trainer, which="best")
    assert result["val_loss"] == pytest.approx(min(value for _, value in run.history["val_loss"]))
    fit("parts", max_steps=24)
    _, resumed = fit("parts")
    assert resumed.progress.step == run.progress.step == 30
    assert torch.equal(weights(resumed.model), weights(run.model))
    assert resumed.history["val_loss"] == run.history["val_loss"]


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
            module, run = pair.native_run(make, batches(40, 4), max_epochs=1)
            found.append((weights(module), run.progress.step, module.trainer.global_step, type(run.driver).__name__))
        split = [pair.native(WithAdam, batches(40, 4), max_epochs=1, driver=driver).losses for driver in ("ddp", "fsdp")]
        with pytest.raises(AdapterError, match="manual optimization, which works with one process and with DDP"):
            pair.native(Gan, batches(40, 4), max_epochs=1, driver="fsdp")
        return [found, split]

    (first, split), (second, _) = launch(fits)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert [one[1:] for one in first] == [(5, 5, "DdpDriver"), (5, 10, "DdpDriver"), *[(5, 5, "DdpDriver")] * 2]
    assert split[1] == pytest.approx(split[0], rel=1e-5)
    for index, make in ((0, Regression), (2, Contrastive), (3, Unfreezes)):
        alone = pair.native(make, batches(40, 8), max_epochs=1)
        torch.testing.assert_close(first[index][0], weights(alone))

"""The ways of training on multiple ranks that `distributed.py` compares: by hand, with Cadenza, and with other packages.

Each does the same job, on the CPU with gloo. The plain job is forward, backward and update. The usual one adds gradient
clipping, an average of the weights, a learning rate schedule, the mean loss over the ranks every 50 steps, printed and
written to a file, and a checkpoint at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, LearningRate, LogTraining
from cadenza.drivers import DdpDriver
from cadenza.sinks import Console

Batch = tuple[Tensor, Tensor]
EVERY, DECAY, MAX_NORM = 50, 0.999, 1.0


class Mlp(nn.Module):
    """Linear layers with ReLU between them, always with the same weights. Notes the time, and the CPU time, at each pass."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.at: list[float] = []
        self.cpu_at: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.at.append(time.perf_counter())
        self.cpu_at.append(time.process_time())
        logits: Tensor = self.layers(inputs)
        return logits


@dataclass(frozen=True)
class Job:
    """One training on this rank."""

    model: Mlp
    batches: list[Batch]
    """The batches of this rank."""
    all_batches: list[Batch]
    """The batches of all ranks, in turn."""
    driver: DdpDriver
    place: Path
    """An empty folder, the same on all ranks."""
    usual: bool
    """Whether to run the usual job instead of the plain one."""

    def optimizer(self) -> torch.optim.Optimizer:
        """Return one of the parameters of the model."""
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        """Return one over all steps."""
        return CosineAnnealingLR(optimizer, len(self.batches))


Way = Callable[[Job], None]


class Average:
    """An exponential moving average of weights, by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.current = list(model.parameters())
        self.averaged = [tensor.detach().clone() for tensor in self.current]

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights."""
        torch._foreach_lerp_(self.averaged, self.current, 1 - DECAY)


class Log:
    """The mean loss over the ranks, printed and written to a file, by hand."""

    def __init__(self, job: Job) -> None:
        self.job, self.main = job, job.driver.rank == 0
        self.file = (job.place / "metrics.jsonl").open("w", encoding="utf-8") if self.main else None

    def write(self, step: int, loss: Tensor, rate: float) -> None:
        """Write the values of a step."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if self.file is not None:
            values = {"step": step, "loss": mean.item() / self.job.driver.world_size, "lr": rate}
            print(values, flush=True)
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()

    def save(self, step: int, average: Average, *stateful: Any) -> None:
        """Write a checkpoint, from the main process, and close the file."""
        if self.file is not None:
            self.file.close()
            states = [part.state_dict() for part in stateful]
            torch.save({"states": states, "average": average.averaged, "step": step}, self.job.place / "last.pt")


# -- by hand ---------------------------------------------------------------------------------------


def by_hand(job: Job) -> None:
    """DDP written by hand."""
    if job.usual:
        usual_by_hand(job)
        return
    model, optimizer, loss_fn = DistributedDataParallel(job.model), job.optimizer(), nn.CrossEntropyLoss()
    model.train()
    for inputs, targets in job.batches:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def usual_by_hand(job: Job) -> None:
    """The same with the work of the usual callbacks."""
    model, optimizer, loss_fn = DistributedDataParallel(job.model), job.optimizer(), nn.CrossEntropyLoss()
    scheduler, average, log = job.scheduler(optimizer), Average(job.model), Log(job)
    parameters = list(job.model.parameters())
    model.train()
    for step, (inputs, targets) in enumerate(job.batches, start=1):
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update()
        if step % EVERY == 0:
            log.write(step, loss, scheduler.get_last_lr()[0])
    log.save(len(job.batches), average, job.model, optimizer, scheduler)


# -- Cadenza ---------------------------------------------------------------------------------------


class Own(Callback):
    """A user callback that is called in each step and could log or stop."""

    def on_step_end(self, run: Run) -> None: ...


def with_cadenza(job: Job, callbacks: Callable[[], list[Callback]] = list) -> None:
    """`Trainer`, which takes the batches of all ranks."""
    optimizer = job.optimizer()
    usual = [
        LogTraining(f"{EVERY} steps"),
        Ema(DECAY),
        ClipGradients(MAX_NORM),
        LearningRate(job.scheduler(optimizer)),
        Console(),
        Checkpoint(),
    ]
    Trainer(
        job.model,
        optimizer,
        job.all_batches,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=1,
        driver=job.driver,
        directory=job.place / "run" if job.usual else None,
        progress=False,
        callbacks=usual if job.usual else callbacks(),
    ).fit()


# -- other packages --------------------------------------------------------------------------------


def with_accelerate(job: Job) -> None:
    """Run the hand-written loop on the objects prepared by accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(job.model, job.optimizer())
    loss_fn = nn.CrossEntropyLoss()
    scheduler, average, log = job.scheduler(optimizer.optimizer), Average(job.model), Log(job)
    model.train()
    for step, (inputs, targets) in enumerate(job.batches, start=1):
        loss = loss_fn(model(inputs), targets)
        accelerator.backward(loss)
        if job.usual:
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if job.usual:
            scheduler.step()
            average.update()
            if step % EVERY == 0:
                log.write(step, loss, scheduler.get_last_lr()[0])
    if job.usual:
        log.save(len(job.batches), average, job.model, optimizer, scheduler)


def with_lightning(job: Job) -> None:
    """Lightning's Trainer with its callbacks."""
    from lightning import LightningModule
    from lightning import Trainer as LightningTrainer
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_fn = job.model, nn.CrossEntropyLoss()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss: Tensor = self.loss_fn(self.model(batch[0]), batch[1])
            if job.usual and (batch_idx + 1) % EVERY == 0:
                self.log("train/loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer()
            step = {"scheduler": job.scheduler(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": step} if job.usual else optimizer

    class Averages(EMAWeightAveraging):
        def on_train_end(self, *arguments: object) -> None:
            """Keep the model's weights, which are compared."""

    class Ready(list[Batch]):
        """Batches that are accepted as a loader."""

    LightningTrainer(
        accelerator="cpu",
        devices=job.driver.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        default_root_dir=job.place,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=job.usual,
        logger=CSVLogger(job.place) if job.usual else False,
        log_every_n_steps=EVERY,
        gradient_clip_val=MAX_NORM if job.usual else None,
        callbacks=[Averages(decay=DECAY)] if job.usual else [],
    ).fit(Module(), Ready(job.batches))


def with_transformers(job: Job) -> None:
    """Hugging Face's Trainer; it has no weight averaging, so this is a callback."""
    from transformers import Trainer as HfTrainer
    from transformers import TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_fn = job.model, nn.CrossEntropyLoss()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(inputs)
            return {"loss": self.loss_fn(logits, labels), "logits": logits}

    class Averages(TrainerCallback):
        def on_step_end(self, *arguments: object, **keywords: object) -> None:
            average.update()

    class Ready(list[dict[str, Tensor]]):
        batch_size = len(job.batches[0][0])
        dataset = range(batch_size * len(job.batches))

    class ReadyTrainer(HfTrainer):
        def get_train_dataloader(self) -> Ready:
            return Ready({"inputs": inputs, "labels": targets} for inputs, targets in job.batches)

    steps, optimizer, average = len(job.batches), job.optimizer(), Average(job.model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        str(job.place),
        num_train_epochs=1,
        max_grad_norm=MAX_NORM if job.usual else 0.0,
        logging_strategy="steps" if job.usual else "no",
        logging_steps=EVERY,
        logging_nan_inf_filter=False,
        save_strategy="steps" if job.usual else "no",
        save_steps=steps,
        per_device_train_batch_size=Ready.batch_size,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    schedule: Any = job.scheduler(optimizer) if job.usual else constant
    listeners: list[TrainerCallback] = [Averages()] if job.usual else []
    ReadyTrainer(WithLoss(), arguments, optimizers=(optimizer, schedule), callbacks=listeners).train()


PLAIN: dict[str, Way] = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    "Cadenza": with_cadenza,
    "Cadenza, a callback of one's own": partial(with_cadenza, callbacks=lambda: [Own()]),
    "accelerate": with_accelerate,
    "Lightning": with_lightning,
    "HF Trainer": with_transformers,
}
"""The ways to run the plain job; the first is the baseline."""
USUAL: dict[str, Way] = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    "Cadenza": with_cadenza,
    "accelerate": with_accelerate,
    "Lightning": with_lightning,
    "HF Trainer": with_transformers,
}
"""The ways to run the usual job."""
PACKAGES = {"accelerate": "accelerate", "Lightning": "lightning", "HF Trainer": "transformers"}
"""The packages that a way needs in addition to torch and Cadenza."""

"""Trainings drawn at random, for `kill.py`: data, model, optimizers, schedules, averages, precision and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from kill_instants import among
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    Freeze,
    LearningRate,
    LogTraining,
    ScheduleValue,
    Swa,
    Warmup,
)
from cadenza.loading import TensorBatches

WIDTH, CLASSES = 16, 3

DATA = ("map", "batch sampler", "weighted", "iterable", "any iterable", "tensors", "list", "with state", "stateful loader")
MODELS = ("mlp", "conv", "lstm", "gan")
OPTIMIZERS = ("sgd", "adamw", "amsgrad", "rmsprop", "adagrad", "nadam", "two")
SCHEDULES = ("none", "one cycle", "cosine", "step", "plateau", "warmup and cosine", "weight decay")
AVERAGES = ("none", "ema", "swa", "both")


@dataclass(frozen=True)
class Job:
    """One training; everything in it follows from `seed`."""

    seed: int
    data: str
    workers: int
    persistent: bool
    model: str
    optimizer: str
    schedule: str
    averages: str
    precision: str
    accumulate: int
    samples: int
    batch_size: int
    epochs: int
    save_every: str
    background: bool
    keep_last: int
    freeze: bool
    patience: int

    @staticmethod
    def draw(seed: int) -> Job:
        """Return the job with this number."""
        dice = random.Random(seed)
        data, model = dice.choice(DATA), dice.choice(MODELS)
        # A StatefulDataLoader saves no RNG states of its workers; the other kinds have none.
        in_workers = data in ("map", "batch sampler", "weighted", "iterable")
        workers = dice.choice((0, 0, 1, 2, 3)) if in_workers else 0
        batch_size, gan = dice.randint(3, 6), model == "gan"
        rest = 0 if data == "iterable" else dice.choice((0, 2))  # a last batch of one is too small for BatchNorm
        in_one = batch_size * (max(1, workers) if data == "iterable" else 1)  # each worker builds separate batches
        samples = in_one * (-(-dice.randint(40, 90) // in_one)) + rest
        precision = dice.choice(("fp32", "bf16") if model == "lstm" else ("fp32", "bf16", "fp16"))
        lengthless = data == "iterable"
        optimizer = "two" if gan else dice.choice(OPTIMIZERS)
        # One cycle needs the number of steps, and an optimizer with a momentum.
        schedules = [name for name in SCHEDULES if name != "one cycle" or not (lengthless or optimizer == "adagrad")]
        return Job(
            seed=seed,
            data=data,
            workers=workers,
            persistent=workers > 0 and dice.random() < 0.5,
            model=model,
            optimizer=optimizer,
            schedule="none" if gan else dice.choice(schedules),
            averages=dice.choice(AVERAGES),
            precision=precision,
            accumulate=1 if gan else dice.randint(1, 3),
            samples=samples,
            batch_size=batch_size,
            epochs=dice.randint(3, 5),
            save_every=dice.choice(("2 steps", "5 steps", "1 epoch", "5 steps" if lengthless else "0.5 epoch")),
            background=dice.random() < 0.7,
            keep_last=dice.randint(1, 3),
            freeze=model == "mlp" and dice.random() < 0.3,
            patience=dice.choice((2, 50)),
        )

    @property
    def steps(self) -> int:
        """The number of updates, unless a callback ends it sooner."""
        batches = -(-self.samples // self.batch_size)
        return self.epochs * -(-batches // self.accumulate)

    @property
    def kind(self) -> str:
        """The kind of its loader."""
        return self.data

    def fit(self, directory: Path) -> Run:
        """Train, or continue the training, in this process."""
        # only loaders without position and state are read again up to the old position
        return self.trainer(directory).fit(resume="auto", replay=self.data in ("iterable", "any iterable"))

    def trainer(self, directory: Path) -> Trainer:
        """Return its trainer: the same for every directory."""
        torch.manual_seed(self.seed)
        model = MODEL_OF[self.model]()
        rest: dict[str, Any] = {"compute_loss": supervised(nn.CrossEntropyLoss())}
        if self.model == "gan":
            rest = {"step_fn": gan_step}
        return Trainer(
            model,
            self._optimizer(model),
            self._loader(),
            **rest,
            max_epochs=self.epochs,
            accumulate=self.accumulate,
            precision=self.precision,
            seed=self.seed,
            directory=directory,
            device="cpu",
            progress=False,
            callbacks=among(self._callbacks(model), random.Random(self.seed)),
        )

    def _optimizer(self, model: nn.Module) -> Any:
        if self.model == "gan":
            assert isinstance(model, Gan)
            return [torch.optim.Adam(model.maker.parameters(), 0.01), torch.optim.RMSprop(model.judge.parameters(), 0.01)]
        if self.optimizer == "two":
            first, *others = list(model.parameters())
            return [torch.optim.SGD([first], 0.05, momentum=0.9), torch.optim.AdamW(others, 0.01)]
        make: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
            "adamw": lambda p: torch.optim.AdamW(p, 0.01),
            "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
            "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
            "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
            "nadam": lambda p: torch.optim.NAdam(p, 0.01),
        }
        chosen = make[self.optimizer]
        return chosen if self.seed % 2 else chosen(model.parameters())

    def _loader(self) -> Iterable[Any]:
        points, size = Points(self.samples), self.batch_size
        several = {"num_workers": self.workers, "persistent_workers": self.persistent}
        match self.data:
            case "map":
                return DataLoader(points, size, shuffle=True, **several)
            case "batch sampler":
                return DataLoader(points, batch_sampler=BatchSampler(RandomSampler(points), size, drop_last=False), **several)
            case "weighted":
                weights = [1.0 + index % 4 for index in range(self.samples)]
                return DataLoader(points, size, sampler=WeightedRandomSampler(weights, self.samples), **several)
            case "iterable":
                return DataLoader(Stream(self.samples), size, **several)
            case "any iterable":
                return Noise(self.samples, size)
            case "tensors":
                return TensorBatches(*points.clean(), batch_size=size, shuffle=True)
            case "list":
                return list(zip(*(part.split(size) for part in points.clean()), strict=True))
            case "with state":
                return WithState(self.samples, size)
            case _:
                from torchdata.stateful_dataloader import StatefulDataLoader

                return StatefulDataLoader(list(zip(*points.clean(), strict=True)), size, shuffle=True)

    def _callbacks(self, model: nn.Module) -> list[Callback]:
        judged = DataLoader(Points(24), batch_size=12)
        averages: list[Callback] = []
        averages += [Ema(0.9)] if self.averages in ("ema", "both") else []
        statistics = 0 if self.model == "gan" else 2
        averages += [Swa("1 epoch", "3 steps", update_batch_norm=statistics)] if self.averages in ("swa", "both") else []
        weights = {"ema": "ema", "swa": "swa"}.get(self.averages)
        compute = gan_judged if self.model == "gan" else None
        return [
            *([Freeze(["0"], until="1 epoch")] if self.freeze else []),
            *([] if self.model == "gan" else [ClipGradients(max_norm=1.0)]),
            *self._schedules(),
            *averages,
            Evaluate(judged, compute=compute, weights=weights, every="4 steps" if self.data == "iterable" else "0.5 epoch"),
            EarlyStopping("eval/loss", mode="min", patience=self.patience),
            LogTraining("3 steps", throughput=False),
            Checkpoint(self.save_every, keep_last=self.keep_last, keep_best=("eval/loss", "min"), background=self.background),
        ]

    def _schedules(self) -> list[Callback]:
        schedulers = torch.optim.lr_scheduler
        match self.schedule:
            case "one cycle":
                return [LearningRate(lambda optimizer, total: schedulers.OneCycleLR(optimizer, 0.02, total_steps=total))]
            case "cosine":
                return [LearningRate(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, self.steps))]
            case "step":
                return [LearningRate(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.7), every="1 epoch")]
            case "plateau":
                plateau = schedulers.ReduceLROnPlateau
                return [LearningRate(lambda optimizer: plateau(optimizer, patience=0), monitor=("eval/loss", "min"))]
            case "warmup and cosine":
                cosine = LearningRate(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, self.steps))
                return [Warmup("6 steps"), cosine]
            case "weight decay":
                return [ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "weight_decay", {0: 0.0, 10: 0.1})]
            case _:
                return []


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Noisy points: every reading of a sample draws new noise, from torch, Python and numpy."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.rand(WIDTH) + 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        return torch.full((WIDTH,), index / self.count) + noise, torch.tensor(index % CLASSES)

    def clean(self) -> tuple[Tensor, Tensor]:
        """Return all points without noise, and their classes."""
        own = torch.Generator().manual_seed(self.count)
        return torch.rand(self.count, WIDTH, generator=own), torch.arange(self.count) % CLASSES


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same noisy points, one after another, dealt out to the workers."""

    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, len(self.points), of):
            yield self.points[index]


class Noise:
    """Random batches, without a length, a position or a state."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.samples, self.batch_size):
            yield torch.rand(self.batch_size, WIDTH), (torch.arange(self.batch_size) + start) % CLASSES

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)


class WithState(Noise):
    """The same from a separate generator with a state: its position in an epoch, since each epoch starts with a new `iter`."""

    def __init__(self, samples: int, batch_size: int) -> None:
        super().__init__(samples, batch_size)
        self.own, self.done, self.resumed = torch.Generator(), 0, False

    def set_epoch(self, epoch: int) -> None:
        self.own.manual_seed(1000 * self.samples + epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.resumed:
            self.done = 0
        self.resumed = False
        while self.done < len(self):
            self.done += 1
            inputs = torch.rand(self.batch_size, WIDTH, generator=self.own)
            yield inputs, (torch.arange(self.batch_size) + self.done) % CLASSES

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "own": self.own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.resumed = state["done"], True
        self.own.set_state(state["own"])


class Lstm(nn.Module):
    """Reads a point as eight pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 24, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden, _ = self.inner(points.view(len(points), 8, 2))
        scores: Tensor = self.head(hidden[:, -1])
        return scores


class Gan(nn.Module):
    """Two players: one makes points, one judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, noise: Tensor) -> Tensor:
        made: Tensor = self.maker(noise)
        return made


def gan_step(run: Run, batch: Any) -> dict[str, Any]:
    """Update the judge, then the maker."""
    model: Any = run.model
    points, bce = batch[0], nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(points), 1), torch.zeros(len(points), 1)
    made = model.maker(torch.randn(len(points), 4))
    judged = bce(model.judge(points).float(), ones) + bce(model.judge(made.detach().float()).float(), zeros)
    run.backward(judged)
    run.update(run.optimizers[1])
    loss = bce(model.judge(made).float(), ones)
    run.backward(loss)
    run.update(run.optimizers[0])
    return {"loss": loss.detach(), "judged": judged.detach()}


def gan_judged(model: Any, batch: Any) -> dict[str, Any]:
    """Return how far the means of real and made points are apart."""
    made = model.maker(torch.linspace(-1, 1, 4 * len(batch[0])).view(-1, 4))
    return {"loss": (made.float().mean(0) - batch[0].mean(0)).square().mean()}


MODEL_OF: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, CLASSES)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(112, CLASSES)
    ),
    "lstm": Lstm,
    "gan": Gan,
}

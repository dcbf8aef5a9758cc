"""Trainings for `kill.py`, each with one feature: recovery, mixtures, budgets of tokens, streams, adapters, own loops."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as lightning
import torch
from kill_instants import among
from kill_jobs import CLASSES, MODEL_OF, WIDTH, Points
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import cadenza.compat.lightning.module.assembling  # noqa: F401  # here: a killed process must not import it anew
from cadenza import Callback, Run, Trainer, attach, on, supervised
from cadenza.callbacks import (
    Best,
    BestWeights,
    Capsule,
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    Recover,
    SequenceLength,
    StopOnNonFinite,
    Swa,
    Warmup,
)
from cadenza.compat.transformers import trainer as trainer_of_arguments
from cadenza.hooks import At, Every, First, Last
from cadenza.loading import Mixture, TensorBatches

SIZE, WORDS = 4, 20


@dataclass(frozen=True)
class FeatureJob:
    """One training; everything in it follows from `seed`."""

    seed: int
    kind: str

    @staticmethod
    def draw(seed: int) -> FeatureJob:
        """Return the job with this number."""
        return FeatureJob(seed, random.Random(seed).choice(sorted(KINDS)))

    def fit(self, directory: Path) -> Run:
        """Train, or continue the training, in this process."""
        torch.manual_seed(self.seed)
        return KINDS[self.kind](random.Random(self.seed + 1), {"seed": self.seed, "directory": directory})


def built(dice: random.Random, common: dict[str, Any], loader: Iterable[Any], *callbacks: Any, **others: Any) -> Trainer:
    """Return a trainer of a classifier with batch normalization and dropout."""
    model = others.pop("model", None) or MODEL_OF["mlp"]()
    loss = {"compute_loss": others.pop("compute_loss", supervised(nn.CrossEntropyLoss()))}
    every = dice.choice(("2 steps", "5 steps", "1 epoch"))
    saved = any(isinstance(callback, Checkpoint) for callback in callbacks)
    saves = [] if saved else [Checkpoint(every, background=dice.random() < 0.7)]
    return Trainer(
        model,
        others.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, 0.01)),
        loader,
        **loss,
        **others,
        **common,
        **QUIET,
        callbacks=among([*callbacks, LogTraining("3 steps", throughput=False), *saves], dice),
    )


QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


def points(dice: random.Random, count: int = 28) -> DataLoader[Any]:
    """Return shuffled batches of noisy points, with 0 or 2 workers."""
    return DataLoader(Points(count), SIZE, shuffle=True, num_workers=dice.choice((0, 0, 0, 2)))


# -- faults -----------------------------------------------------------------------------------


class Spoiled(Points):
    """Points, some of which break the loss."""

    def __init__(self, count: int, factors: Mapping[int, float]) -> None:
        super().__init__(count)
        self.factors = factors

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs * self.factors.get(index, 1.0), label


def spoiled(dice: random.Random) -> DataLoader[Any]:
    """Return batches of points with one or two that break the loss."""
    factors = {dice.randrange(40): math.nan, dice.randrange(40): dice.choice((math.nan, math.inf))}
    return DataLoader(Spoiled(40, factors), SIZE, shuffle=True, num_workers=dice.choice((0, 0, 2)))


def recover(dice: random.Random, common: dict[str, Any]) -> Run:
    """Roll back and skip the points that broke the loss."""
    skip: Any = dice.choice(("the guilty batch", "batches of the steps since"))
    # What is left out since a checkpoint depends on which there are: no signal or error may write another one.
    alike = skip == "the guilty batch"
    settings: dict[str, Any] = {"on_signal": alike, "on_exception": alike, "background": dice.random() < 0.7}
    saves = Checkpoint(dice.choice(("2 steps", "5 steps")), keep_last=4, **settings)
    more = dice.choice(([], [Ema(0.9)], [Evaluate(points(dice, 12), "4 steps")]))
    return built(dice, common, spoiled(dice), Recover(skip=skip, times=20), *more, saves, max_epochs=2).fit(resume="auto")


def capsule(dice: random.Random, common: dict[str, Any]) -> Run:
    """Skip the points that broke the loss, and write capsules."""
    callbacks = [Capsule(last=2, weights="3 steps", most=2), StopOnNonFinite("skip")]
    accumulate = dice.choice((1, 2))
    return built(dice, common, spoiled(dice), *callbacks, max_epochs=2, accumulate=accumulate).fit(resume="auto")


# -- data --------------------------------------------------------------------------------------


def mixture(dice: random.Random, common: dict[str, Any]) -> Run:
    """Read a mixture in a mixture."""

    def one(mode: Any, loaders: dict[str, Any]) -> Mixture:
        weights = {name: dice.uniform(1, 3) for name in loaders} if mode == "weighted" else None
        stop: Any = "shortest" if mode == "sequential" else dice.choice(("shortest", "longest"))
        return Mixture(loaders, mode, weights=weights, stop=stop)

    tensors = TensorBatches(*Points(30).clean(), batch_size=SIZE, shuffle=True)
    listed = list(zip(*(part.split(SIZE) for part in Points(20).clean()), strict=True))
    inner = one(dice.choice(("cycle", "weighted", "sequential")), {"tensors": tensors, "list": listed})
    loader = one(dice.choice(("zip", "cycle", "weighted", "sequential")), {"points": points(dice), "inner": inner})
    arguments = {"max_steps": dice.randint(16, 26), "accumulate": dice.choice((1, 2))}
    return built(dice, common, loader, compute_loss=mean_loss, **arguments).fit(resume="auto")


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch, or of a mapping of batches."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else [batch]
    return torch.stack([nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in parts]).mean()


class Texts(Points):
    """Random words."""

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(WORDS, (12,))
        return {"input_ids": words, "labels": words.roll(1)}


def word_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch of words."""
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def tokens(dice: random.Random, common: dict[str, Any]) -> Run:
    """Count tokens, in batches that become longer and steps that become larger."""
    loader = DataLoader(Texts(28), SIZE, shuffle=True, num_workers=dice.choice((0, 2)))
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, WORDS))
    arguments: dict[str, Any] = {
        "tokens": lambda batch: batch["input_ids"].numel(),
        "max_tokens": dice.randint(500, 800),
        "accumulate": {0: 1, f"{dice.randint(50, 150)} tokens": 2, "40%": 3},
    }
    lengths = SequenceLength({0: 4, f"{dice.randint(80, 200)} tokens": 8, "70%": 12}, ("input_ids", "labels"))
    return built(dice, common, loader, lengths, model=model, compute_loss=word_loss, **arguments).fit(resume="auto")


class Shards(IterableDataset[Any]):
    """Eight shards of noisy points."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shards(self) -> list[int]:
        return torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def read_shard(self, shard: int, start: int) -> Iterator[Any]:
        for number in range(start, 4):
            yield torch.full((WIDTH,), shard / 8) + 0.1 * torch.rand(WIDTH), torch.tensor(number % CLASSES)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def shards(dice: random.Random, common: dict[str, Any]) -> Run:
    """Read shards."""
    workers = dice.choice((0, 2))
    loader = DataLoader(Shards(), SIZE, num_workers=workers, persistent_workers=workers > 0 and dice.random() < 0.5)
    return built(dice, common, loader, Ema(0.9), max_epochs=3).fit(resume="auto")


def hugging_face_stream(dice: random.Random, common: dict[str, Any]) -> Run:
    """Read a stream of `datasets`, with a buffer or without."""
    inputs, labels = Points(28).clean()
    stream = datasets.Dataset.from_dict({"x": inputs.tolist(), "y": labels.tolist()}).to_iterable_dataset(num_shards=4)
    buffered = dice.random() < 0.5
    stream = stream.shuffle(seed=common["seed"], buffer_size=10) if buffered else stream

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    loader = DataLoader(stream.with_format("torch"), SIZE)
    return built(dice, common, loader, compute_loss=loss, max_epochs=3).fit(resume="auto", replay=buffered)


def stateful_loader(dice: random.Random, common: dict[str, Any]) -> Run:
    """Read torchdata's loader."""
    samples = list(zip(*Points(28).clean(), strict=True))
    loader = StatefulDataLoader(samples, SIZE, shuffle=True, num_workers=dice.choice((0, 2)))  # type: ignore[var-annotated]
    return built(dice, common, loader, max_epochs=3).fit(resume="auto")


# -- changes during the run ---------------------------------------------------------------------------


def accumulation(dice: random.Random, common: dict[str, Any]) -> Run:
    """Accumulate more with time, under a schedule over the whole run."""
    schedulers = torch.optim.lr_scheduler
    rate = LearningRate(lambda optimizer, total: schedulers.OneCycleLR(optimizer, 0.02, total_steps=total))
    averages = dice.choice(([], [Swa("50%", "2 steps", update_batch_norm=2)], [Ema(0.9)]))
    points_of_change = {0: 1, f"{dice.randint(2, 6)} steps": 2, f"{dice.choice((0.5, 1, 1.5))} epoch": dice.randint(3, 5)}
    callbacks = [rate, ClipGradients(max_norm=1.0), *averages]
    return built(dice, common, points(dice), *callbacks, max_epochs=3, accumulate=points_of_change).fit(resume="auto")


def evaluations(dice: random.Random, common: dict[str, Any]) -> Run:
    """Evaluate at three intervals, and keep checkpoints by five rules."""
    held = DataLoader(Points(24), 6)
    judges = [Evaluate(held, f"{dice.randint(2, 6)} steps", name=name, limit=limit) for name, limit in LIMITS.items()]
    saves = [
        Checkpoint("2 steps", keep=[Last(2)]),
        Checkpoint("3 steps", keep=[Best("first/loss", 2, mode="min"), Every("10 steps")], background=False),
        Checkpoint("1 epoch", keep=[First(1), At("1 epoch")]),
    ]
    stops = [EarlyStopping("second/loss", "min", patience=dice.choice((3, 50))), BestWeights("third/loss", "min")]
    number = dice.randint(2, 7)
    asks = on(Callback.on_step_end, every=f"{number} steps")(lambda run: run.save("asked for"))
    return built(dice, common, points(dice), *judges, *stops, asks, *saves, Warmup("20%"), max_epochs=3).fit(resume="auto")


LIMITS = {"first": None, "second": 2, "third": 1}


# -- modules and arguments of other frameworks -----------------------------------------------------------


class Module(lightning.LightningModule):
    """A classifier with a rate that falls each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MODEL_OF["mlp"]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


class ManualModule(Module):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        if self.trainer.is_last_batch:
            schedule: Any = self.lr_schedulers()
            schedule.step()


def lightning_module(dice: random.Random, common: dict[str, Any]) -> Run:
    """Train a module of Lightning."""
    module, accumulate = dice.choice(((Module(), 2), (Module(), 1), (ManualModule(), 1)))
    saves = Checkpoint(dice.choice(("2 steps", "1 epoch")), keep_best=("val_loss", "min"))
    loaders = (points(dice), DataLoader(Points(12), 6))
    arguments = {"max_epochs": 3, "accumulate": accumulate, "callbacks": among([saves], dice), **common, **QUIET}
    return Trainer.from_lightning(module, loaders, **arguments).fit(resume="auto")


def training_arguments(dice: random.Random, common: dict[str, Any]) -> Run:
    """Train a model of `transformers`."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=WORDS, n_positions=12, n_embd=8, n_layer=1, n_head=2, **ends)
    arguments = TrainingArguments(
        output_dir=str(common["directory"]),
        num_train_epochs=3,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=dice.choice((1, 2)),
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=dice.choice((2, 5)),
        save_total_limit=2,
        neftune_noise_alpha=dice.choice((None, 5.0)),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=common["seed"],
    )
    model = GPT2LMHeadModel(config)
    return trainer_of_arguments(model, arguments, Texts(28), Texts(8), callbacks=among([], dice)).fit(resume="auto")


# -- user-written loops --------------------------------------------------------------------------------


def steps(dice: random.Random, common: dict[str, Any]) -> Run:
    """Compute the loss in a loop with two generators."""
    noise, augment = torch.Generator().manual_seed(common["seed"]), random.Random(common["seed"])
    trainer = built(dice, common, points(dice), Ema(0.9), max_epochs=3, accumulate=dice.choice((1, 2)))
    with trainer.steps(resume="auto") as running:
        running.keep("noise", noise)
        running.keep("augment", augment)
        for step in running:
            for inputs, labels in step:
                noisy = inputs + 0.1 * torch.randn(inputs.shape, generator=noise) * augment.random()
                step.backward(nn.functional.cross_entropy(step.run.model(noisy), labels))
    return trainer.run


class Buffer:
    """The observations and the position of a player."""

    def __init__(self) -> None:
        self.seen: deque[tuple[Tensor, int, float]] = deque(maxlen=40)
        self.place = torch.zeros(4)

    def play(self, move: int) -> None:
        before = self.place
        self.place = (before + 0.3 * (torch.rand(4) - 0.5) + 0.1 * move).clamp(-1, 1)
        self.seen.append((before, move, float(-self.place.square().sum())))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.place = deque(state["seen"], maxlen=40), state["place"]


def attached(dice: random.Random, common: dict[str, Any]) -> Run:
    """Learn from a buffer, with a second network that follows."""
    values, target = (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
    optimizer, buffer, explore = torch.optim.Adam(values.parameters(), 0.01), Buffer(), random.Random(common["seed"])
    saves = Checkpoint(dice.choice(("3 steps", "7 steps")))
    callbacks = among([LogTraining("4 steps", throughput=False), saves], dice)
    with attach(values, optimizer, resume="auto", max_steps=28, callbacks=callbacks, **common, **QUIET) as loop:
        for name, held in (("target", target), ("buffer", buffer), ("explore", explore)):
            loop.keep(name, held)
        while not loop.over():
            with loop.step():
                for _ in range(3):
                    greedy = int(values(buffer.place).argmax())
                    buffer.play(explore.randrange(2) if explore.random() < 0.3 else greedy)
                place, move, reward = zip(*explore.choices(buffer.seen, k=8), strict=True)
                aim = torch.tensor(reward) + 0.9 * target(torch.stack(place)).amax(1).detach()
                chosen = values(torch.stack(place))[range(8), list(move)]
                loop.backward(nn.functional.mse_loss(chosen, aim))
                loop.update()
                if loop.run.progress.step % 5 == 4:
                    target.load_state_dict(values.state_dict())
    return loop.run


KINDS: dict[str, Callable[[random.Random, dict[str, Any]], Run]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(recover, capsule, mixture, tokens, shards, hugging_face_stream, stateful_loader, accumulation, evaluations),
        *(lightning_module, training_arguments, steps, attached),
    )
}

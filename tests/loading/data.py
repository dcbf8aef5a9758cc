"""Datasets, samplers and loaders of all kinds, and functions that read them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from cadenza.loading import Consumed, Shard, current_source, num_batches, resumable

SAMPLES = 22
EPOCHS = 3


class Numbers(Dataset[Tensor]):
    """Sample i is the number i, plus noise from the generators named in `noise`; the indices that are read are recorded."""

    def __init__(self, *noise: str, samples: int = SAMPLES) -> None:
        self.noise, self.samples = noise, samples
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        return torch.tensor(index + sum(map(noise_of, self.noise)), dtype=torch.float64)


class AtOnce(Numbers):
    """Returns a batch of samples at once, in reverse order."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices[::-1]]


class Stream(IterableDataset[Tensor]):
    """Numbers that a buffer shuffles, with noise. It can only start at the beginning."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for index in range(SAMPLES):
            buffer.append(index)
            if len(buffer) > 4:
                yield torch.tensor(buffer.pop(random.randrange(len(buffer))) + noise_of("torch"))
        for index in buffer:
            yield torch.tensor(index + noise_of("numpy"))


class Keeping(IterableDataset[Tensor]):
    """Numbers, with a position that can be saved."""

    def __init__(self) -> None:
        self.position = 0
        self.epoch = 0
        self._restored = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        self.position = self.position if self._restored else 0
        self._restored = False
        while self.position < SAMPLES:
            self.position += 1
            yield torch.tensor(float(100 * self.epoch + self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self._restored = state["position"], True


class Shuffled(Sampler[int]):
    """An order that is drawn from one of the global generators."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        match self.source:
            case "python":
                random.shuffle(order)
            case "numpy":
                numpy.random.shuffle(order)
            case _:
                order = torch.randperm(SAMPLES).tolist()
        return iter(order)


class Buckets(Sampler[list[int]]):
    """Endless batches, drawn from Python's global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield random.sample(range(SAMPLES), 3)


def noise_of(source: str) -> float:
    """Return a number in 0..0.5 from one of the global generators."""
    match source:
        case "python":
            return random.random() / 2
        case "numpy":
            return float(numpy.random.rand()) / 2
        case _:
            return torch.rand((), dtype=torch.float64).item() / 2


def noisy_collate(samples: list[Tensor]) -> Tensor:
    """Return a batch with one more draw from each generator."""
    return torch.stack(samples) + sum(map(noise_of, ("torch", "numpy", "python")))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def epochs_of(loader: Iterable[Any], *, seed: int = 1, epochs: int = EPOCHS, replay: bool = False) -> list[list[Any]]:
    """Return the batches that a run with this seed reads, by epoch."""
    source = resumable(loader, seed, replay=replay)
    return [plain(source.batches(epoch, 0)) for epoch in range(epochs)]


def rest_of(loader: Iterable[Any], epoch: int, skip: int, *, seed: int = 1, replay: bool = False) -> list[Any]:
    """Return the batches that a run reads when it resumes at batch `skip` of an epoch."""
    return plain(resumable(loader, seed, replay=replay).batches(epoch, skip))


def plain(batches: Iterable[Any]) -> list[Any]:
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in batches]


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    options.setdefault("batch_size", 4)
    if "batch_sampler" in options:
        del options["batch_size"]
    return DataLoader(dataset, **options)


Round = list[tuple[Any, str | None, bool]]


def rounds_by(
    make: Callable[[], Any], chain: list[tuple[int, int]], epoch: int, *, replay: bool = False
) -> tuple[list[Round], bool]:
    """Read an epoch by the world sizes of `chain`, each some rounds, the last one to the end.

    Return the rounds, in which each rank has a batch, the name of its loader in a mixture, and whether rank 0 has it, too; and
    whether the epoch was long enough for all of `chain`.
    """
    done: list[Round] = []
    consumed: Consumed = ()
    state: dict[str, Any] | None = None
    for number, (world_size, limit) in enumerate(chain):
        last, skip = number == len(chain) - 1, sum(rounds for _, rounds in consumed)
        shards = [Shard(rank, world_size, consumed=consumed) for rank in range(world_size)]
        length = num_batches(make(), shards[0] if skip else Shard(0, world_size))
        sources = [resumable(make(), 1, shard=shard, replay=replay) for shard in shards]
        for source in sources:
            if state is not None:
                source.load_state_dict(state)
        readers = [source.batches(epoch, skip) for source in sources]
        rounds = 0
        while last or rounds < limit:
            round_: Round = []
            for source, batches in zip(sources, readers, strict=True):
                batch = next(batches, None)
                alike = source.replicated_at == skip + rounds and source.shard.rank > 0
                round_.append((batch, current_source(), alike))
            if round_[0][0] is None:
                assert all(batch is None for batch, _, _ in round_), "all ranks end together"
                break
            done.append(round_)
            rounds += 1
        assert not last or length is None or length == skip + rounds, "the length is known in advance"
        if not last and rounds < limit:
            return done, False
        consumed, state = (*consumed, (world_size, rounds)) if rounds else consumed, sources[-1].state_dict()
    return done, bool(consumed)

"""A stream of shards: each rank and each worker reads shards of its own, every sample once, with the noise of its index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.drivers import DdpDriver, SingleDriver
from cadenza.errors import DataError
from cadenza.loading import ResumableLoader, Shard, num_batches, resumable
from cadenza.testing import launch, tiny_trainer
from tests.loading import data
from tests.loading.data import plain

LENGTHS = [7, 3, 11, 1, 6, 9, 4]


class Lines(IterableDataset[Tensor]):
    """Sample j of shard i is the number 100 i + j, plus noise; the order of the shards depends on the epoch."""

    def __init__(self, shards: int = len(LENGTHS), noise: float = 0.0) -> None:
        self.count, self.noise, self.epoch = shards, noise, 0
        self.reads: list[tuple[int, int]] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shards(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.count, generator=generator).tolist()

    def read_shard(self, shard: int, start: int) -> Iterator[Tensor]:
        for number in range(start, LENGTHS[shard]):
            self.reads.append((shard, number))
            yield torch.tensor(100 * shard + number + self.noise * data.noise_of("torch"), dtype=torch.float64)

    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("Cadenza reads the shards")


ALL = Counter(100.0 * shard + number for shard, length in enumerate(LENGTHS) for number in range(length))


def source_of(shard: Shard | None = None, *, replay: bool = False, noise: float = 0.0, **options: Any) -> ResumableLoader:
    options.setdefault("batch_size", 3)
    return resumable(DataLoader(Lines(noise=noise), **options), 1, shard=shard, replay=replay)


def flat(batches: Any) -> Counter[float]:
    return Counter(torch.cat([batch.reshape(-1) for batch in batches]).tolist())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *((ranks, {}) for ranks in (1, 2, 3)),
        *((ranks, {"num_workers": 2}) for ranks in (1, 2)),
        *((ranks, {"num_workers": 3, "batch_size": None}) for ranks in (1, 3)),
    ],
    ids=str,
)
def test_over_ranks_and_workers_each_sample_is_read_once_and_no_shard_of_another_rank(
    ranks: int, options: dict[str, Any]
) -> None:
    seen: Counter[float] = Counter()
    for rank in range(ranks):
        dataset = Lines()
        source = resumable(DataLoader(dataset, **{"batch_size": 3, **options}), 1, shard=Shard(rank, ranks))
        seen += flat(source.batches(0, 0))
        if not options:
            assert {shard for shard, _ in dataset.reads} == set(Lines().shards()[rank::ranks])
    assert seen == ALL


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 3, "batch_size": 2}, {"batch_size": None}], ids=str
)
def test_a_resume_continues_after_any_batch_with_the_same_noise(options: dict[str, Any]) -> None:
    whole = plain(source_of(noise=0.1, **options).batches(2, 0))
    for done in range(1, len(whole)) if not options else (1, 7):
        first, second = source_of(noise=0.1, **options), source_of(noise=0.1, **options)
        reading = first.batches(2, 0)
        begun = plain([next(reading) for _ in range(done)])
        second.load_state_dict(first.state_dict())
        assert begun + plain(second.batches(2, done)) == whole
        replayed = source_of(noise=0.1, replay=True, **options)
        assert done > 1 or plain(replayed.batches(2, done)) == whole[done:]


def test_samples_before_the_position_are_not_read_again() -> None:
    first = source_of()
    reading = first.batches(0, 0)
    for _ in range(5):
        next(reading)
    dataset = Lines()
    second = resumable(DataLoader(dataset, 3), 1)
    second.load_state_dict(first.state_dict())
    rest = flat(second.batches(0, 5))
    assert len(dataset.reads) == rest.total() == ALL.total() - 15


def test_the_model_draws_the_same_numbers_whatever_the_stream_draws() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(source_of(noise=0.1).batches(0, 0))
    assert torch.equal(torch.rand(2), expected)


def test_on_several_ranks_the_length_is_unknown_and_a_stream_without_these_methods_is_read_whole_by_each() -> None:
    class Sized(Lines):
        def __len__(self) -> int:
            return ALL.total()

    assert num_batches(DataLoader(Sized(), 3), Shard()) == 14
    assert num_batches(DataLoader(Sized(), 3), Shard(0, 2)) is None

    class OnlyNames(Lines):
        read_shard = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(6.0))

    read = [plain(resumable(DataLoader(OnlyNames(), 1), 1, shard=Shard(rank, 2)).batches(0, 0)) for rank in range(2)]
    assert read == [[[0.0], [2.0], [4.0]], [[1.0], [3.0], [5.0]]]


def test_errors_name_the_shards_the_ranks_and_the_workers() -> None:
    with pytest.raises(DataError, match=r"Lines\.shards\(\) has 2 shards for 3 ranks; expected at least one"):
        resumable(DataLoader(Lines(2), 3), 1, shard=Shard(1, 3)).batches(0, 0)
    source = source_of(num_workers=2)
    next(source.batches(0, 0))
    other = source_of()
    other.load_state_dict(source.state_dict())
    with pytest.raises(DataError, match="2 workers of each rank read the shards, and the loader has 1"):
        other.batches(0, 1)
    with pytest.raises(DataError, match="holds no position for this loader"):
        source_of().batches(0, 1)


def trained(directory: Path, steps: int, ranks: int) -> tuple[list[list[float]], Tensor]:
    """Train on this rank until a step; return its batches and the weights."""
    seen: list[list[float]] = []
    see = on(Callback.on_batch_start)(lambda run, batch: seen.append(batch.tolist()))
    torch.manual_seed(0)
    run = tiny_trainer(
        model=nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
        loader=DataLoader(Lines(noise=0.1), 2, num_workers=1),
        compute_loss=lambda model, batch: model(batch[:, None].float() / 700).square().mean(),
        steps=steps,
        seed=1,
        directory=directory,
        driver=DdpDriver("cpu") if ranks > 1 else SingleDriver("cpu"),
        callbacks=[see, Checkpoint("100 steps"), Evaluate(DataLoader(Lines(), 4))],
    ).fit(resume="auto")
    return seen, torch.cat([one.detach().flatten() for one in run.model.parameters()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_inside_an_epoch_to_the_same_bits_on_as_many_ranks(ranks: int, tmp_path: Path) -> None:
    def parts() -> list[tuple[list[list[float]], Tensor]]:
        return [trained(tmp_path / name, steps, ranks) for name, steps in (("a", 12), ("b", 3), ("b", 12))]

    for (expected, weights), (begun, _), (rest, resumed) in [parts()] if ranks == 1 else launch(parts):
        assert begun + rest == expected
        assert torch.equal(resumed, weights)
    if ranks == 2:
        with pytest.raises(DataError, match="an epoch that 2 ranks began"):
            trained(tmp_path / "b", 14, 1)

"""The orders of fastNLP's samplers, and their positions. The orders are those of fastNLP 1.0.1."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cadenza.compat.fastnlp import (
    BucketedBatchSampler,
    DataSet,
    Event,
    RandomBatchSampler,
    RandomSampler,
    ReproduceBatchSampler,
    ReproducibleBatchSampler,
    ReproducibleSampler,
    SequentialSampler,
    SortedSampler,
    TorchDataLoader,
    Trainer,
    UnrepeatedRandomSampler,
    UnrepeatedSequentialSampler,
    UnrepeatedSortedSampler,
)
from cadenza.loading import Shard, resumable

TEN = range(10)
LENGTHS = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
Sampler = Any


def at_epoch(sampler: Sampler, epoch: int = 0) -> Sampler:
    sampler.set_epoch(epoch)
    return sampler


def test_a_random_order_depends_on_the_seed_and_the_epoch() -> None:
    assert list(at_epoch(RandomSampler(TEN))) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert list(at_epoch(RandomSampler(TEN, seed=2), 1)) == list(at_epoch(RandomSampler(TEN), 3))
    without_trainer = RandomSampler(TEN)
    assert list(without_trainer) != list(without_trainer)
    assert without_trainer.epoch == -3


def test_the_longest_sample_comes_first() -> None:
    dataset = DataSet({"words": [["a"] * length for length in LENGTHS], "seq_len": LENGTHS})
    order = [5, 8, 9, 7, 4, 2, 0, 6, 1, 3]
    for length in (LENGTHS, "words", "seq_len"):
        assert list(SortedSampler(dataset, length)) == list(UnrepeatedSortedSampler(dataset, length)) == order
    with pytest.raises(TypeError, match="dataset must be a DataSet; got a range"):
        SortedSampler(TEN, "words")
    with pytest.raises(AssertionError, match="a number for each of the 10 samples; got 1"):
        SortedSampler(TEN, [1])


@pytest.mark.parametrize(
    ("pad", "shards"), [(True, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]), (False, [[0, 3, 6], [1, 4, 7], [2, 5, 8]])]
)
def test_shards_have_one_size(pad: bool, shards: list[list[int]]) -> None:
    samplers = [SequentialSampler(TEN).set_distributed(3, rank, pad=pad) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == shards
    assert {len(sampler) for sampler in samplers} == {len(shards[0])}


def test_unrepeated_shards_have_each_sample_once() -> None:
    assert [list(UnrepeatedRandomSampler(TEN).set_distributed(3, rank)) for rank in range(3)] == [
        [0, 3, 6, 9],
        [1, 4, 7],
        [2, 5, 8],
    ]
    chunks = [UnrepeatedSequentialSampler(TEN, chunk_dist=True).set_distributed(3, rank) for rank in range(3)]
    assert [list(sampler) for sampler in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [len(sampler) for sampler in chunks] == [3, 3, 4]
    with pytest.raises(AssertionError, match="there are 11 ranks, but only 10 samples"):
        UnrepeatedRandomSampler(TEN).set_distributed(11, 0)


def test_a_loaded_position_continues_the_epoch_also_on_other_ranks() -> None:
    sampler = at_epoch(RandomSampler(TEN))
    first = list(islice(sampler, 4))
    states = sampler.state_dict()
    position = {"seed": 0, "epoch": 0, "shuffle": True, "num_consumed_samples": 4}
    assert states == {**position, "sampler_type": "RandomSampler", "length": 10}
    other = RandomSampler(TEN, shuffle=False, seed=7)
    other.load_state_dict(states)
    assert [*first, *other] == list(at_epoch(RandomSampler(TEN)))
    assert len(list(other)) == 10, "the next epoch is complete"
    rest = []
    for rank in range(3):
        shard = RandomSampler(TEN)
        shard.load_state_dict(states)
        rest += list(shard.set_distributed(3, rank, pad=False))
    assert sorted([*first, *rest]) == list(TEN)


def begun(sampler: Sampler) -> Sampler:
    next(iter(sampler))
    return sampler


STATES = begun(RandomSampler(TEN)).state_dict()
WHOLE = "must be a whole number of at least 1; got 0"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: RandomBatchSampler(TEN, batch_size=0), ValueError, f"batch_size {WHOLE}"),
        (lambda: BucketedBatchSampler(TEN, LENGTHS, num_batch_per_bucket=0), ValueError, f"num_batch_per_bucket {WHOLE}"),
        (lambda: begun(RandomSampler(TEN)).set_distributed(2, 0), AssertionError, "set_distributed must not be called while"),
        (
            lambda: RandomSampler(TEN).set_distributed(2, 2),
            AssertionError,
            "rank must be at least 0, and less than num_replicas; got 2 and 2",
        ),
        (lambda: begun(ReproduceBatchSampler(TEN, 2, False)).set_distributed(2, 0), RuntimeError, "has no shards"),
        (lambda: RandomSampler(range(11)).load_state_dict(STATES), AssertionError, "length=10, but this sampler has 11"),
        (
            lambda: SequentialSampler(TEN).load_state_dict(STATES),
            AssertionError,
            "sampler_type='RandomSampler', but this sampler has 'SequentialSampler'",
        ),
        (
            lambda: ReproduceBatchSampler([0], 1, False).load_state_dict(ReproduceBatchSampler(TEN, 2, False).state_dict()),
            AssertionError,
            "the checkpoint has the sampler and the length",
        ),
        (lambda: iter(ReproducibleSampler()), NotImplementedError, "ReproducibleSampler needs a method __iter__"),
        (lambda: iter(ReproducibleBatchSampler()), NotImplementedError, "ReproducibleBatchSampler needs a method __iter__"),
    ],
)
def test_wrong_uses_are_errors(use: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()


def test_another_sampler_gets_a_position() -> None:
    given = [[3, 1], [2, 0], [4]]
    sampler = ReproduceBatchSampler(given, batch_size=2, drop_last=False)
    assert next(iter(sampler)) == [3, 1]
    assert (sampler.batch_idx_in_epoch, len(sampler)) == (1, 3)
    other = ReproduceBatchSampler([0, 1, 2, 3, 4], batch_size=2, drop_last=False)
    other.load_state_dict(sampler.state_dict())
    assert (list(other), list(other)) == ([[2, 0], [4]], [[0, 1], [2, 3], [4]])
    assert list(ReproduceBatchSampler(range(5), 2, True)) == [[0, 1], [2, 3]]


def test_a_trainer_sets_the_epoch_of_a_batch_sampler_and_continues_inside_of_one(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        """Notes the samples of each batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.seen: list[list[int]] = []

        def train_step(self, number: Tensor) -> dict[str, Tensor]:
            self.seen.append(number.tolist())
            return {"loss": self.weight.sum()}

    def trained(**resume: Any) -> list[list[int]]:
        """Return the batches of two epochs with buckets; save a checkpoint after three."""
        model, dataset = Sum(), DataSet({"number": list(TEN)})
        loader = TorchDataLoader(dataset, batch_sampler=BucketedBatchSampler(dataset, LENGTHS, 2, 2))
        trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), 0.1), n_epochs=2, progress_bar=None)
        trainer.add_callback_fn(Event.on_train_batch_end(once=3), lambda trainer: trainer.save_checkpoint(tmp_path))
        trainer.run(**resume)
        return model.seen

    expected = BucketedBatchSampler(TEN, LENGTHS, 2, 2)
    whole = trained()
    assert whole == [*at_epoch(expected, 0), *at_epoch(expected, 1)]
    assert trained(resume_from=tmp_path) == whole[3:]


def test_batches_are_random_and_the_last_one_may_be_dropped() -> None:
    sampler = at_epoch(RandomBatchSampler(TEN, batch_size=4))
    assert (len(sampler), list(sampler)) == (3, [[4, 6, 2, 7], [3, 5, 9, 0], [8, 1]])
    assert [len(batch) for batch in RandomBatchSampler(TEN, 4, drop_last=True)] == [4, 4]
    assert list(RandomBatchSampler(TEN, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_of_a_bucket_have_similar_lengths() -> None:
    sampler = at_epoch(BucketedBatchSampler(TEN, LENGTHS, batch_size=2, num_batch_per_bucket=2))
    batches = list(sampler)
    assert batches == [[6, 0], [9, 5], [8, 7], [2, 4], [3, 1]]
    buckets = [{5, 8, 9, 7}, {4, 2, 0, 6}, {1, 3}]
    assert all(any(set(batch) <= bucket for bucket in buckets) for batch in batches)
    assert list(BucketedBatchSampler(TEN, LENGTHS, 4, shuffle=False)) == [[5, 8, 9, 7], [4, 2, 0, 6], [1, 3]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_batches_of_shards_have_one_size(pad: bool, drop_last: bool) -> None:
    samplers = [BucketedBatchSampler(range(11), [*LENGTHS, 2], 2, 2, drop_last=drop_last) for _ in range(2)]
    shards = [list(at_epoch(sampler.set_distributed(2, rank, pad=pad))) for rank, sampler in enumerate(samplers)]
    assert [len(batch) for batch in shards[0]] == [len(batch) for batch in shards[1]]
    seen = sorted(index for shard in shards for batch in shard for index in batch)
    assert len(set(seen)) >= len(seen) - 1
    assert {len(sampler) for sampler in samplers} == {len(shards[0])}


@pytest.mark.parametrize("kind", ["random", "buckets"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_rest_of_an_epoch_may_have_another_batch_size(kind: str, shuffle: bool) -> None:
    def sampler(size: int) -> Sampler:
        if kind == "random":
            return RandomBatchSampler(TEN, size, shuffle=shuffle)
        return BucketedBatchSampler(TEN, LENGTHS, size, 2, shuffle=shuffle)

    one = at_epoch(sampler(2))
    first = list(islice(one, 2))
    states = one.state_dict()
    assert (states["num_consumed_samples"], one.batch_idx_in_epoch) == (4, 2)
    other = sampler(3)
    other.load_state_dict(states)
    with pytest.raises(RuntimeError, match="continues a checkpoint with batch_size=2"):
        other.state_dict()
    rest = list(other)
    assert [len(batch) for batch in rest] == [3, 3]
    assert sorted(index for batch in (*first, *rest) for index in batch) == list(TEN)
    assert other.state_dict()["batch_size"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(range(40)), "batch_size": 4},
        {"batch_sampler": RandomBatchSampler(range(40), batch_size=4)},
        {"batch_sampler": BucketedBatchSampler(range(40), length=[*range(40)], batch_size=4, num_batch_per_bucket=2)},
    ],
    ids=["RandomSampler", "RandomBatchSampler", "BucketedBatchSampler"],
)
def test_each_of_two_ranks_gets_half_of_the_batches(options: dict[str, Any]) -> None:
    loader: DataLoader[int] = DataLoader(range(40), **options)  # type: ignore[arg-type]  # a range is a data set
    whole = [batch.tolist() for batch in resumable(loader, 0).batches(0, 0)]
    halves = [[batch.tolist() for batch in resumable(loader, 0, shard=Shard(rank, 2)).batches(0, 0)] for rank in range(2)]
    assert halves == [whole[0::2], whole[1::2]]

"""The samples of any step are named from run.json: 1000 random steps beside the samples that the runs read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from cadenza import Callback, Run, attach, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import DirectoryError
from cadenza.loading import Mixture, TensorBatches
from cadenza.records import read_info
from cadenza.testing import launch, tiny_trainer

Read = dict[int, list[float]]
"""The values that a rank read, by step."""


class Numbers(Dataset[Tensor]):
    """Sample i is the number `first` + i."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.first + index)])


def parts_of(batch: Any) -> list[Tensor]:
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return [part[0] if isinstance(part, list | tuple) else part for part in parts]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return sum((model(part).mean() * 0.0 for part in parts_of(batch)), torch.zeros(()))


def numbers_in(batch: Any) -> list[float]:
    return [float(value) for part in parts_of(batch) for value in part.flatten()]


def run(path: Path, loader: Any, *, resume: bool = False, more: Any = (), **arguments: Any) -> Read:
    """Train, and return what this rank read."""
    read: Read = {}

    def note(run: Run, batch: Any) -> None:
        read.setdefault(run.progress.step + 1, []).extend(numbers_in(batch))

    callbacks = [on(Callback.on_batch_start)(note), Checkpoint("7 steps", background=False), *more]
    usual = {"seed": 5, "compute_loss": loss, "directory": path, "callbacks": callbacks, "loader": loader}
    override = arguments.pop("override", ())
    tiny_trainer(**{**usual, **arguments}).fit(resume="auto" if resume else False, override=override)
    return read


FIRST = {"b": 1000, "c": 2000, "n/b": 1000}
"""The number of the first sample of a source, where it is not 0."""


def check(path: Path, reads: list[Read], steps: int) -> None:
    """Compare random steps with what each rank read."""
    info, draw, done = read_info(path), random.Random(1), sorted(reads[0])
    for step in [draw.choice(done) for _ in range(steps)]:
        named = info.samples(step)
        assert named.ranks == sum(step in read for read in reads)
        for rank in range(named.ranks):
            own = [FIRST.get(one.source, 0) + i for one in named.batches if one.rank == rank for i in one.indices or ()]
            assert own == reads[rank][step], (step, rank)


def shuffled(**options: Any) -> Any:
    return DataLoader(Numbers(110), batch_size=4, shuffle=True, **options)


def by_hand(part: int) -> Any:
    """Split the data by a rank that is not that of the process, as cross-validation does."""
    sampler: Any = DistributedSampler(Numbers(23), num_replicas=2, rank=part, seed=3)
    return DataLoader(Numbers(23), batch_size=4, sampler=sampler)


def replaced() -> Any:
    drawn = RandomSampler(range(20), replacement=True, num_samples=15, generator=torch.Generator().manual_seed(8))
    return DataLoader(Numbers(20), batch_size=2, sampler=drawn)


def large() -> Any:
    """More samples than are permuted in memory."""
    return TensorBatches(torch.arange(2**20 + 7).unsqueeze(1).float(), batch_size=64, shuffle=True)


def sources() -> dict[str, Any]:
    return {
        "a": DataLoader(Numbers(30), batch_size=3, shuffle=True),
        "b": DataLoader(Numbers(11, 1000), batch_size=2),
        "c": TensorBatches(torch.arange(2000.0, 2013).unsqueeze(1), batch_size=3, shuffle=True),
    }


CHANGING: dict[str, Any] = {"epochs": 4, "accumulate": {0: 2, "20 steps": 3, "50 steps": 1}}
IN_GROUPS: dict[str, Any] = {"steps": 45, "accumulate": 2}
LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (shuffled, CHANGING),
    "workers": (lambda: shuffled(num_workers=3), CHANGING),
    "part 0": (lambda: by_hand(0), {"epochs": 2}),
    "part 1": (lambda: by_hand(1), {"epochs": 2}),
    "replacement": (replaced, {"epochs": 4}),
    "large": (large, {"steps": 40}),
    "cycle": (lambda: Mixture(sources(), "cycle", stop="longest"), IN_GROUPS),
    "weighted": (lambda: Mixture(sources(), "weighted", weights={"a": 1, "b": 2, "c": 1}, stop="longest"), IN_GROUPS),
    "zip": (lambda: Mixture(sources(), "zip", stop="longest"), IN_GROUPS),
    "sequential": (lambda: Mixture(sources(), "sequential"), IN_GROUPS),
    "nested": (lambda: Mixture({"a": sources()["a"], "n": Mixture({"b": sources()["b"]}, "cycle")}, "cycle"), IN_GROUPS),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_samples_of_random_steps_are_those_that_were_read(tmp_path: Path, kind: str) -> None:
    make, arguments = LOADERS[kind]
    read = run(tmp_path, make(), **arguments)
    check(tmp_path, [read], 100)
    assert kind != "large" or max(read[1]) > 100_000


def test_two_ranks_then_three_then_one(tmp_path: Path) -> None:
    def make(kind: str) -> Any:
        data = DataLoader(Numbers(101), batch_size=2, shuffle=True)
        return data if kind == "data set" else Mixture({"a": data, "b": DataLoader(Numbers(40, 1000), batch_size=3)}, "cycle")

    def fits(**options: Any) -> list[Read]:
        return [run(tmp_path / kind, make(kind), **options) for kind in kinds]

    kinds, reads = ("data set", "mixture"), [[Read() for _ in range(3)] for _ in range(2)]
    for ranks, steps in ((2, 11), (3, 40), (1, 75)):
        where = {"driver": "ddp"} if ranks > 1 else {"driver": "single", "device": "cpu"}
        fit = partial(fits, resume=ranks != 2, steps=steps, **where)
        for rank, both in enumerate(launch(fit, ranks) if ranks > 1 else [fit()]):
            for of_kind, read in zip(reads, both, strict=True):
                of_kind[rank] |= read
    for kind, of_kind in zip(kinds, reads, strict=True):
        assert [len(read) for read in of_kind] == [75, 40, 29]
        check(tmp_path / kind, of_kind, 80)


def test_another_batch_size_and_another_accumulation_after_a_resume(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(96), batch_size=4, shuffle=True)

    first = run(tmp_path, loader(), steps=10, accumulate=2)
    given = {"batch_size": 8, "accumulate": 1}
    second = run(tmp_path, loader(), resume=True, steps=40, accumulate=2, override=given)
    check(tmp_path, [first | second], 100)


def test_an_epoch_that_ends_early(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True)
    early = on(Callback.on_step_end, at=13)(lambda run: run.end_epoch("enough"))
    first = run(tmp_path, loader, epochs=5, more=[early])
    check(tmp_path, [first], 40)
    with pytest.raises(ValueError, match="has no step 44"):
        read_info(tmp_path).samples(44)


class Evens(Sampler[int]):
    """The even indices."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 20, 2))


class Shards(IterableDataset[Tensor]):
    """A stream of 6 shards."""

    def shards(self) -> list[int]:
        return [*range(6)]

    def read_shard(self, shard: int, start: int) -> Iterator[Tensor]:
        return (torch.tensor([shard * 10.0 + i]) for i in range(start, 8))

    def __iter__(self) -> Iterator[Tensor]:
        return (one for shard in self.shards() for one in self.read_shard(shard, 0))


class Endless(IterableDataset[Tensor]):
    """Any other stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(40))


NOT_NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler": (lambda: DataLoader(Numbers(20), batch_size=2, sampler=Evens()), "a Evens draws the indices"),
    "batch sampler": (
        lambda: DataLoader(Numbers(20), batch_sampler=type("Own", (BatchSampler,), {})(RandomSampler(range(20)), 2, False)),
        "a Own draws the indices",
    ),
    "stream": (lambda: DataLoader(Endless(), batch_size=4), r"a stream \(Endless\) has no indices"),
    "shards": (lambda: DataLoader(Shards(), batch_size=4), "this rank reads shards 0, 1, ..., 5"),
}


@pytest.mark.parametrize("kind", NOT_NAMED)
def test_where_no_index_is_known_the_position_is_named_and_the_reason(tmp_path: Path, kind: str) -> None:
    make, why = NOT_NAMED[kind]
    read = run(tmp_path, make(), epochs=3, accumulate=3)
    info = read_info(tmp_path)
    per_epoch = {"sampler": 5, "batch sampler": 10, "stream": 10, "shards": 12}[kind]
    sizes = [min(3, per_epoch - first) for first in range(0, per_epoch, 3)] * 3
    assert len(read) == len(sizes)
    for step, size in enumerate(sizes, 1):
        named = info.samples(step)
        assert named.epoch == (step - 1) // (len(sizes) // 3)
        first = (step - 1) % (len(sizes) // 3) * 3
        assert [one.number for one in named.batches] == [*range(first, first + size)]
        assert all(one.indices is None for one in named.batches)
        assert named.of_rank(0) is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(named))


def test_a_list_is_named_by_its_batches(tmp_path: Path) -> None:
    read = run(tmp_path, [torch.full((2, 1), float(i)) for i in range(7)], epochs=3)
    named = read_info(tmp_path).samples(12)
    assert (named.batches[0].unit, named.of_rank(0), read[12]) == ("batches", [4], [4.0, 4.0])


def test_a_run_that_goes_on_from_the_last_step_of_an_epoch_describes_its_data_as_an_undisturbed_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    @on(Callback.on_epoch_end)
    def kill(run: Run) -> None:
        if run.progress.origin.step == 0:
            raise Killed

    def trainer(name: str, *more: Callback) -> Any:
        return tiny_trainer(directory=tmp_path / name, epochs=2, seed=1, callbacks=[Checkpoint("1 step"), *more])

    def described(name: str) -> Any:
        return json.loads((tmp_path / name / "run.json").read_text())["data"]

    with pytest.raises(Killed):
        trainer("killed", kill).fit()
    assert trainer("killed", kill).fit(resume="auto").progress.origin.batch_in_epoch > 0  # the epoch was not counted
    trainer("whole").fit()
    assert described("killed") == described("whole")


def test_a_run_that_goes_on_names_its_steps_and_cannot_name_later_ones(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(run: Run, batch: Any) -> None:
        seen.append((run.info.samples(run.progress.step + 1).of_rank(0), numbers_in(batch)))

    loader = DataLoader(Numbers(12), batch_size=3, shuffle=True)
    ended = tiny_trainer(
        loader=loader, compute_loss=loss, seed=2, epochs=2, callbacks=[on(Callback.on_batch_start)(note)]
    ).fit()
    assert len(seen) == 8
    assert all(named == numbers for named, numbers in seen)
    with pytest.raises(ValueError, match=r"has no step 10: expected a step from 1 to 9\."):
        ended.info.samples(10)
    with pytest.raises(TypeError, match="a whole number"):
        ended.info.samples("3")  # type: ignore[arg-type]  # wrong on purpose


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"is not the directory of a run: expected a run\.json"):
        read_info(tmp_path)
    tiny_trainer(directory=tmp_path / "none", callbacks=[on(Callback.on_fit_start)(lambda run: run.stop("at once"))]).fit()
    with pytest.raises(ValueError, match=r"has no step 1: it ended before its first step\."):
        read_info(tmp_path / "none").samples(1)
    run(tmp_path / "run", DataLoader(Numbers(12), batch_size=3), epochs=1)
    path = tmp_path / "run/run.json"
    facts = json.loads(path.read_text())
    del facts["data"]
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="An earlier version wrote it"):
        read_info(tmp_path / "run").samples(2)
    path.write_text(json.dumps({**facts, "data": [{"points": 3}]}))
    with pytest.raises(DirectoryError, match=r"the part 'data' of .* cannot be read"):
        read_info(tmp_path / "run")


def test_an_attached_loop_brings_its_own_data(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=2, directory=tmp_path, progress=False) as loop:
        while not loop.over():
            with loop.step():
                loop.backward(model(torch.ones(1, 2)).mean())
                loop.update()
    for info in (loop.run.info, read_info(tmp_path)):
        with pytest.raises(ValueError, match=r"the loop of cadenza\.attach\(\.\.\.\) brings its own data"):
            info.samples(2)

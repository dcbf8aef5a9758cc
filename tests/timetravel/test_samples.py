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


def check(path: Path, reads: list[Read], steps: int, value: Callable[[str, int], float] = lambda source, index: index) -> int:
    """Compare random steps with what each rank read; return their number."""
    info, draw = read_info(path), random.Random(1)
    done = sorted(reads[0])
    chosen = [draw.choice(done) for _ in range(steps)]
    for step in chosen:
        named = info.samples(step)
        for rank, read in enumerate(reads[: named.ranks]):
            own = [value(one.source, index) for one in named.batches if one.rank == rank for index in one.indices or ()]
            assert own == read[step], (step, rank)
    return len(chosen)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_shuffled_data_set_with_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    loader = DataLoader(Numbers(110), batch_size=4, shuffle=True, num_workers=workers)
    read = run(tmp_path, loader, epochs=4, accumulate={0: 2, "20 steps": 3, "50 steps": 1})
    assert check(tmp_path, [read], 200) == 200


@pytest.mark.parametrize("part", [0, 1])
def test_a_distributed_sampler_with_a_rank_that_is_not_that_of_the_process(tmp_path: Path, part: int) -> None:
    """As a script does that splits its data by hand, such as in cross-validation."""
    sampler: Any = DistributedSampler(Numbers(23), num_replicas=2, rank=part, seed=3)
    read = run(tmp_path, DataLoader(Numbers(23), batch_size=4, sampler=sampler), epochs=2)
    assert check(tmp_path, [read], 6) == 6


def test_more_samples_than_are_permuted_in_memory(tmp_path: Path) -> None:
    count = 2**20 + 7
    read = run(tmp_path, TensorBatches(torch.arange(count).unsqueeze(1).float(), batch_size=64, shuffle=True), steps=40)
    assert check(tmp_path, [read], 40)
    assert max(read[1]) > 100_000


MIXTURES: dict[str, Callable[[], Mixture]] = {
    "cycle": lambda: Mixture(sources(), "cycle", stop="longest"),
    "weighted": lambda: Mixture(sources(), "weighted", weights={"a": 1, "b": 2, "c": 1}, stop="longest"),
    "zip": lambda: Mixture(sources(), "zip", stop="longest"),
    "sequential": lambda: Mixture(sources(), "sequential"),
    "nested": lambda: Mixture({"a": sources()["a"], "n": Mixture({"b": sources()["b"]}, "cycle")}, "cycle"),
}
FIRST = {"a": 0, "b": 1000, "c": 2000, "n/b": 1000}


def sources() -> dict[str, Any]:
    return {
        "a": DataLoader(Numbers(30), batch_size=3, shuffle=True),
        "b": DataLoader(Numbers(11, 1000), batch_size=2),
        "c": TensorBatches(torch.arange(2000.0, 2013).unsqueeze(1), batch_size=3, shuffle=True),
    }


@pytest.mark.parametrize("mode", MIXTURES)
def test_mixtures(tmp_path: Path, mode: str) -> None:
    read = run(tmp_path, MIXTURES[mode](), steps=45, accumulate=2)
    assert check(tmp_path, [read], 80, lambda source, index: FIRST[source] + index)


@pytest.mark.parametrize("kind", ["data set", "mixture"])
def test_two_ranks_then_three_then_one(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        data = DataLoader(Numbers(101), batch_size=2, shuffle=True)
        return data if kind == "data set" else Mixture({"a": data, "b": DataLoader(Numbers(40, 1000), batch_size=3)}, "cycle")

    reads: dict[int, list[Read]] = {}
    for ranks, steps in ((2, 11), (3, 40), (1, 75)):
        part = partial(run, tmp_path, make(), resume=ranks != 2, steps=steps, driver="ddp" if ranks > 1 else "single")
        for rank, read in enumerate(launch(part, ranks) if ranks > 1 else [part(device="cpu")]):
            for step, values in read.items():
                reads.setdefault(step, [{}, {}, {}])[rank][step] = values
    info, draw = read_info(tmp_path), random.Random(2)
    for step in [draw.randrange(1, 76) for _ in range(80)]:
        named = info.samples(step)
        assert named.ranks == (2 if step <= 11 else 3 if step <= 40 else 1)
        for rank in range(named.ranks):
            own = [FIRST.get(one.source, 0) + i for one in named.batches if one.rank == rank for i in one.indices or ()]
            assert own == reads[step][rank][step], (step, rank)


def test_another_batch_size_and_another_accumulation_after_a_resume(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(96), batch_size=4, shuffle=True)

    first = run(tmp_path, loader(), steps=10, accumulate=2)
    given = {"batch_size": 8, "accumulate": 1}
    second = run(tmp_path, loader(), resume=True, steps=40, accumulate=2, override=given)
    assert check(tmp_path, [first | second], 100)


def test_an_epoch_that_ends_early(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True)
    early = on(Callback.on_step_end, at=13)(lambda run: run.end_epoch("enough"))
    first = run(tmp_path, loader, epochs=5, more=[early])
    assert check(tmp_path, [first], 40)
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


def test_with_replacement_a_list_and_a_killed_run(tmp_path: Path) -> None:
    drawn = RandomSampler(range(20), replacement=True, num_samples=15, generator=torch.Generator().manual_seed(8))
    read = run(tmp_path / "drawn", DataLoader(Numbers(20), batch_size=2, sampler=drawn), epochs=4)
    assert check(tmp_path / "drawn", [read], 40)
    batches = [torch.full((2, 1), float(i)) for i in range(7)]
    read = run(tmp_path / "list", batches, epochs=3)
    named = read_info(tmp_path / "list").samples(12)
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

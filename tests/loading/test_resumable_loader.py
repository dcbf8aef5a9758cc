"""An epoch can be read from any batch on, and yields the same batches as the whole epoch; tests/alone kills workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, product
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza.errors import DataError
from cadenza.loading import Mixture, ResumableLoader, resumable
from cadenza.loading.loaders import Limited
from cadenza.testing import tiny_trainer
from tests.loading import data
from tests.loading.data import Keeping, Numbers, Shuffled, Stream, epochs_of, loader_of, noise_of, plain, rest_of, seeded
from tests.long import LONG

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # from torchdata

WEIGHTS = [float(i + 1) for i in range(data.SAMPLES)]


class Batched(torch_data.BatchSampler):
    """Shuffles batches with torch's global generator, over a sampler with its own generator."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        order = torch.randperm(len(batches)).tolist()
        return iter([batches[i] for i in order])


BATCHED = {"batch_sampler": Batched(RandomSampler(Numbers(), generator=seeded(2)), 4, False)}
MAP_STYLE: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda **o: loader_of(Numbers("torch"), **o),
    "shuffle": lambda **o: loader_of(Numbers("numpy"), shuffle=True, **o),
    "shuffle with a generator": lambda **o: loader_of(Numbers(), shuffle=True, generator=seeded(3), **o),
    "drop_last": lambda **o: loader_of(Numbers("python"), shuffle=True, drop_last=True, **o),
    "RandomSampler": lambda **o: loader_of(Numbers(), sampler=RandomSampler(Numbers(), replacement=True), **o),
    "weighted": lambda **o: loader_of(Numbers(), sampler=torch_data.WeightedRandomSampler(WEIGHTS, data.SAMPLES), **o),
    "of a subset": lambda **o: loader_of(Numbers(), sampler=torch_data.SubsetRandomSampler(range(5, 19), seeded(4)), **o),
    "DistributedSampler": lambda **o: loader_of(Numbers(), sampler=DistributedSampler(Numbers(), 2, 0), **o),
    "a sampler of torch's": lambda **o: loader_of(Numbers(), sampler=Shuffled("torch"), **o),
    "a sampler of numpy's": lambda **o: loader_of(Numbers(), sampler=Shuffled("numpy"), **o),
    "a sampler of Python's": lambda **o: loader_of(Numbers(), sampler=Shuffled("python"), **o),
    "a batch sampler": lambda **o: loader_of(Numbers("torch"), **BATCHED, **o),
    "batch_size=None": lambda **o: loader_of(Numbers("torch"), batch_size=None, shuffle=True, **o),
    "__getitems__": lambda **o: loader_of(data.AtOnce("numpy"), shuffle=True, **o),
    "a random collate_fn": lambda **o: loader_of(Numbers(), shuffle=True, collate_fn=data.noisy_collate, **o),
    "pinned": lambda **o: loader_of(Numbers("torch"), shuffle=True, pin_memory=torch.cuda.is_available(), **o),
}


@pytest.mark.parametrize("make", MAP_STYLE.values(), ids=MAP_STYLE.keys())
def test_any_map_style_loader_resumes_at_any_batch_and_has_other_numbers_in_each_epoch(
    make: Callable[..., DataLoader[Any]],
) -> None:
    whole = epochs_of(make())
    assert whole[0] != whole[1] != whole[2]
    for epoch, batches in enumerate(whole):
        for skip in (1, 3, len(batches) - 1, len(batches)):
            assert rest_of(make(), epoch, skip) == batches[skip:]
    source = resumable(make(), 1)
    next(source.batches(0, 0))
    assert plain(source.batches(1, 0)) == whole[1], "after an epoch that ended early"


@pytest.mark.parametrize("name", ["shuffle", "a sampler of Python's", "a batch sampler", "batch_size=None", "__getitems__"])
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_with_workers_resume_at_any_batch(name: str, persistent: bool) -> None:
    whole = epochs_of(MAP_STYLE[name](), epochs=2)
    source = resumable(MAP_STYLE[name](num_workers=2, persistent_workers=persistent), 1)
    assert plain(source.batches(0, 2)) == whole[0][2:]
    next(source.batches(0, 0))  # an epoch that ends early
    assert plain(source.batches(1, 4)) == whole[1][4:]


def test_skipped_samples_are_not_read_and_a_sampler_only_as_far_as_needed_as_it_may_be_endless() -> None:
    dataset = Numbers()
    rest = rest_of(loader_of(dataset), 0, 4)
    assert dataset.reads == [16, 17, 18, 19, 20, 21]
    assert rest == [[16, 17, 18, 19], [20, 21]]
    batches = resumable(loader_of(Numbers(), batch_sampler=data.Buckets()), 1).batches(0, 0)
    first = [next(batches).tolist() for _ in range(3000)]
    later = resumable(loader_of(Numbers(), batch_sampler=data.Buckets()), 1).batches(0, 2500)
    assert [next(later).tolist() for _ in range(500)] == first[2500:]


# -- the user's objects -------------------------------------------------------------------------------


def test_the_generator_of_the_user_determines_the_order_and_does_not_change() -> None:
    def order(generator: torch.Generator | None, seed: int) -> list[list[Any]]:
        return epochs_of(loader_of(Numbers(), shuffle=True, generator=generator), seed=seed)

    assert order(seeded(3), 1) == order(seeded(3), 2)
    assert order(seeded(3), 1) != order(seeded(4), 1)
    assert order(None, 1) != order(None, 2)
    generator = seeded(3)
    loader = loader_of(Numbers(), shuffle=True, generator=generator)
    before = generator.get_state()
    assert epochs_of(loader) == epochs_of(loader)
    assert torch.equal(generator.get_state(), before)
    assert isinstance(loader.sampler, RandomSampler)
    assert loader.sampler.generator is generator


class Knowing(Numbers):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.epoch)


def test_set_epoch_of_samplers_and_datasets_is_called_also_in_persistent_workers() -> None:
    sampler: DistributedSampler[Tensor] = DistributedSampler(Numbers(), 2, 0)
    resumable(loader_of(Numbers(), sampler=sampler), 1).batches(5, 0)
    assert sampler.epoch == 5
    dataset = Keeping()
    list(resumable(loader_of(dataset), 1).batches(5, 0))
    assert dataset.epoch == 5
    loader = loader_of(Knowing(samples=4), num_workers=1, persistent_workers=True)
    assert epochs_of(loader) == [[[0, 0, 0, 0]], [[1, 1, 1, 1]], [[2, 2, 2, 2]]]


class Doubling(DataLoader[Tensor]):
    """A loader with its own iteration."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares its own iterator class
        return (2 * batch for batch in super().__iter__())


def test_a_loader_with_its_own_iteration_keeps_it() -> None:
    assert epochs_of(Doubling(Numbers(samples=4), batch_size=2), epochs=1) == [[[0, 2], [4, 6]]]


# -- loaders with a state_dict -------------------------------------------------------------------------


def stateful(**options: Any) -> StatefulDataLoader[Any]:
    torch.manual_seed(2)  # the constructor draws the seed of its order
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def streamed(**options: Any) -> DataLoader[Any]:
    rows = datasets.Dataset.from_dict({"number": list(range(data.SAMPLES))}).to_iterable_dataset(num_shards=3)
    return loader_of(rows.shuffle(seed=1, buffer_size=1) if options.pop("shards", False) else rows, collate_fn=_numbers)


def _numbers(rows: list[dict[str, int]]) -> Tensor:
    return torch.tensor([float(row["number"]) for row in rows])


def restored(make: Callable[[], Any], state: dict[str, Any]) -> ResumableLoader:
    source = resumable(make(), 1)
    source.load_state_dict(state)
    return source


STATEFUL: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": stateful,
    "StatefulDataLoader with a generator": lambda: stateful(generator=seeded(7)),
    "StatefulDataLoader with workers": lambda: stateful(num_workers=2),
    "a Hugging Face stream": streamed,
    "a data set with state_dict": lambda: loader_of(Keeping()),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
def test_a_loader_with_a_state_dict_resumes_inside_and_between_epochs(make: Callable[[], Any]) -> None:
    source = resumable(make(), 1)
    whole = [plain(source.batches(epoch, 0)) for epoch in range(3)]
    assert len(whole[1]) == 6
    for seen in (1, 5, 6):
        first = resumable(make(), 1)
        list(first.batches(0, 0))
        list(islice(first.batches(1, 0), seen))
        resumed = restored(make, first.state_dict())
        assert plain(resumed.batches(1, seen)) == whole[1][seen:]
        assert plain(resumed.batches(2, 0)) == whole[2]
    between = resumable(make(), 1)
    list(between.batches(0, 0))
    assert plain(restored(make, between.state_dict()).batches(1, 0)) == whole[1]
    early = resumable(make(), 1)
    next(early.batches(0, 0))
    assert plain(restored(make, early.state_dict()).batches(1, 0)) == whole[1], "after an epoch that ended early"


def test_a_lost_shuffle_buffer_is_an_error_and_replay_is_exact() -> None:
    def make() -> DataLoader[Any]:
        return streamed(shards=True)

    whole = epochs_of(make(), epochs=2)
    first = resumable(make(), 1)
    next(first.batches(0, 0))
    with pytest.raises(DataError, match=r"shuffle buffer.*replay=True"):
        restored(make, first.state_dict()).batches(0, 1)
    assert rest_of(make(), 1, 4, replay=True) == whole[1][4:]


# -- loaders that can only start at the beginning --------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_replay_resumes_any_iterable_by_reading(workers: int) -> None:
    whole = epochs_of(loader_of(Stream(), num_workers=workers), epochs=2)
    for epoch, batches in enumerate(whole):
        assert rest_of(loader_of(Stream(), num_workers=workers), epoch, 3, replay=True) == batches[3:]


ONLY = "can only start at the beginning of an epoch"
ALTERNATIVES = rf"batch 4 of an epoch, but a DataLoader over an IterableDataset {ONLY}.*StatefulDataLoader.*replay=True"


@pytest.mark.parametrize(
    ("read", "message"),
    [
        pytest.param(lambda: rest_of(loader_of(Stream()), 0, 3), ALTERNATIVES, id="a stream"),
        pytest.param(lambda: rest_of(loader_of(Keeping(), num_workers=2), 0, 3), ONLY, id="a state with workers"),
        pytest.param(lambda: rest_of(Doubling(Numbers()), 0, 1), f"a Doubling {ONLY}", id="a loader of its own kind"),
        pytest.param(
            lambda: restored(lambda: loader_of(Keeping()), {}).batches(0, 3),
            "holds no position for this loader",
            id="a checkpoint of another kind of loader",
        ),
    ],
)
def test_a_position_that_is_not_known_is_an_error_that_names_the_alternatives(read: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read()
    assert len(rest_of(loader_of(Stream()), 2, 0)) == 6, "between two epochs no state is needed"


@pytest.mark.parametrize("count", [2, 4, 100])
def test_a_limited_loader_counts_skipped_batches(count: int) -> None:
    whole = epochs_of(Limited(MAP_STYLE["shuffle"](), count))
    full = epochs_of(MAP_STYLE["shuffle"]())
    assert whole == [batches[:count] for batches in full]
    assert rest_of(Limited(MAP_STYLE["shuffle"](), count), 1, 1) == whole[1][1:]
    assert rest_of(Limited(MAP_STYLE["shuffle"](), count), 1, len(whole[1])) == []


LIMITED: dict[str, Callable[[Any], Any]] = {
    "limited": lambda loader: Limited(loader, 3),
    "a limited mixture": lambda loader: Limited(Mixture({"a": loader, "b": [0.0, 1.0, 2.0]}, "cycle"), 3),
    "a mixture of limited ones": lambda loader: Mixture({"a": Limited(loader, 2), "b": Limited([0.0, 1.0], 1)}, "sequential"),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize("limit", LIMITED.values(), ids=LIMITED.keys())
def test_a_limited_loader_continues_with_the_state_of_the_inner_loader(
    make: Callable[[], Any], limit: Callable[[Any], Any]
) -> None:
    """After the last batch of an epoch there is none to read, and the next epoch is a new one."""
    whole = epochs_of(limit(make()))
    for seen in (1, 3):
        source = resumable(limit(make()), 1)
        list(islice(source.batches(0, 0), seen))
        for _ in range(2):  # the second time from a checkpoint that is written before the first batch after a resume
            source = restored(lambda: limit(make()), source.state_dict())
            rest = source.batches(0, seen)
        assert plain(rest) == whole[0][seen:]
        assert [plain(source.batches(epoch, 0)) for epoch in (1, 2)] == whole[1:]


# -- persistent workers ---------------------------------------------------------------------------------


class Drawing(IterableDataset[Tensor]):
    """Draws from all generators of a worker, and yields its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Drawing)
        own = numpy.random.default_rng(info.seed).random()
        for index in range(5):
            drawn = sum(map(noise_of, ("torch", "numpy", "python"))) + torch.initial_seed() % 1000
            yield torch.tensor([index, self.epoch, own, drawn], dtype=torch.float64)


def persistent(workers: int, **options: Any) -> DataLoader[Any]:
    return loader_of(Drawing(), num_workers=workers, persistent_workers=True, batch_size=2, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_in_persistent_workers_is_reproducible(workers: int) -> None:
    loader = persistent(workers, prefetch_factor=3)
    whole = epochs_of(loader, replay=True)
    assert len({str(epoch) for epoch in whole}) == 3
    assert [batches[0][0][1] for batches in whole] == [0, 1, 2]
    for epoch, skip in ((1, 2), (2, 1)):
        source = resumable(persistent(workers), 1, replay=True)
        assert plain(source.batches(epoch, skip)) == whole[epoch][skip:]
    next(source.batches(0, 0))  # an epoch that ends early
    assert plain(source.batches(1, 0)) == whole[1]
    assert epochs_of(loader, epochs=1) == whole[:1]  # the loader works in a second run
    if workers == 1:
        drawing = persistent(1, worker_init_fn=lambda worker: noise_of("torch"))
        assert epochs_of(drawing, epochs=2) == whole[:2], "a worker_init_fn may draw"


def test_a_data_pipe_in_persistent_workers_is_reproducible() -> None:
    def make() -> DataLoader[Any]:
        return loader_of(IterableWrapper(range(9)).map(_noisy).shuffle(), num_workers=1, persistent_workers=True)

    whole = epochs_of(make(), epochs=2)
    assert plain(resumable(make(), 1).batches(1, 0)) == whole[1]


def _noisy(number: int) -> Tensor:
    return torch.tensor(number + noise_of("torch"))


class Raising(Numbers):
    """Reading sample 5 is an error; each attempt is recorded in a file, which workers and tests can read."""

    def __init__(self, tries: Path) -> None:
        super().__init__()
        self.tries = tries

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            with self.tries.open("a") as file:
                file.write("x")
            raise RuntimeError("sample 5 is broken")
        return super().__getitem__(index)


class Streamed(IterableDataset[Tensor]):
    """A stream of samples of a data set."""

    def __init__(self, data: Dataset[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return (self.data[index] for index in range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_without_another_attempt(workers: int, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    with pytest.raises(RuntimeError, match="sample 5 is broken"):
        rest_of(loader_of(Raising(tries), num_workers=workers), 0, 0)
    assert tries.read_text() == "x"


FITS = [(True, True, False), (True, False, True), (False, True, True), (False, False, False)]
RUNS = [("fit", *one) for one in (product((False, True), repeat=3) if LONG else FITS)]
EVALUATIONS = [("evaluate", True, streams, False) for streams in (False, True)]  # persistent workers are used again


@pytest.mark.parametrize(("act", "broken", "streams", "persistent"), [*RUNS, *EVALUATIONS])
def test_no_worker_is_left_after_a_run_or_an_evaluation(
    act: str, broken: bool, streams: bool, persistent: bool, tmp_path: Path
) -> None:
    """Also while the error, the traceback of which refers to the loader, is there."""
    data: Any = Raising(tmp_path / "tries") if broken else Numbers()
    data = Streamed(data) if streams else data
    loader: Any = DataLoader(data, 2, num_workers=2, persistent_workers=persistent)
    one = tiny_trainer(
        loader=loader, compute_loss=lambda model, batch: model(batch.float().reshape(-1, 1)).square().mean(), epochs=2
    )
    acts: dict[str, Callable[[], object]] = {"fit": one.fit, "evaluate": lambda: one.evaluate(loader)}
    before = set(active_children())
    with pytest.raises(RuntimeError, match="sample 5 is broken") if broken else nullcontext() as raised:
        acts[act]()
    assert set(active_children()) == before, raised

"""Batches: of tensors in memory from any position, and of any structure: moved to the device, pinned, and counted."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint, Evaluate, Limit
from cadenza.errors import DataError, LossError
from cadenza.loading import Shard, TensorBatches, num_batches, resumable
from cadenza.loading.batches import CountedBatch, moved, pinned, size_of, tensors_in, with_sample_counts
from cadenza.loading.loaders import Limited, length_of
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.loading.data import Numbers

N = 22


def tensors() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of ``y = 2x + 1``: shapes (22, 1)."""
    inputs = torch.arange(float(N)).unsqueeze(1) / N
    return inputs, 2 * inputs + 1


def numbers(**options: Any) -> TensorBatches[tuple[Tensor, ...]]:
    options.setdefault("batch_size", 4)
    return TensorBatches(torch.arange(N), **options)


def plain(batches: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in batches]


def test_shuffled_every_sample_is_used_once_with_its_target() -> None:
    inputs, targets = tensors()
    batches = list(TensorBatches(inputs, targets, batch_size=4, shuffle=True))
    read, paired = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(read.sort(0).values, inputs)
    assert not torch.equal(read, inputs)
    assert torch.equal(2 * read + 1, paired)


def test_a_mapping_yields_batches_with_its_names() -> None:
    ids, labels = torch.arange(6).reshape(3, 2), torch.tensor([7, 8, 9])
    batches = list(TensorBatches({"ids": ids, "label": labels}, batch_size=2))
    assert [{name: part.tolist() for name, part in batch.items()} for batch in batches] == [
        {"ids": [[0, 1], [2, 3]], "label": [7, 8]},
        {"ids": [[4, 5]], "label": [9]},
    ]


def test_shuffled_batches_are_copies_and_unshuffled_batches_are_views() -> None:
    inputs = torch.zeros(4)
    for (batch,) in TensorBatches(inputs, batch_size=2, shuffle=True):
        batch += 1
    assert inputs.tolist() == [0, 0, 0, 0]
    for (batch,) in TensorBatches(inputs, batch_size=2):
        batch += 1
    assert inputs.tolist() == [1, 1, 1, 1]


def test_device_moves_all_tensors_to_the_device_and_no_gradient_flows_into_them() -> None:
    batches = TensorBatches(torch.ones(4), torch.ones(4, 2), batch_size=2, shuffle=True, device="meta")
    assert batches.device == torch.device("meta")
    assert [(x.device.type, y.device.type, y.shape) for x, y in batches] == [("meta", "meta", (2, 2))] * 2
    given = torch.ones(4, 2, requires_grad=True)
    assert not any(batch.requires_grad for (batch,) in TensorBatches(given, batch_size=2, shuffle=True))


# -- order --------------------------------------------------------------------------------------------


def test_any_epoch_can_be_read_from_any_batch_on_also_if_the_loader_is_sharded_already() -> None:
    for options in ({}, {"shuffle": True}, {"shuffle": True, "drop_last": True}, {"shuffle": True, "seed": 3}):
        for epoch in range(3):
            whole = plain(resumable(numbers(**options), 1).batches(epoch, 0))
            for skip in range(len(whole) + 1):
                assert plain(resumable(numbers(**options), 1).batches(epoch, skip)) == whole[skip:]
    shard = Shard(1, 2, share_data=False)
    assert plain(resumable(numbers(), 1, shard=shard).batches(0, 2)) == plain(numbers())[2:]


def test_the_order_depends_only_on_seed_and_epoch_and_leaves_the_rng_state() -> None:
    before = torch.get_rng_state()
    orders = {
        (seed, epoch): plain(resumable(numbers(shuffle=True), seed).batches(epoch, 0)) for seed in (1, 2) for epoch in (0, 1)
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert len({str(order) for order in orders.values()}) == 4
    torch.manual_seed(99)
    assert plain(resumable(numbers(shuffle=True), 1).batches(1, 0)) == orders[1, 1]


def test_the_seed_of_the_loader_replaces_that_of_the_run_and_in_a_plain_loop_passes_are_counted_or_set() -> None:
    own = [plain(resumable(numbers(shuffle=True, seed=7), seed).batches(0, 0)) for seed in (1, 2)]
    assert own[0] == own[1] == plain(numbers(shuffle=True, seed=7))
    batches = numbers(shuffle=True, seed=7)
    first, second = plain(batches), plain(batches)
    assert first != second
    batches.set_epoch(0)
    assert plain(batches) == first
    assert plain(batches.batches(1, skip=3)) == second[3:]


def test_in_a_plain_loop_without_a_seed_torchs_generator_determines_the_order() -> None:
    torch.manual_seed(1)
    first, second = plain(numbers(shuffle=True)), plain(numbers(shuffle=True))
    torch.manual_seed(1)
    assert plain(numbers(shuffle=True)) == first != second


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 5, "drop_last": True}], ids=str)
def test_the_shards_are_those_of_a_data_loader(ranks: int, options: dict[str, Any]) -> None:
    batch_size, drop_last = options.get("batch_size", 4), options.get("drop_last", False)
    for even in (True, False):
        seen: Counter[int] = Counter()
        for rank in range(ranks):
            shard = Shard(rank, ranks) if even else Shard(rank, ranks).uneven()
            theirs = DataLoader(TensorDataset(torch.arange(N)), batch_size, drop_last=drop_last)
            expected = plain(resumable(theirs, 1, shard=shard).batches(0, 0))
            source = resumable(numbers(**options), 1, shard=shard)
            assert plain(source.batches(0, 0)) == expected
            assert num_batches(numbers(**options), shard) == len(expected)
            assert all(plain(source.batches(0, skip)) == expected[skip:] for skip in range(len(expected)))
            shuffled = resumable(numbers(shuffle=True, **options), 1, shard=shard)
            seen.update(number for batch in plain(shuffled.batches(0, 0)) for number in batch)
        assert set(seen.values()) == {1}, "a sample is in two shards"
        complete = not drop_last and (not even or batch_size > 1)
        assert len(seen) == N or not complete, "a sample is in no shard"


# -- in runs ------------------------------------------------------------------------------------------


def train(**options: Any) -> Callable[[Path], Trainer]:
    def make(directory: Path) -> Trainer:
        loader = TensorBatches(*tensors(), batch_size=4, shuffle=True)
        evaluated = TensorBatches(*tensors(), batch_size=5, shuffle=True, seed=2)
        callbacks = [Evaluate(evaluated, every="2 steps", limit=3)]
        return tiny_trainer(loader=loader, callbacks=callbacks, epochs=3, seed=1, directory=directory, **options)

    return make


def test_a_resumed_run_is_bit_identical() -> None:
    prove_resume(train(), at=[1, 6, 17], in_process=True)
    prove_resume(train(accumulate=4), at=[3], in_process=True)
    prove_resume(train(), at=[4], replay=True, in_process=True)


def test_results_do_not_depend_on_the_number_of_evaluations() -> None:
    loader = TensorBatches(*tensors(), batch_size=4, shuffle=True, seed=2)
    often, seldom = ([Evaluate(loader, every=every, limit=2)] for every in ("1 step", "3 steps"))
    first = tiny_run(callbacks=often, steps=3, seed=1).history["eval/loss"]
    assert tiny_run(callbacks=seldom, steps=3, seed=1).history["eval/loss"] == first[-1:]


def test_a_model_with_named_arguments_gets_batches_of_a_mapping() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # this is what the test is about
            return nn.functional.mse_loss(super().forward(x), y)

    inputs, targets = tensors()
    loader = TensorBatches({"x": inputs, "y": targets}, batch_size=4, shuffle=True)
    assert tiny_run(model=Own(1, 1), compute_loss=None, loader=loader, epochs=2).progress.now().samples == 2 * N


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(3), torch.ones(4)), {}, ValueError, r"same number of rows.*got 0: 3, 1: 4"),
        (({"ids": torch.ones(3), "label": torch.ones(2)},), {}, ValueError, r"got ids: 3, label: 2"),
        ((torch.ones(3), torch.ones(3, device="meta")), {}, ValueError, r"same device; got 0: cpu, 1: meta\. Pass device="),
        ((torch.tensor(1.0),), {}, ValueError, r"tensor '0' must have shape \(samples, \.\.\.\)"),
        ((), {}, TypeError, "one or more tensors, or a mapping.*got none"),
        (({},), {}, TypeError, "got none"),
        ((torch.ones(3), numpy.ones(3)), {}, TypeError, r"got a ndarray as '1'\. Convert it with torch\.as_tensor"),
        ((TensorDataset(torch.ones(3)),), {}, TypeError, "takes tensors; got a TensorDataset as '0'$"),
        ((torch.ones(3),), {"batch_size": 0}, ValueError, "batch_size must be at least 1 sample; got 0"),
        ((torch.ones(3),), {"batch_size": 2.0}, TypeError, r"batch_size must be a whole number; got 2\.0"),
        ((torch.ones(3),), {"seed": "a"}, TypeError, "seed must be a whole number; got 'a'"),
    ],
)
def test_invalid_arguments_are_an_error(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TensorBatches(*arguments, **{"batch_size": 2, **options})


def test_a_run_without_a_complete_batch_and_with_drop_last_is_an_error() -> None:
    with pytest.raises(DataError, match="the training loader is empty"):
        tiny_run(loader=TensorBatches(*tensors(), batch_size=100, drop_last=True))


# -- batches of any structure ------------------------------------------------------------------------


META, CPU = torch.device("meta"), torch.device("cpu")
Pair = namedtuple("Pair", "inputs rest")  # users have untyped ones


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    label: str


class Movable:
    """A user's object with a method ``to``."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def to(self, device: torch.device) -> Movable:
        return Movable(self.inputs.to(device))


class Slotted:
    """A user's object without a ``__dict__``, which need not wait for a copy."""

    __slots__ = ("inputs", "quietly", "unset")

    def __init__(self, inputs: Tensor, quietly: bool = False) -> None:
        self.inputs, self.quietly = inputs, quietly

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Slotted:
        return Slotted(self.inputs.to(device), non_blocking)


class Stuck:
    def to(self, device: torch.device) -> Stuck:
        raise RuntimeError("cannot")


def two() -> Tensor:
    return torch.ones(2, 3)


BATCHES: dict[str, Any] = {
    "tensor": two(),
    "tuple": (two(), two()),
    "list": [two(), "text", 3],
    "dict": {"x": two(), "note": None, "bytes": b"x", "set": {1}},
    "ordered dict": OrderedDict(x=two()),
    "named tuple": Pair(two(), two()),
    "dataclass": Sample(two(), "cat"),
    "object": Movable(two()),
    "object with slots": Slotted(two()),
    "nested": {"a": [Pair(two(), {"b": (two(), Sample(two(), "cat"))}), Movable(two())]},
}


def test_an_object_that_need_not_wait_for_the_copy_does_not() -> None:
    there = moved([Slotted(two()), Movable(two())], META, non_blocking=True)
    assert there[0].quietly
    assert there[1].inputs.device == META
    assert not moved([Slotted(two())], META)[0].quietly


@pytest.mark.parametrize("name", BATCHES)
def test_every_tensor_of_a_batch_is_moved_and_all_else_is_kept(name: str) -> None:
    batch = BATCHES[name]
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert len(list(tensors_in(there))) == len(list(tensors_in(batch))) > 0
    assert {tensor.device for tensor in tensors_in(there)} == {META}
    assert {tensor.device for tensor in tensors_in(batch)} == {CPU}  # the given batch does not change
    if name == "list":
        assert there[1:] == ["text", 3]
    if name == "dict":
        assert {**there, "x": 0} == {"x": 0, "note": None, "bytes": b"x", "set": {1}}
    if name not in ("object", "object with slots", "nested"):
        assert moved(batch, CPU) is batch, "what is on the device already is the same object"


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (Stuck(), "batch"),
        ({"images": [two(), Stuck()]}, r"batch\['images'\]\[1\]"),
        (Pair(two(), Stuck()), r"batch\[1\]"),
        ((Sample(Stuck(), "cat"),), r"batch\[0\]\.inputs"),  # type: ignore[arg-type]  # the test is about this error
    ],
)
def test_a_part_that_cannot_be_moved_is_an_error_with_its_path(batch: Any, path: str) -> None:
    with pytest.raises(DataError, match=rf"^{path} cannot be moved to meta: it is a Stuck, and its to\('meta'\) failed"):
        moved(batch, META)


def test_a_training_batch_that_cannot_be_moved_ends_the_run() -> None:
    with pytest.raises(DataError, match=r"batch\[0\] cannot be moved to cpu: it is a tensor on meta.*tensors that hold data"):
        tiny_run(loader=[(torch.ones(2, 1, device="meta"), torch.ones(2, 1))])


# -- pinned memory -------------------------------------------------------------------------------------


class Pinning(Tensor):
    """A tensor that can be pinned without an accelerator."""

    def pin_memory(self, device: Any = None) -> Tensor:
        return self.as_subclass(Tensor) + 100


def zero() -> Tensor:
    return torch.zeros(2).as_subclass(Pinning)


def test_every_tensor_is_pinned_and_every_container_keeps_its_type() -> None:
    there = pinned({"pair": Pair(zero(), [zero(), "text", None]), "tuple": (zero(), 3)})
    assert isinstance(there["pair"], Pair)
    assert isinstance(there["tuple"], tuple)
    parts = [there["pair"].inputs, there["pair"].rest[0], there["tuple"][0]]
    assert [part.tolist() for part in parts] == [[100, 100]] * 3
    assert there["pair"].rest[1:] == ["text", None]
    assert there["tuple"][1] == 3
    assert CountedBatch(zero(), 2).pin_memory().batch.tolist() == [100, 100]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_does_not_change_batches(workers: int) -> None:
    def read(pin: bool, skip: int) -> list[Any]:
        loader = DataLoader(
            Numbers("numpy"), 4, shuffle=True, num_workers=workers, collate_fn=lambda samples: (torch.stack(samples), "text")
        )
        batches = list(resumable(loader, 1, pin=pin).batches(0, skip))
        assert all(isinstance(batch, tuple) for batch in batches)
        assert all(batch[0].is_pinned() for batch in batches if pin and workers and torch.cuda.is_available())
        return [(numbers.tolist(), text) for numbers, text in batches]

    whole = read(False, 0)
    assert read(True, 0) == whole
    assert read(True, 2) == whole[2:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch only warns where there is no accelerator")
def test_the_thread_of_the_loader_pins_and_only_with_workers() -> None:
    list(resumable(DataLoader(Numbers(), 4), 1, pin=True).batches(0, 0))  # a warning would be an error
    with pytest.warns(UserWarning, match="pin_memory"):
        list(resumable(DataLoader(Numbers(), 4, num_workers=1), 1, pin=True).batches(0, 0))


# -- the number of samples -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (two(), 2),
        ((torch.zeros(5), two()), 5),
        ({"n": 3, "x": two()}, 2),
        ([{"x": two()}], 2),
        ("text", 1),
        (torch.tensor(3), 1),
        ([], 1),
        ({"scale": torch.tensor(0.5), "ids": torch.zeros(8, 3)}, 8),
        ((torch.tensor(0.5), torch.zeros(6)), 6),
        (pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2), torch.zeros(1, 2)]), 3),
        ({"words": pack_sequence([torch.zeros(5), torch.zeros(3)]), "labels": torch.zeros(2)}, 2),
        ((numpy.zeros((4, 2)), numpy.zeros(4)), 4),
        ({"name": "cat", "pixels": numpy.zeros((7, 3))}, 7),
    ],
)
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_tensor_or_array_with_dimensions(batch: Any, size: int) -> None:
    assert size_of(batch) == size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_has_a_size() -> None:
    texts = torch.nested.nested_tensor([torch.zeros(5, 2), torch.zeros(3, 2)])
    assert size_of((texts, torch.zeros(2))) == 2


def test_the_length_of_a_loader_is_unknown_or_limited() -> None:
    def stream() -> Iterator[int]:
        yield 1

    assert length_of(stream()) is None
    assert length_of([1, 2]) == 2
    limited = Limited(tiny_loader(5), 2)
    assert len(limited) == len(list(limited)) == len(list(limited)) == 2
    assert len(Limited(tiny_loader(1), 9)) == 1


class Images(Dataset[Tensor]):
    """Ten images of 3 channels with different heights."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 4 + index, 5), float(index))


class Streamed(IterableDataset[Tensor]):
    """The same images as a stream."""

    def __iter__(self) -> Iterator[Tensor]:
        images = Images()
        yield from (images[index] for index in range(10))


BUCKETS = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]  # a batch sampler with batches of different sizes


def as_list(samples: list[Tensor]) -> list[Tensor]:
    return samples


def loader_of(dataset: Any = Images(), **options: Any) -> Any:  # noqa: B008  # it does not change
    return DataLoader(dataset, collate_fn=as_list, **options)


def mean_of(model: nn.Module, images: Any) -> Tensor:
    pixels = torch.stack([image.mean() for image in images])
    return model(pixels.unsqueeze(1)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (loader_of(batch_size=4), 20),
        (loader_of(batch_sampler=BUCKETS), 20),
        (loader_of(batch_size=4, num_workers=2), 20),
        (loader_of(batch_sampler=BUCKETS, num_workers=2), 20),
        (loader_of(Streamed(), batch_size=4), 20),
        (loader_of(Streamed(), batch_size=4, num_workers=1, persistent_workers=True), 20),
        (Limited(loader_of(batch_size=4), 2), 16),
    ],
)
def test_samples_are_those_that_the_loader_put_into_a_batch(loader: Any, samples: int) -> None:
    assert tiny_run(loader=loader, compute_loss=mean_of, epochs=2).progress.samples == samples


def test_a_run_that_resumes_inside_an_epoch_or_has_a_limit_continues_the_count(tmp_path: Path) -> None:
    def fit(steps: int, *callbacks: Any) -> Run:
        options: dict[str, Any] = {"compute_loss": mean_of, "steps": steps, "seed": 1, "directory": tmp_path}
        one = tiny_trainer(loader=loader_of(batch_sampler=BUCKETS), callbacks=[Checkpoint("1 step"), *callbacks], **options)
        return one.fit(resume="auto")

    assert [fit(steps).progress.samples for steps in (1, 2, 5)] == [4, 5, 15]
    limited = tiny_run(loader=loader_of(batch_size=4), compute_loss=mean_of, callbacks=[Limit(train=2)])
    assert limited.progress.samples == 8


def test_the_mean_loss_of_an_evaluation_counts_samples_not_channels() -> None:
    def compute(model: nn.Module, images: Any) -> dict[str, Any]:
        return {"loss": torch.stack([image.mean() for image in images]).mean()}

    for options in ({"batch_size": 4}, {"batch_sampler": BUCKETS}, {"batch_size": 3, "num_workers": 1}):
        assert tiny_trainer().evaluate(loader_of(**options), compute=compute) == {"eval/loss": pytest.approx(4.5)}
    run = tiny_run(callbacks=[Evaluate(loader_of(Streamed(), batch_size=4), compute=compute, limit=2)])
    assert run.history["eval/loss"][-1][1] == pytest.approx(3.5)


def test_outputs_samples_takes_precedence() -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean() * 0 + batch[0][0, 0], "samples": numpy.int64(5) if len(batch[0]) == 2 else 1}

    batches = [(torch.zeros(2, 1), None), (torch.ones(3, 1), None)]
    run = tiny_run(loader=batches, compute_loss=compute, epochs=3)
    assert run.progress.samples == 3 * 6
    assert tiny_trainer().evaluate(batches, compute=compute) == {"eval/loss": pytest.approx(1 / 6)}


@pytest.mark.parametrize("samples", [1.5, -1, "two", torch.tensor(2, device="meta")])
def test_an_invalid_number_of_samples_is_an_error(samples: Any) -> None:
    with pytest.raises(LossError, match=r"outputs\['samples'\] must be a whole number of at least 0, on the host; got"):
        tiny_run(compute_loss=lambda model, batch: {"loss": model(batch[0]).mean(), "samples": samples})


def test_the_loader_of_an_evaluation_does_not_change_and_its_persistent_workers_are_reused() -> None:
    loader = loader_of(batch_size=5, num_workers=1, persistent_workers=True)
    assert with_sample_counts(loader) is with_sample_counts(loader)
    for _ in range(2):
        assert [one.samples for one in with_sample_counts(loader)] == [5, 5]
    assert loader.collate_fn is as_list
    assert loader._iterator is None
    loader.collate_fn = list
    assert with_sample_counts(loader).collate_fn.collate is list

"""Batches of any structure are moved to the device, and their samples are counted."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from cadenza.errors import DataError
from cadenza.loading.batches import moved, size_of, tensors_in
from cadenza.loading.loaders import Limited, length_of
from cadenza.testing import tiny_loader, tiny_run

META, CPU = torch.device("meta"), torch.device("cpu")
Pair = namedtuple("Pair", "inputs targets")  # users have untyped ones


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


def two() -> Tensor:
    return torch.ones(2, 3)


BATCHES: dict[str, Any] = {
    "tensor": two(),
    "tuple": (two(), two()),
    "list": [two(), "text", 3],
    "dict": {"x": two(), "note": None},
    "ordered dict": OrderedDict(x=two()),
    "named tuple": Pair(two(), two()),
    "dataclass": Sample(two(), "cat"),
    "object": Movable(two()),
    "nested": {"a": [Pair(two(), {"b": (two(), Sample(two(), "cat"))}), Movable(two())]},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_tensor_of_a_batch_is_moved_and_the_structure_is_kept(batch: Any) -> None:
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert len(list(tensors_in(there))) == len(list(tensors_in(batch))) > 0
    assert {tensor.device for tensor in tensors_in(there)} == {META}
    assert {tensor.device for tensor in tensors_in(batch)} == {CPU}  # the given batch does not change


def test_values_that_are_no_tensors_do_not_change() -> None:
    there = moved({"x": two(), "note": "text", "n": 3, "none": None, "bytes": b"x", "set": {1}}, META)
    assert {name: there[name] for name in ("note", "n", "none", "bytes", "set")} == {
        "note": "text",
        "n": 3,
        "none": None,
        "bytes": b"x",
        "set": {1},
    }


@pytest.mark.parametrize("name", [name for name in BATCHES if name not in ("object", "nested")])
def test_a_batch_that_is_on_the_device_already_is_the_same_object(name: str) -> None:
    assert moved(BATCHES[name], CPU) is BATCHES[name]


class Stuck:
    def to(self, device: torch.device) -> Stuck:
        raise RuntimeError("cannot")


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


def test_a_limited_loader_yields_its_count_of_batches_in_each_pass() -> None:
    limited = Limited(tiny_loader(5), 2)
    assert len(limited) == len(list(limited)) == len(list(limited)) == 2
    assert len(Limited(tiny_loader(1), 9)) == 1


def test_the_length_of_a_loader_without_len_is_unknown() -> None:
    def stream() -> Iterator[int]:
        yield 1

    assert length_of(stream()) is None
    assert length_of([1, 2]) == 2

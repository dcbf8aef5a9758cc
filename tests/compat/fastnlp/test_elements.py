"""An element of a metric: a number, or a list of numbers, with the methods of a tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cadenza.compat.fastnlp.core.metrics import Element
from cadenza.compat.fastnlp.core.metrics.backend import AutoBackend


def test_calculations_return_numbers() -> None:
    one, two = Element("one", 1), Element("two", 2)
    assert [one + two, 1 + two, two - one, 3 - two, two * 3, 3 * two] == [3, 3, 1, 1, 6, 6]
    assert [one / two, 1 / two, 5 // two, two // 2, 5 % two, two % 2, two**3, 3**two] == [0.5, 0.5, 2, 1, 1, 0, 8, 9]
    assert [-two, abs(-two), round(two / 3, 2), round(Element("x", 2.567), 1)] == [-2, 2, 0.67, 2.6]
    assert all(type(value) is float for value in (one + two, one / two, two * torch.tensor(3)))


def test_comparisons_return_booleans() -> None:
    one, two = Element("one", 1), Element("two", 2)
    assert (one < two, two <= 2, one > two, two >= 3, one == 1, one != two, one == None) == (  # noqa: E711  # as users write it
        *(True, True, False, False, True, True),
        False,
    )
    assert (bool(one), bool(Element("zero", 0))) == (True, False)


@pytest.mark.parametrize("other", [4, 4.0, torch.tensor(4), torch.tensor([4.0]), np.float32(4), np.int64(4), Element("x", 4)])
def test_it_can_be_changed_by_any_number(other: Any) -> None:
    element = same = Element("one", 1)
    element += other
    element -= 1
    element *= other
    element /= 2
    assert element is same
    assert (element.get_scalar(), other + element, element + other) == (8, 12, 12)


def test_a_result_with_more_numbers_is_an_error() -> None:
    element = Element("one", 1)
    with pytest.raises(ValueError, match="'one' has 1 numbers; the result has 2"):
        element += torch.ones(2)


def test_the_methods_of_a_tensor_are_available() -> None:
    element = Element("one", 2.5)
    assert (element.item(), element.tolist(), element.shape, element.ndim, element.sum().item()) == (2.5, [2.5], (1,), 1, 2.5)
    assert (float(element), int(element), f"{element:.2f}", str(element)) == (
        2.5,
        2,
        "2.50",
        "tensor([2.5000], dtype=torch.float64)",
    )
    element.fill_value(3)
    element.to("cpu")
    assert (element.value.device.type, element.tensor2numpy().tolist(), element.log().item()) == ("cpu", [3.0], np.log(3))
    with pytest.raises(AttributeError, match="no attribute 'median_of'"):
        _ = element.median_of


def test_counts_stay_exact() -> None:
    element = Element("count", 2**24)
    element += 1
    assert element.get_scalar() == 2**24 + 1


def test_a_list_has_items() -> None:
    element = Element("classes", [0, 1, 4], aggregate_method="sum", backend="torch")
    element[2] = 100
    element[0] += 3
    element += [1, 1, 1]
    element *= torch.tensor([1, 2, 1])
    assert (element.to_list(), element[1], len(element), element + element) == ([4, 4, 101], 4, 3, [8, 8, 202])
    assert (element == [4, 4, 101], element / 2) == ([True, True, True], [2, 2, 50.5])
    element.reset()
    assert element.plain() == [0, 1, 4]


def test_a_number_has_no_items() -> None:
    element = Element("one", 1)
    for touch in (lambda: element[0], lambda: len(element), lambda: element.__setitem__(0, 1)):
        with pytest.raises(TypeError, match="'one' is a number, and has no items"):
            touch()


def test_it_can_be_copied_and_pickled() -> None:
    element = Element("one", [1, 2], "max", AutoBackend("torch"))
    for other in (copy.deepcopy(element), pickle.loads(pickle.dumps(element))):
        other += 1
        assert (other.to_list(), element.to_list(), other.name) == ([2, 3], [1, 2], "one")

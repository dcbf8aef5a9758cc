"""The state of a run: values that can be saved, as JSON beside tensors, `run.state`, and counters of completed work."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from cadenza import Counters, Progress
from cadenza.errors import CheckpointFormatError, StateError
from cadenza.status.encoding import State, decode, encode, first_difference, host_copy, same
from cadenza.status.progress import Accumulation, Change, Unit
from cadenza.status.reprs import signature_of
from cadenza.testing import tiny_run
from tests.long import seeds

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
FLOATS = (0.0, -0.0, 1e-320, 0.1, math.inf, -math.inf, math.nan)
TEXTS = ("", "a", "a.b", "a[0]", "$tensor", "$dict", "$float", "ü\n\u2028", "x" * 300)


def there_and_back(tree: Any) -> Any:
    """Return what is read of what would be written: JSON text, and the bytes of a safetensors file."""
    plain, tensors = encode(tree)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), load(save(tensors)))


def alike(left: Any, right: Any) -> bool:
    """Compare more strictly than the code under test does: types and signs of zero too."""
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and (left.contiguous().flatten().view(torch.uint8).tolist() == right.flatten().view(torch.uint8).tolist())
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            alike(k, j) and alike(left[k], right[j]) for k, j in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    return repr(left) == repr(right)


def random_tensor(dice: random.Random) -> Tensor:
    shape = dice.choice([(), (0,), (3,), (2, 0, 3), (2, 3), (4, 1, 2)])
    tensor = torch.randn(shape).mul(9).to(dice.choice(DTYPES))
    if dice.random() < 0.3 and tensor.is_floating_point() and tensor.numel():
        tensor.view(-1)[0] = math.nan
    return tensor.transpose(0, -1) if tensor.ndim > 1 and dice.random() < 0.5 else tensor


def random_key(dice: random.Random) -> Any:
    return dice.choice(
        [dice.choice(TEXTS), dice.randint(-3, 3), None, True, 0.5, b"key", (1, "a"), f"key {dice.randint(0, 9)}"]
    )


def random_tree(dice: random.Random, depth: int) -> Any:
    kind = dice.choice(["dict", "list", "tuple", "tensor", "plain", "plain"]) if depth else "plain"
    if kind == "dict":
        return {random_key(dice): random_tree(dice, depth - 1) for _ in range(dice.randint(0, 4))}
    if kind in ("list", "tuple"):
        parts = [random_tree(dice, depth - 1) for _ in range(dice.randint(0, 4))]
        return parts if kind == "list" else tuple(parts)
    if kind == "tensor":
        return random_tensor(dice)
    return dice.choice([None, True, False, 3, -(2**70), b"\x00\xff", dice.choice(FLOATS), dice.choice(TEXTS)])


@pytest.mark.parametrize("seed", seeds(usual=8, long=20))
def test_whatever_tree_goes_in_comes_out_the_same(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(25):
        tree = {"": random_tree(dice, 4), "other": random_tensor(dice)}
        back = there_and_back(tree)
        assert alike(back, tree)
        assert same(back, tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"a[0]": torch.ones(1), "a": [torch.zeros(1)]},
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"a": torch.ones(1), "a#2": torch.zeros(1), "": {"a": torch.full((1,), 2.0)}},
    ],
    ids=["dotted", "bracketed", "number and text", "numbered"],
)
def test_two_places_that_read_alike_keep_their_own_tensors(tree: Any) -> None:
    assert alike(there_and_back(tree), tree)


def test_the_state_of_every_optimizer_and_scheduler_comes_back() -> None:
    model = nn.Linear(3, 2)
    for optimizer in (torch.optim.AdamW(model.parameters(), amsgrad=True), torch.optim.SGD(model.parameters(), momentum=0.9)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        assert first_difference(there_and_back(state), state) is None


def test_tied_and_shared_tensors_are_written_once_each_and_share_nothing_afterwards() -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    back = there_and_back({"tied": [weight, weight], "view": weight[1], "turned": weight.T})
    assert alike(back, {"tied": [weight.detach()] * 2, "view": weight[1].detach(), "turned": weight.T.detach()})
    assert len({tensor.data_ptr() for tensor in (*back["tied"], back["view"], back["turned"])}) == 4


def test_what_was_encoded_or_copied_to_the_host_does_not_change_with_its_tensors() -> None:
    tensor = torch.zeros(3, 2, requires_grad=True)
    _, tensors = encode([tensor])
    copy = host_copy(tensor.detach().T)
    with torch.no_grad():
        tensor.fill_(7)
    assert not tensors["[0]"].any()
    assert not tensors["[0]"].requires_grad
    assert copy.is_contiguous()
    assert copy.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_numbers_of_numpy_become_plain_ones_and_other_mappings_dicts() -> None:
    tree = {"a": np.float64(0.5), "b": np.int32(3), "c": np.bool_(True), "d": np.float32("nan"), "e": np.array(2)}
    assert alike(there_and_back(tree), {"a": 0.5, "b": 3, "c": True, "d": math.nan, "e": 2})
    assert alike(there_and_back(OrderedDict(a=1)), {"a": 1})


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), np.zeros(3), np.zeros((1, 1)), 1j, Path("a"), Colour.RED, print, np.zeros(0)]
)
def test_a_value_that_cannot_be_saved_is_named_with_its_place(value: object) -> None:
    with pytest.raises(StateError, match=r"^callbacks\.Mine\.list\[1\]\.entry cannot be saved: expected .*; got ") as caught:
        encode({"callbacks": {"Mine": {"list": (0, {"entry": value})}}})
    assert f"; got {type(value).__name__}" in str(caught.value)


def test_an_unknown_tag_and_a_missing_tensor_are_refused() -> None:
    with pytest.raises(CheckpointFormatError, match="unknown tag '\\$code'"):
        decode({"$code": "print()"}, {})
    with pytest.raises(CheckpointFormatError, match="mentions a tensor 'a' that it does not hold"):
        decode({"x": [{"$tensor": "a"}]}, {})


def test_the_first_difference_of_two_trees_is_named_with_its_place() -> None:
    tree = {"a": [1, (torch.zeros(2), math.nan)], "b": {}}
    assert first_difference(tree, tree) is None
    other = {"a": [1, (torch.tensor([0.0, -0.0]), math.nan)], "b": {}}
    assert first_difference(tree, other) == "a[1][0]: torch.float32 (2,) [0.0, 0.0]... and torch.float32 (2,) [0.0, -0.0]..."
    assert first_difference(tree, {**tree, "c": 1}) == ": keys ['c'] are only in one of the two"
    assert first_difference([1, 2], [1]) == ": 2 entries and 1"
    assert first_difference({"a": 1}, {"a": 2}) == "a: 1 and 2"


def test_entries_of_a_state_are_attributes_and_a_wrong_name_or_a_place_inside_is_named() -> None:
    state = tiny_run(steps=1).state
    state.best = 0.5
    state["rounds"] = [1, (2, {"a": torch.ones(2)}), None, "text", True]
    assert (state["best"], state.best) == (0.5, 0.5)
    del state.best
    assert list(state) == ["rounds"]
    with pytest.raises(StateError, match=r"run\.state\['a'\]\['b'\]\[1\] cannot be saved: .*got set"):
        State(a={"b": [1, {2}]})
    with pytest.raises(StateError, match=r"run\.state\['a'\] cannot be saved: expected keys of type str; got 1"):
        State(a={1: 2})
    state = State(best=1)
    with pytest.raises(AttributeError, match=r"run\.state has no 'bets'; it has \['best'\]"):
        _ = state.bets
    with pytest.raises(AttributeError, match=r"run\.state has no 'bets'"):
        del state.bets


WAYS: dict[str, Callable[[State, Any], Any]] = {
    "item": lambda state, value: state.__setitem__("key", value),
    "attribute": lambda state, value: setattr(state, "key", value),
    "update": lambda state, value: state.update(key=value),
    "or": lambda state, value: state.__ior__({"key": value}),
    "default": lambda state, value: state.setdefault("key", value),
    "constructor": lambda state, value: State(key=value),
}


@pytest.mark.parametrize("value", [print, {1, 2}, object(), b"bytes", 1j])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_value_that_cannot_be_saved_is_an_error_whichever_way_it_is_set(value: Any, way: Callable[[State, Any], Any]) -> None:
    state = State()
    with pytest.raises(
        StateError, match=r"run\.state\['key'\] cannot be saved: expected None, bool, int, float, str, a tensor"
    ):
        way(state, value)
    assert not state


# -- counters of completed work, limits, and the signatures of functions that listen -----------------


NAMES = "epoch step batch batch_in_epoch samples tokens max_epochs max_steps max_tokens batches_per_epoch origin finished"


@pytest.mark.parametrize("name", NAMES.split())
def test_callbacks_cannot_set_it(name: str) -> None:
    with pytest.raises(AttributeError, match="has no setter"):
        setattr(Progress(max_steps=1), name, 3)


LATER = Counters(epoch=1, step=8, batch=8, batch_in_epoch=3)


@pytest.mark.parametrize(
    ("limits", "begun", "accumulate", "totals"),
    [
        ({"max_epochs": 2, "batches_per_epoch": 5}, None, 1, (2, 10, 10)),
        ({"max_epochs": 2, "batches_per_epoch": 5}, None, 2, (2, 6, 10)),
        ({"max_steps": 7, "batches_per_epoch": 5}, None, 1, (1, 7, 7)),
        ({"max_steps": 4, "batches_per_epoch": 5}, None, 2, (1, 4, 7)),
        ({"max_epochs": 1, "max_steps": 99, "batches_per_epoch": 5}, None, 1, (1, 5, 5)),
        ({"max_epochs": 2}, None, 1, (2, None, None)),
        ({"max_steps": 9}, None, 1, (None, 9, None)),
        ({"max_epochs": 1, "max_steps": 9}, None, 1, (None, None, None)),  # either may come first
        ({"batches_per_epoch": 5}, None, 1, (None, None, None)),
        ({"max_steps": 9, "batches_per_epoch": 13}, LATER, 2, (1, 9, 10)),  # inside the epoch in which the fit began
        ({"max_steps": 13, "batches_per_epoch": 13}, LATER, 2, (2, 13, 18)),
        ({"max_steps": 15, "batches_per_epoch": 13}, LATER, 2, (2, 15, 22)),
    ],
)
def test_totals_follow_from_the_limits_and_from_where_a_fit_began(
    limits: dict[str, Any], begun: Counters | None, accumulate: int, totals: tuple[int | None, ...]
) -> None:
    progress = Progress(**limits)
    if begun is not None:
        progress.begin(begun, progress.batches_per_epoch)
    units: tuple[Unit, ...] = ("epoch", "step", "batch")
    assert tuple(progress.total(unit, accumulate) for unit in units) == totals


def test_it_can_begin_in_the_middle_and_its_counters_read_as_a_sentence() -> None:
    progress = Progress(max_epochs=2)
    middle = Counters(epoch=1, step=7, batch=7, batch_in_epoch=2, samples=14)
    progress.begin(middle, batches_per_epoch=5)
    assert progress.now() == progress.origin == middle
    progress.finish_batch(2)
    assert progress.origin == middle
    assert progress.now() == Counters(epoch=1, step=7, batch=8, batch_in_epoch=3, samples=16)
    assert str(progress.now()) == "epoch 2, step 7, batch 8"


def test_an_epoch_that_others_began_has_a_length_of_its_own_and_the_total_is_what_was_done_and_what_is_left() -> None:
    progress = Progress(max_epochs=4)
    progress.begin(Counters(epoch=1, step=8, batch=8, batch_in_epoch=3, samples=99), batches_per_epoch=10)
    progress.take_over(11)
    assert (progress.batches_per_epoch, progress.batches_per_whole_epoch) == (11, 10)
    assert progress.total("step") == 8 + 8 + 2 * 10
    assert progress.total("step", accumulate=3) == 8 + 3 + 2 * 4
    assert progress.total("batch") == 8 + 8 + 2 * 10
    assert progress.total("epoch") == 4
    for _ in range(8):
        assert progress.batches_per_epoch == 11
        progress.finish_batch(1)
    assert progress.batch_in_epoch == 11
    progress.finish_epoch()
    assert progress.batches_per_epoch == 10
    assert progress.total("step") == 8 + 8 + 2 * 10, "of the fit, not of the epoch under way"


def test_tokens_are_a_counter_and_may_be_a_limit_with_which_the_number_of_steps_is_not_known() -> None:
    progress = Progress(max_tokens=100)
    assert repr(progress).endswith("; ends after 100 tokens>")
    for expected in (40, 80):
        progress.finish_batch(samples=2, tokens=40)
        assert (progress.tokens, progress.now().tokens, progress.finished) == (expected, expected, False)
    progress.finish_batch(samples=2, tokens=40)
    assert progress.finished, "the batch that reaches the limit is whole"
    alone = Progress(max_tokens=100, batches_per_epoch=5)
    assert [alone.total(unit) for unit in ("token", "step", "batch", "epoch")] == [100, None, None, None]
    assert alone.at_most("step") is None
    beside = Progress(max_tokens=100, max_steps=7, batches_per_epoch=5)
    assert [beside.total(unit) for unit in ("token", "step")] == [None, None]
    assert (beside.at_most("step"), beside.at_most("epoch")) == (7, 1)


CODE = """
from typing import TYPE_CHECKING

import torch
from torch import nn

from cadenza import Callback, Trainer, on
from cadenza.callbacks import LearningRate

if TYPE_CHECKING:
    from cadenza import Run
    from elsewhere import Parameters, Size


class Steps(Callback):
    def __init__(self, size: Size = 0) -> None: ...
    def on_step_end(self, run: Run) -> None: ...


@on(Callback.on_epoch_end)
def epochs(run: Run) -> None: ...


def decay(optimizer: Parameters, total: Size) -> Size:
    return torch.optim.lr_scheduler.StepLR(optimizer, total)


def build(parameters: Parameters) -> Parameters:
    return torch.optim.SGD(parameters, lr=0.1)


class Model(nn.Linear):
    def forward(self, numbers: Size) -> Size:
        return super().forward(numbers).sum()


callbacks = [Steps(), epochs, LearningRate(decay)]
trainer = Trainer(Model(2, 1), build, [{"numbers": torch.ones(3, 2)}], max_epochs=1, callbacks=callbacks)
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the definition of such a function is an error before Python 3.14")
def test_annotations_for_type_checkers_alone_are_not_read() -> None:
    names: dict[str, Any] = {"__name__": "user"}
    exec(compile(CODE, "user.py", "exec", dont_inherit=True), names)
    assert "Steps()" in repr(names["trainer"])
    assert names["trainer"].fit().progress.step == 1
    assert str(signature_of(names["decay"])) == "(optimizer: 'Parameters', total: 'Size') -> 'Size'"


def test_the_totals_of_a_run_without_a_limit_are_not_known_if_a_change_waits_for_a_part_of_it() -> None:
    """They were computed without end."""
    size = Accumulation(1, [Change(50, "%", 4, "50%")])
    assert Progress(batches_per_epoch=5, accumulate=size).total("step") is None
    assert size.after_changes(Counters(), Progress(max_steps=10, batches_per_epoch=5), -1, 5) is None

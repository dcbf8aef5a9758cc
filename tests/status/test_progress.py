"""Counters of completed work, limits, and the signatures of functions that listen."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cadenza import Counters, Progress
from cadenza.status.progress import Unit
from cadenza.status.signatures import signature_of

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
    assert str(progress.now()) == "epoch 1, step 7, batch 8"


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
    tokens = Progress.reader("token")
    assert repr(progress).endswith("; ends after 100 tokens>")
    for expected in (40, 80):
        progress.finish_batch(samples=2, tokens=40)
        assert (progress.tokens, tokens(progress), progress.now().tokens, progress.finished) == (*[expected] * 3, False)
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


def test_the_parameters_are_those_of_the_function() -> None:
    assert list(signature_of(lambda run, *, every=3: None).parameters) == ["run", "every"]

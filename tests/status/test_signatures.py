"""Python 3.14 evaluates annotations when they are read, so names for type checkers alone must never be read."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cadenza.status.signatures import signature_of

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

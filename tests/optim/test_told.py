"""Fifteen hyperparameters that differ when a run continues: each one is told, refused, or declared; none changes in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LearningRate, SequenceLength, Warmup
from cadenza.errors import CheckpointMismatchError
from cadenza.testing import tiny_trainer

DATA = TensorDataset(torch.arange(24.0).unsqueeze(1) / 24, torch.ones(24, 1))
Arguments = dict[str, Any]


def optimizer(**options: Any) -> Arguments:
    return {"optimizer": lambda parameters: RMSprop(parameters, **{"lr": 0.1, **options})}


def loader(batch_size: int = 4, **options: Any) -> Arguments:
    return {"loader": DataLoader(DATA, batch_size, **options)}


def callbacks(*given: Callable[[], Any]) -> Arguments:
    return {"callbacks": [one() for one in given]}


CHANGED: dict[str, tuple[Arguments | Callable[[], Arguments], Arguments | Callable[[], Arguments], str]] = {
    "lr": (optimizer(), optimizer(lr=0.2), "lr: saved 0.1, now 0.2"),
    "weight_decay": (optimizer(), optimizer(weight_decay=0.1), "weight_decay: saved 0, now 0.1"),
    "alpha": (optimizer(), optimizer(alpha=0.5), "alpha: saved 0.99, now 0.5"),
    "batch_size": (loader(), loader(8), "batch_size: saved 4, now 8"),
    "shuffle": (loader(), loader(shuffle=True), "shuffle: saved False, now True"),
    "accumulate": ({"accumulate": 1}, {"accumulate": {0: 1, "5 steps": 2}}, "accumulate: saved 1, now {'0': 1, '5 steps': 2}"),
    "precision": ({}, {"precision": "bf16"}, "precision: saved fp32, now bf16"),
    "seed": ({"seed": 1}, {"seed": 2}, "seed: saved 1, now 2"),
    "gamma": (
        lambda: callbacks(lambda: LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5))),
        lambda: callbacks(lambda: LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.9))),
        "gamma of LearningRate: saved 0.5, now 0.9",
    ),
    "scheduler": (
        lambda: callbacks(lambda: LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5))),
        lambda: callbacks(lambda: LearningRate(lambda optimizer: CosineAnnealingLR(optimizer, 9))),
        "scheduler of LearningRate: saved ExponentialLR, now CosineAnnealingLR",
    ),
    "max_norm": (
        lambda: callbacks(lambda: ClipGradients(max_norm=1.0)),
        lambda: callbacks(lambda: ClipGradients(max_norm=0.5)),
        "max_norm of ClipGradients: saved 1.0, now 0.5",
    ),
    "decay": (
        lambda: callbacks(lambda: Ema(0.9)),
        lambda: callbacks(lambda: Ema(0.99)),
        "decay of Ema: saved 0.9, now 0.99",
    ),
    "warm-up": (
        lambda: callbacks(lambda: Warmup("2 steps")),
        lambda: callbacks(lambda: Warmup("4 steps")),
        "length of Warmup: saved 2 steps, now 4 steps",
    ),
    "patience": (
        lambda: callbacks(lambda: Evaluate(DataLoader(DATA, 12)), lambda: EarlyStopping("eval/loss", "min", patience=3)),
        lambda: callbacks(lambda: Evaluate(DataLoader(DATA, 12)), lambda: EarlyStopping("eval/loss", "min", patience=5)),
        "patience of EarlyStopping: saved 3, now 5",
    ),
    "lengths": (
        lambda: callbacks(lambda: SequenceLength(1)),
        lambda: callbacks(lambda: SequenceLength({0: 1, "5 steps": 2})),
        "lengths of SequenceLength: saved 1, now ",
    ),
    "max_epochs": ({"epochs": 1}, {"epochs": 3}, "max_epochs: saved 1, now 3"),
}


REFUSED = ("batch_size", "shuffle", "accumulate", "precision", "seed", "scheduler of LearningRate")


def fit(directory: Path, given: Arguments | Callable[[], Arguments], steps: int) -> Any:
    arguments = given() if callable(given) else given
    options: Arguments = {"seed": 1, "epochs": 4, **optimizer(), **loader(), **arguments}
    options["callbacks"] = [*options.get("callbacks", ()), Checkpoint("1 step")]
    return tiny_trainer(directory=directory, steps=steps, **options).fit(resume="auto")


@pytest.mark.parametrize(("before", "after", "said"), CHANGED.values(), ids=CHANGED.keys())
def test_a_changed_hyperparameter_is_told_with_both_values_or_refused(
    before: Any, after: Any, said: str, tmp_path: Path
) -> None:
    pattern = re.escape(said)
    refused = said.partition(":")[0] in REFUSED
    fit(tmp_path, before, 3)
    if refused:
        with pytest.raises(CheckpointMismatchError, match=pattern):
            fit(tmp_path, after, 5)
        return
    run = fit(tmp_path, after, 5)
    told = [one for one in run.decisions if one.what in ("setting differs", "limit changed")]
    assert [one for one in told if re.search(pattern, one.why)]
    assert all({"setting", "saved", "now", "used"} <= {*one.data} for one in told)


def test_nothing_is_told_when_nothing_differs(tmp_path: Path) -> None:
    for given in (before for before, _, _ in CHANGED.values()):
        directory = tmp_path / str(id(given))
        fit(directory, given, 3)
        run = fit(directory, given, 5)
        assert [one.data["setting"] for one in run.decisions if one.what == "setting differs"] == []

"""Every callback that comes with Cadenza meets the requirements of `check_callback`: one instance serves many runs, for one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest
import torch
from optuna.trial import FixedTrial
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, MultiStepLR, ReduceLROnPlateau

from cadenza import callbacks as shipped
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import Recorder, check_callback, tiny_loader
from tests.callbacks.parts import SHIPPED

NUMBERS = count()


def multi_step(optimizer: Optimizer) -> MultiStepLR:  # its state has whole numbers for keys
    return MultiStepLR(optimizer, [2, 4], gamma=0.5)


FACTORIES: dict[str, list[Callable[[], BaseCallback]]] = {
    "Alert": [lambda: shipped.Alert("eval/loss rises 2 times"), lambda: shipped.Alert("no record for 10 h")],
    "BestWeights": [lambda: shipped.BestWeights("eval/loss", "min"), lambda: shipped.BestWeights("eval/loss", "max")],
    "Capsule": [shipped.Capsule, lambda: shipped.Capsule(last=1, when=shipped.NonFinite(), weights="2 steps", most=1)],
    "Checkpoint": [lambda: shipped.Checkpoint("4 steps", keep_last=1, keep_best=("eval/loss", "min"))],
    "ClipGradients": [
        lambda: shipped.ClipGradients(0.1, parameters=["weight"], log="norm", log_every="1 step"),
        lambda: shipped.ClipGradients(max_value=0.1),
    ],
    "ConfusionMatrix": [lambda: shipped.ConfusionMatrix(evaluation="another")],
    "ConvertSyncBatchNorm": [shipped.ConvertSyncBatchNorm],
    "Derive": [lambda: shipped.Derive(**{f"value{next(NUMBERS)}": lambda run: run.progress.step})],
    "DeviceStats": [lambda: shipped.DeviceStats("2 steps"), lambda: shipped.DeviceStats("2 steps", machine=True)],
    "EarlyStopping": [
        lambda: shipped.EarlyStopping("eval/loss", mode="min", patience=3, restore_best=True, ignore_first=1),
        lambda: shipped.EarlyStopping("eval/loss", mode="max", patience=1, min_delta=0.1),
    ],
    "Ema": [lambda: shipped.Ema(0.5, name=f"average {next(NUMBERS)}", use_at_end=True)],
    "Evaluate": [lambda: shipped.Evaluate(tiny_loader(1), name=f"test{next(NUMBERS)}", when_better=("eval/loss", "min"))],
    "FindBatchSize": [lambda: shipped.FindBatchSize(lambda size: tiny_loader(8, size), start=4, max_size=4)],
    "FindLearningRate": [lambda: shipped.FindLearningRate(steps=10), lambda: shipped.FindLearningRate(steps=30, apply=True)],
    "Fingerprint": [lambda: shipped.Fingerprint("2 steps")],
    "Freeze": [lambda: shipped.Freeze("bias", until="1 epoch"), lambda: shipped.Freeze({"bias": "3 steps"})],
    "Histograms": [lambda: shipped.Histograms("2 steps", gradients=True)],
    "LearningRate": [
        lambda: shipped.LearningRate(lambda optimizer: ChainedScheduler([multi_step(optimizer)])),
        lambda: shipped.LearningRate(lambda optimizer, total: CosineAnnealingLR(optimizer, total)),
        lambda: shipped.LearningRate(multi_step, every="1 epoch"),
        lambda: shipped.LearningRate(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), monitor="eval/loss"),
    ],
    "Limit": [lambda: shipped.Limit(train=3, evaluation=1)],
    "LogTraining": [
        lambda: shipped.LogTraining(every="2 steps"),
        lambda: shipped.LogTraining(every="2 steps", throughput=("samples", "mfu"), peak_flops=1e12),
    ],
    "MoveModules": [lambda: shipped.MoveModules(nn.Linear(1, 1))],
    "OmitFrozen": [],  # tests/checkpoint/test_omit_frozen.py: it needs a model with frozen weights
    "OptunaPruning": [lambda: shipped.OptunaPruning(FixedTrial({}), "eval/loss", "min")],
    "Profile": [shipped.Profile],
    "Recover": [lambda: shipped.Recover(when=shipped.NonFinite(), then=shipped.LowerRate(0.5, "2 steps"))],
    "ReplayCheck": [lambda: shipped.ReplayCheck("2 steps")],
    "SampleImages": [
        lambda: shipped.SampleImages(every="2 steps", evaluation="eval", images=lambda *_: torch.full((2, 3, 4, 4), 0.5))
    ],
    "SavePredictions": [
        lambda: shipped.SavePredictions("a.csv", evaluation="eval", columns={"prediction": lambda batch, _: batch[0][:, 0]}),
    ],
    "SequenceLength": [lambda: shipped.SequenceLength(4), lambda: shipped.SequenceLength({0: 1, "3 steps": 2})],
    "ScheduleValue": [
        lambda: shipped.ScheduleValue(nn.Dropout(), "p", {0: 0.5, 5: 0.1}),
        lambda: shipped.ScheduleValue(cast("Any", nn.Dropout()), "p", lambda step: 1 / (step + 1), every="2 steps"),
    ],
    "SlurmRequeue": [shipped.SlurmRequeue],
    "StopOnNonFinite": [lambda: shipped.StopOnNonFinite("skip"), lambda: shipped.StopOnNonFinite("skip", gradients=True)],
    "Summary": [shipped.Summary],
    "Swa": [lambda: shipped.Swa(0.5, lr=0.05, name=f"average {next(NUMBERS)}")],
    "TimeLimit": [lambda: shipped.TimeLimit("10 h")],
    "Timer": [lambda: shipped.Timer("2 steps")],
    "Warmup": [lambda: shipped.Warmup("3 steps"), lambda: shipped.Warmup(0.5, shape="cosine")],
    "Recorder": [Recorder],
}
CASES = {f"{name}-{number}": one for name, several in FACTORIES.items() for number, one in enumerate(several)}
MEASURED = ["time/*", "*_per_s", "*/mfu", "process/*", "machine/*"]  # these differ from run to run
ALIKE = {
    *("Alert-1", "BestWeights-1", "ClipGradients-1", "DeviceStats-1", "EarlyStopping-1", "Freeze-1", "LearningRate-1"),
    *("LearningRate-2", "LogTraining-1", "ScheduleValue-1", "SequenceLength-1", "Warmup-1"),
}
"""Cases of which another one of the same callback is in the usual run."""


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.long) if one in ALIKE else one for one in CASES])
def test_a_shipped_callback_meets_the_requirements(case: str) -> None:
    # StopOnNonFinite must know before the update whether the loss is finite, and Recover before a save.
    reads = isinstance(CASES[case](), shipped.Recover | shipped.StopOnNonFinite)
    check_callback(CASES[case], ignore=MEASURED, reads=reads)


def test_no_shipped_callback_is_left_out() -> None:
    assert FACTORIES.keys() - {"Recorder"} == set(SHIPPED)

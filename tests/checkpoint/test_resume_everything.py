"""Every callback that has state, and many that have none, in one list: a run that is cut continues to the same bits."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza.callbacks
from cadenza import Callback, Trainer, supervised
from cadenza.callbacks import (
    Alert,
    BestWeights,
    Capsule,
    Checkpoint,
    ClipGradients,
    ConfusionMatrix,
    ConvertSyncBatchNorm,
    Derive,
    DeviceStats,
    EarlyStopping,
    Ema,
    Evaluate,
    Fingerprint,
    Freeze,
    Histograms,
    LearningRate,
    Limit,
    LogTraining,
    MoveModules,
    Profile,
    Recover,
    ReplayCheck,
    SampleImages,
    SavePredictions,
    ScheduleValue,
    SequenceLength,
    StopOnNonFinite,
    Summary,
    Swa,
    TimeLimit,
    Timer,
    Warmup,
)
from cadenza.testing import prove_resume
from tests.long import LONG

CLOCKS = ("*_per_s", "time/*", "process/*")
# Those that find act before the first step, and never in a run that continues; the last one acts when all is over.
ELSEWHERE = {"FindBatchSize", "FindLearningRate", "OmitFrozen", "OptunaPruning", "SlurmRequeue"}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def loader(count: int, *, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(count)
    images = torch.rand(count, 1, 4, 4, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=shuffle)


def largest(run: Any) -> Tensor:
    found: Tensor = run.outputs["predictions"].max()
    return found


def everything() -> list[Callback]:
    valid = loader(8, shuffle=False)
    return [
        Summary(),
        Freeze("1", until="3 steps"),
        MoveModules(nn.BatchNorm1d(3)),
        ConvertSyncBatchNorm(),
        Limit(evaluation=2),
        Derive(largest=largest),
        SequenceLength({0: 8, "5 steps": 16}, dim=3),
        Ema(0.9, rampup=True),
        Ema(0.5, every="2 steps", name="fast"),
        Swa(start="6 steps", every="1 step", lr=0.01, update_batch_norm=2),
        StopOnNonFinite("skip", gradients=True),
        ClipGradients(max_norm=1.0, log="train/norm", log_every="2 steps"),
        Warmup("5 steps"),
        LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)),
        ScheduleValue(lambda run: run.model[4], "p", {0: 0.1, 12: 0.3}),
        Evaluate(valid, every="2 steps"),
        Evaluate(valid, every="3 steps", name="averaged", weights="ema"),
        Evaluate(valid, every="1 step", name="better", when_better=("eval/loss", "min")),
        EarlyStopping("eval/loss", mode="min", patience=6, ignore_first=1, restore_best=True),
        BestWeights("averaged/loss", "min", restore=False),
        ConfusionMatrix(classes=3),
        SampleImages(4, every="4 steps"),
        SavePredictions("predictions-{step}.csv", evaluation="eval"),
        Histograms("4 steps", gradients=True),
        DeviceStats("4 steps"),
        LogTraining("1 step", outputs=("loss", "largest")),
        Alert("train/loss > 1"),
        Timer("3 steps"),
        TimeLimit("1 h"),
        Profile(),
        Capsule(),
        Recover(),
        ReplayCheck("3 steps"),
        Fingerprint("2 steps"),
        Checkpoint(every="2 steps", keep_best=("eval/loss", "min")),
    ]


def make(directory: Path) -> Trainer:
    return Trainer(
        network(),
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        loader(20, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=4,
        accumulate=2,
        seed=3,
        directory=directory,
        callbacks=everything(),
        device="cpu",
        progress=False,
    )


def test_all_callbacks_are_in_the_list() -> None:
    there = {type(callback).__name__ for callback in everything()}
    assert there | ELSEWHERE == set(cadenza.callbacks.__all__)


def test_a_run_with_all_callbacks_continues_to_the_same_bits() -> None:
    at = range(1, 12) if LONG else (2, 5)  # and again at steps 7 and 9
    prove_resume(make, at=at, ignore=CLOCKS, in_process=True)  # an error names the step


def test_none_of_the_names_that_are_left_out_of_the_comparison_is_more_than_a_clock(tmp_path: Path) -> None:
    names = make(tmp_path).fit().history.names
    left_out = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in CLOCKS)]
    assert 0 < len(left_out) < 2 * len(names) / 3
    assert not [name for name in left_out if name.startswith(("eval/", "averaged/", "better/"))]

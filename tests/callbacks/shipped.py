"""The callbacks and sinks of Cadenza, with what tests of all of them need: a new one is a row here.

``tests/contracts/test_complete.py`` says what a row must have, and which other files name a callback or a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from omegaconf import OmegaConf
from optuna.trial import FixedTrial
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, MultiStepLR, ReduceLROnPlateau

from cadenza import callbacks, sinks
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import tiny_loader

NUMBERS = count()


class Shipped(NamedTuple):
    """What the tests of all callbacks and sinks need of one of them."""

    cases: Sequence[Callable[[], BaseCallback]] = ()
    """Functions that make it, for `check_callback`. The first is also resumed, shown and evaluated with all others."""
    subject: str = ""
    """The arguments that may be positional, before the interval and the monitor."""
    config: str | None = "{}"
    """Arguments in YAML, for configuration files. None: an argument is an object that no file can hold."""
    ranks: str = "tests/distributed/test_everyone.py"
    """The file in which two processes use it."""
    resumes: bool = True
    """Whether it acts in a run that continues. Others act before the first step, or when all is over."""


def multi_step(optimizer: Optimizer) -> MultiStepLR:  # its state has whole numbers for keys
    return MultiStepLR(optimizer, [2, 4], gamma=0.5)


CALLBACKS: dict[str, Shipped] = {
    "Alert": Shipped(
        cases=[lambda: callbacks.Alert("eval/loss rises 2 times"), lambda: callbacks.Alert("no record for 10 h")],
        subject="rule to",
        config="{rule: train/loss > 10, to: [console]}",
        ranks="tests/callbacks/test_log_training.py",
    ),
    "BestWeights": Shipped(
        cases=[lambda: callbacks.BestWeights("eval/loss", "min"), lambda: callbacks.BestWeights("eval/loss", "max")],
        config="{monitor: [eval/loss, min]}",
    ),
    "Capsule": Shipped(
        cases=[callbacks.Capsule, lambda: callbacks.Capsule(last=1, when=callbacks.NonFinite(), weights="2 steps", most=1)],
        config="{last: 2, weights: 100 steps}",
        ranks="tests/callbacks/test_capsule.py",
    ),
    "Checkpoint": Shipped(
        cases=[lambda: callbacks.Checkpoint("4 steps", keep_last=1, keep_best=("eval/loss", "min"))],
        config="{every: 1 epoch, keep_best: [[eval/loss, min], [eval/acc, max]], directory: saved}",
        ranks="tests/checkpoint/test_retention.py",
    ),
    "ClipGradients": Shipped(
        cases=[
            lambda: callbacks.ClipGradients(0.1, parameters=["weight"], log="norm", log_every="1 step"),
            lambda: callbacks.ClipGradients(max_value=0.1),
        ],
        subject="max_norm",
        config="{max_norm: 1.0, parameters: [weight]}",
    ),
    "ConfusionMatrix": Shipped(
        cases=[lambda: callbacks.ConfusionMatrix(evaluation="another")],
        subject="labels",
        config="{labels: [cat, dog], normalize: 'true'}",
    ),
    "ConvertSyncBatchNorm": Shipped(cases=[callbacks.ConvertSyncBatchNorm]),
    "Derive": Shipped(
        cases=[lambda: callbacks.Derive(**{f"value{next(NUMBERS)}": lambda run: run.progress.step})], config=None
    ),
    "DeviceStats": Shipped(
        cases=[lambda: callbacks.DeviceStats("2 steps"), lambda: callbacks.DeviceStats("2 steps", machine=True)],
        config="{every: 20 steps, machine: true}",
    ),
    "EarlyStopping": Shipped(
        cases=[
            lambda: callbacks.EarlyStopping("eval/loss", mode="min", patience=3, restore_best=True, ignore_first=1),
            lambda: callbacks.EarlyStopping("eval/loss", mode="max", patience=1, min_delta=0.1),
        ],
        config="{monitor: eval/loss, mode: min, patience: 3, min_delta: 0.01, threshold: 0.1, restore_best: true}",
    ),
    "Ema": Shipped(
        cases=[lambda: callbacks.Ema(0.5, name=f"average {next(NUMBERS)}", use_at_end=True)],
        subject="decay",
        config="{decay: 0.99, every: 2 steps, rampup: 10}",
    ),
    "Evaluate": Shipped(
        cases=[lambda: callbacks.Evaluate(tiny_loader(1), name=f"test{next(NUMBERS)}", when_better=("eval/loss", "min"))],
        subject="loader",
        config=None,
    ),
    "FindBatchSize": Shipped(
        cases=[lambda: callbacks.FindBatchSize(lambda size: tiny_loader(8, size), start=4, max_size=4)],
        subject="make_loader",
        config=None,
        resumes=False,
    ),
    "FindLearningRate": Shipped(
        cases=[lambda: callbacks.FindLearningRate(steps=10), lambda: callbacks.FindLearningRate(steps=30, apply=True)],
        config="{start: 1.0e-6, end: 1.0, steps: 50, apply: true}",
        resumes=False,
    ),
    "Fingerprint": Shipped(
        cases=[lambda: callbacks.Fingerprint("2 steps")],
        config="{every: 100 steps}",
        ranks="tests/callbacks/test_replay_check.py",
    ),
    "Freeze": Shipped(
        cases=[lambda: callbacks.Freeze("bias", until="1 epoch"), lambda: callbacks.Freeze({"bias": "3 steps"})],
        subject="modules until",
        config="{modules: {body: 1 epoch, neck: 10 steps}}",
    ),
    "Histograms": Shipped(
        cases=[lambda: callbacks.Histograms("2 steps", gradients=True)],
        config="{every: 10 steps, parameters: [weight], gradients: true}",
    ),
    "LearningRate": Shipped(
        cases=[
            lambda: callbacks.LearningRate(lambda optimizer: ChainedScheduler([multi_step(optimizer)])),
            lambda: callbacks.LearningRate(lambda optimizer, total: CosineAnnealingLR(optimizer, total)),
            lambda: callbacks.LearningRate(multi_step, every="1 epoch"),
            lambda: callbacks.LearningRate(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), monitor="eval/loss"),
        ],
        subject="scheduler",
        config="{scheduler: SCHEDULER, monitor: [eval/loss, min]}",
    ),
    "Limit": Shipped(
        cases=[lambda: callbacks.Limit(train=3, evaluation=1)], subject="train evaluation", config="{train: 10, evaluation: 2}"
    ),
    "LogTraining": Shipped(
        cases=[
            lambda: callbacks.LogTraining(every="2 steps"),
            lambda: callbacks.LogTraining(every="2 steps", throughput=("samples", "mfu"), peak_flops=1e12),
        ],
        config="{every: 10 steps, outputs: [loss, acc]}",
    ),
    "MoveModules": Shipped(cases=[lambda: callbacks.MoveModules(nn.Linear(1, 1))], config=None),
    # Its cases need a model with frozen weights: tests/checkpoint.
    "OmitFrozen": Shipped(ranks="docs/recipes/lora.md", resumes=False),
    "OptunaPruning": Shipped(
        cases=[lambda: callbacks.OptunaPruning(FixedTrial({}), "eval/loss", "min")],
        subject="trial",
        config=None,
        ranks="tests/callbacks/test_stopping.py",
        resumes=False,
    ),
    "Profile": Shipped(cases=[callbacks.Profile], config="{window: [2, 5], trace: false}"),
    "Recover": Shipped(
        cases=[lambda: callbacks.Recover(when=callbacks.NonFinite(), then=callbacks.LowerRate(0.5, "2 steps"))],
        config="{back: 20 steps, skip: the guilty batch, times: 2}",
        ranks="tests/callbacks/test_recover.py",
    ),
    "ReplayCheck": Shipped(
        cases=[lambda: callbacks.ReplayCheck("2 steps")],
        config="{every: 100 steps, action: warn}",
        ranks="tests/distributed/test_time_travel.py",
    ),
    "SampleImages": Shipped(
        cases=[
            lambda: callbacks.SampleImages(every="2 steps", evaluation="eval", images=lambda *_: torch.full((2, 3, 4, 4), 0.5))
        ],
        subject="count",
        config="{count: 4, every: 1 epoch, mean: [0.5, 0.5, 0.5], std: 0.5}",
    ),
    "SavePredictions": Shipped(
        cases=[
            lambda: callbacks.SavePredictions(
                "a.csv", evaluation="eval", columns={"prediction": lambda batch, _: batch[0][:, 0]}
            ),
        ],
        subject="path",
        config="{path: predictions.csv, evaluation: test}",
    ),
    "ScheduleValue": Shipped(
        cases=[
            lambda: callbacks.ScheduleValue(nn.Dropout(), "p", {0: 0.5, 5: 0.1}),
            lambda: callbacks.ScheduleValue(cast("Any", nn.Dropout()), "p", lambda step: 1 / (step + 1), every="2 steps"),
        ],
        subject="target key schedule",
        config=None,
    ),
    "SequenceLength": Shipped(
        cases=[lambda: callbacks.SequenceLength(4), lambda: callbacks.SequenceLength({0: 1, "3 steps": 2})],
        subject="lengths keys",
        config="{lengths: {0: 128, 1000 steps: 512}}",
        ranks="tests/callbacks/test_schedules.py",
    ),
    "SlurmRequeue": Shipped(
        cases=[callbacks.SlurmRequeue], subject="command", ranks="tests/alone/test_preempted_ranks.py", resumes=False
    ),
    "StopOnNonFinite": Shipped(
        cases=[lambda: callbacks.StopOnNonFinite("skip"), lambda: callbacks.StopOnNonFinite("skip", gradients=True)],
        subject="action",
        config="{action: skip}",
    ),
    "Summary": Shipped(cases=[callbacks.Summary], subject="depth", config="{depth: 2}"),
    "Swa": Shipped(
        cases=[lambda: callbacks.Swa(0.5, lr=0.05, name=f"average {next(NUMBERS)}")],
        subject="start",
        config="{start: 0.5, lr: 0.01}",
    ),
    "TimeLimit": Shipped(cases=[lambda: callbacks.TimeLimit("10 h")], subject="duration", config="{duration: 2 h}"),
    "Timer": Shipped(cases=[lambda: callbacks.Timer("2 steps")]),
    "Warmup": Shipped(
        cases=[lambda: callbacks.Warmup("3 steps"), lambda: callbacks.Warmup(0.5, shape="cosine")],
        subject="length",
        config="{length: 100 steps, shape: linear}",
    ),
}

FILES = "tests/distributed/test_records.py"
SINKS: dict[str, Shipped] = {
    "Comet": Shipped(ranks=FILES, subject="project", config="{project: circle, mode: offline}"),
    "Console": Shipped(ranks=FILES),
    "Csv": Shipped(ranks=FILES, subject="path", config="{path: metrics.csv}"),
    "Dvclive": Shipped(ranks=FILES, subject="directory", config="{directory: live}"),
    "JsonLines": Shipped(ranks=FILES, subject="path", config="{path: metrics.jsonl}"),
    "Mlflow": Shipped(ranks=FILES, subject="tracking_uri"),
    "ProgressBar": Shipped(ranks=FILES, subject="renderer", config="{renderer: plain}"),
    "Sink": Shipped(ranks="tests/sinks/test_outages.py", config=None),
    "Swanlab": Shipped(ranks=FILES, subject="project", config="{project: circle}"),
    "TensorBoard": Shipped(ranks=FILES, subject="directory"),
    "Trackio": Shipped(ranks=FILES, subject="project", config="{project: circle}"),
    "Wandb": Shipped(ranks=FILES, subject="project", config="{project: circle, mode: offline}"),
}


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a row that a configuration file holds."""
    row = (CALLBACKS | SINKS)[name]
    given: Any = OmegaConf.to_container(OmegaConf.create(row.config or "{}"))
    return dict(given)


def made(name: str) -> BaseCallback:
    """Return an instance: the first case, or one with the arguments of the configuration."""
    row = (CALLBACKS | SINKS)[name]
    kind = getattr(callbacks if name in CALLBACKS else sinks, name)
    return row.cases[0]() if row.cases else kind(**arguments(name))

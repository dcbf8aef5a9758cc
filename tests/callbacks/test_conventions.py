"""The arguments of all callbacks and sinks follow one convention: the same name, the same position, the same meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy
import optuna
import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

from cadenza import callbacks, sinks
from cadenza.callbacks import (
    BestWeights,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    FindBatchSize,
    FindLearningRate,
    LearningRate,
    Limit,
    SampleImages,
    Summary,
    Swa,
    TimeLimit,
)
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer

PUBLIC: dict[str, Any] = {name: getattr(module, name) for module in (callbacks, sinks) for name in module.__all__}
SUBJECTS = {  # what stands before the interval or the monitor, because the callback is about it
    "Alert": ["rule", "to"],
    "ClipGradients": ["max_norm"],
    "Comet": ["project"],
    "ConfusionMatrix": ["labels"],
    "Csv": ["path"],
    "Dvclive": ["directory"],
    "Ema": ["decay"],
    "Evaluate": ["loader"],
    "FindBatchSize": ["make_loader"],
    "Freeze": ["modules", "until"],
    "JsonLines": ["path"],
    "LearningRate": ["scheduler"],
    "Limit": ["train", "evaluation"],
    "Mlflow": ["tracking_uri"],
    "OmitFrozen": [],
    "OptunaPruning": ["trial"],
    "ProgressBar": ["renderer"],
    "SampleImages": ["count"],
    "SavePredictions": ["path"],
    "ScheduleValue": ["target", "key", "schedule"],
    "SequenceLength": ["lengths", "keys"],
    "SlurmRequeue": ["command"],
    "StopOnNonFinite": ["action"],
    "Summary": ["depth"],
    "Swa": ["start"],
    "Swanlab": ["project"],
    "TensorBoard": ["directory"],
    "TimeLimit": ["duration"],
    "Trackio": ["project"],
    "Wandb": ["project"],
    "Warmup": ["length"],
}
MEANINGS = {  # an argument, and the callbacks that have it: another meaning needs another name
    "name": {"Alert", "EarlyStopping", "Ema", "Evaluate", "OptunaPruning", "Swa"},  # tells it apart from others of its class
    "log": {"ClipGradients", "ConfusionMatrix", "SampleImages"},  # the name in the records
    "limit": {"Evaluate"},  # at most this many batches
    "warmup": set[str](),  # of a learning rate; `Warmup` is that
    "run_name": {"Comet", "Mlflow", "Swanlab", "Trackio", "Wandb"},  # the run's name in a tracker
}


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(PUBLIC[name]).parameters.values())


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_only_the_subject_the_interval_and_the_monitor_are_positional(name: str) -> None:
    positional = [one.name for one in parameters(name) if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = {one.name for one in parameters(name)}
    shared = ["every"] * ("every" in names) + ["monitor", "mode"] * ("monitor" in names)
    assert positional == SUBJECTS.get(name, []) + shared


@pytest.mark.parametrize("argument", MEANINGS)
def test_an_argument_has_one_meaning(argument: str) -> None:
    assert {name for name in PUBLIC if argument in {one.name for one in parameters(name)}} == MEANINGS[argument]


@pytest.mark.parametrize(
    "make",
    [
        lambda monitor, *mode: BestWeights(monitor, *mode).monitor,
        lambda monitor, *mode: EarlyStopping(monitor, *mode).monitor,
        lambda monitor, *mode: LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer), monitor, *mode).monitor,
    ],
)
def test_a_monitor_is_a_name_and_a_mode_or_a_pair(make: Callable[..., Any]) -> None:
    for monitor in (make("eval/loss", "min"), make(("eval/loss", "min")), make(("eval/loss", "min"), "min")):
        assert (monitor.name, monitor.mode) == ("eval/loss", "min")
    with pytest.raises(ValueError, match=r"monitor=\('eval/loss', 'min'\) and mode='max' contradict each other"):
        make(("eval/loss", "min"), "max")


def test_an_interval_may_stand_after_the_subject() -> None:
    run = tiny_run(callbacks=[Evaluate(tiny_loader(), 2)], steps=5)
    assert [step for step, _ in run.history["eval/loss"]] == [2, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestWeights("eval/loss", "min"),
        lambda: EarlyStopping("eval/loss", "min", patience=3),
        lambda: LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), "eval/loss"),
        lambda: callbacks.OptunaPruning(optuna.create_study().ask(), "eval/loss"),
    ],
)
def test_an_evaluation_on_request_does_not_count(make: Callable[[], Any]) -> None:
    callback = make()
    trainer = tiny_trainer(callbacks=[Evaluate(tiny_loader(1)), callback], epochs=2)
    trainer.evaluate(tiny_loader(1))  # before any fit
    run = trainer.fit()
    before = callback.state_dict()
    trainer.evaluate(tiny_loader(1), compute=lambda model, batch: {"predictions": 1})
    trainer.evaluate(tiny_loader(1))
    assert same(callback.state_dict(), before)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1
    if isinstance(callback, callbacks.OptunaPruning):
        assert len(callback.trial.study.trials[0].intermediate_values) == 2


OLD: list[tuple[str, Callable[..., Any], dict[str, Any], str, Any]] = [
    ("EarlyStopping", EarlyStopping, {"monitor": "eval/loss", "mode": "min", "warmup": 2}, "ignore_first", 2),
    ("Ema", Ema, {"warmup": 20}, "rampup", 20),
    ("TimeLimit", TimeLimit, {"limit": "2 h"}, "duration", "2 h"),
    ("FindBatchSize", callbacks.FindBatchSize, {"make_loader": tiny_loader, "limit": 4}, "max_size", 4),
    ("ConfusionMatrix", callbacks.ConfusionMatrix, {"classes": 2, "name": "mixed"}, "log", "mixed"),
    ("SampleImages", callbacks.SampleImages, {"name": "seen"}, "log", "seen"),
    ("ClipGradients", ClipGradients, {"max_norm": 1.0, "log": "norm", "every": 7}, "log_every", 7),
]


@pytest.mark.parametrize(("name", "kind", "arguments", "new", "value"), OLD, ids=[one[0] for one in OLD])
def test_an_old_name_works_for_one_release_with_a_warning(
    name: str, kind: Callable[..., Any], arguments: dict[str, Any], new: str, value: Any
) -> None:
    old = next(one for one in arguments if arguments[one] == value)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{name}({old}=...) is deprecated: use {new}=")) as caught:
        made = kind(**arguments)
    assert caught[0].filename == __file__
    modern = kind(**{new if one == old else one: it for one, it in arguments.items()})
    assert {one: repr(it) for one, it in vars(made).items() if type(it) in (int, str, float)} == {
        one: repr(it) for one, it in vars(modern).items() if type(it) in (int, str, float)
    }
    with pytest.raises(TypeError, match=rf"{name} got {new}= and {old}=, its old name"):
        kind(**arguments, **{new: value})


WHOLE: list[tuple[Callable[[Any], object], str]] = [
    (lambda number: EarlyStopping("eval/acc", "max", patience=number), "patience"),
    (lambda number: Evaluate(tiny_loader(), sanity_batches=number), "sanity_batches"),
    (lambda number: FindBatchSize(tiny_loader, start=number), "start"),
    (lambda number: FindLearningRate(steps=number), "steps"),
    (lambda number: Limit(train=number), "train"),
    (lambda number: SampleImages(number), "count"),
    (lambda number: Summary(number), "depth"),
    (lambda number: Swa(lr=0.1, anneal_steps=number), "anneal_steps"),
]


@pytest.mark.parametrize(("make", "argument"), WHOLE, ids=lambda part: part if isinstance(part, str) else "")
def test_whole_numbers_may_be_those_of_numpy_and_not_booleans_or_floats(make: Callable[[Any], object], argument: str) -> None:
    assert type(getattr(make(numpy.int64(12)), argument)) is int
    for wrong in (True, 12.0, -1):
        with pytest.raises(ValueError, match=rf"^{argument} must be .*whole number of at least \d+; got {wrong!r}$"):
            make(wrong)

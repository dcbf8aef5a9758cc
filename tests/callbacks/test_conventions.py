"""The arguments of all callbacks and sinks follow one convention, and those that no callback can use are refused early."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import optuna
import pytest
import torch
from optuna.trial import FixedTrial
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from cadenza import Callback, SingleDriver, callbacks, sinks
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, LearningRate, LowerRate, NonFinite, Spike
from cadenza.errors import CallbackError, DirectoryError, MissingExtraError, MonitorError, OutputError, ScheduleError
from cadenza.status.encoding import same
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import halving
from tests.callbacks.shipped import CALLBACKS, SINKS

shipped: Any = callbacks  # untyped: some arguments are wrong on purpose
PUBLIC: dict[str, Any] = {
    **{name: getattr(callbacks, name) for name in CALLBACKS},
    **{name: getattr(sinks, name) for name in SINKS},
}
MEANINGS = {  # an argument, and the callbacks that have it: another meaning needs another name
    "name": {"Alert", "EarlyStopping", "Ema", "Evaluate", "OptunaPruning", "Swa"},  # tells it apart from others of its class
    "log": {"ClipGradients", "ConfusionMatrix", "SampleImages"},  # the name in the records
    "limit": {"Evaluate"},  # at most this many batches
    "warmup": set[str](),  # of a learning rate; `Warmup` is that
    "run_name": {"Comet", "Mlflow", "Swanlab", "Trackio", "Wandb"},  # the run's name in a tracker
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_only_the_subject_the_interval_and_the_monitor_are_positional(name: str) -> None:
    parameters = inspect.signature(PUBLIC[name]).parameters
    positional = [one.name for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    shared = ["every"] * ("every" in parameters) + ["monitor", "mode"] * ("monitor" in parameters)
    assert positional == (CALLBACKS | SINKS)[name].subject.split() + shared


@pytest.mark.parametrize("argument", MEANINGS)
def test_an_argument_has_one_meaning(argument: str) -> None:
    assert {name for name in PUBLIC if argument in inspect.signature(PUBLIC[name]).parameters} == MEANINGS[argument]


@pytest.mark.parametrize(
    "make",
    [
        lambda monitor, *mode: BestWeights(monitor, *mode).monitor,
        lambda monitor, *mode: EarlyStopping(monitor, *mode).monitor,
        lambda monitor, *mode: LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer), "1 step", monitor, *mode).monitor,
    ],
)
def test_a_monitor_is_a_name_and_a_mode_or_a_pair(make: Callable[..., Any]) -> None:
    for monitor in (make("eval/loss", "min"), make(("eval/loss", "min")), make(("eval/loss", "min"), "min")):
        assert (monitor.name, monitor.mode) == ("eval/loss", "min")
    with pytest.raises(ValueError, match=r"monitor=\('eval/loss', 'min'\) and mode='max' contradict each other"):
        make(("eval/loss", "min"), "max")


def test_an_interval_may_stand_after_the_subject() -> None:
    assert [step for step, _ in tiny_run(callbacks=[Evaluate(tiny_loader(), 2)], steps=5).history["eval/loss"]] == [2, 4]


def trial(*directions: Any) -> Any:
    return optuna.create_study(directions=[*directions] or ["minimize"]).ask()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestWeights("eval/loss", "min"),
        lambda: EarlyStopping("eval/loss", "min", patience=3),
        lambda: LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), monitor="eval/loss"),
        lambda: shipped.OptunaPruning(trial(), "eval/loss"),
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


@pytest.mark.parametrize(
    ("name", "arguments", "new", "value"),
    [
        ("EarlyStopping", {"monitor": "eval/loss", "mode": "min", "warmup": 2}, "ignore_first", 2),
        ("Ema", {"warmup": 20}, "rampup", 20),
        ("TimeLimit", {"limit": "2 h"}, "duration", "2 h"),
        ("FindBatchSize", {"make_loader": tiny_loader, "limit": 4}, "max_size", 4),
        ("ConfusionMatrix", {"classes": 2, "name": "mixed"}, "log", "mixed"),
        ("SampleImages", {"name": "seen"}, "log", "seen"),
        ("ClipGradients", {"max_norm": 1.0, "log": "norm", "every": 7}, "log_every", 7),
    ],
)
def test_an_old_name_works_for_one_release_with_a_warning(name: str, arguments: dict[str, Any], new: str, value: Any) -> None:
    kind = PUBLIC[name]
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


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda number: EarlyStopping("eval/acc", "max", patience=number), "patience"),
        (lambda number: Evaluate(tiny_loader(), sanity_batches=number), "sanity_batches"),
        (lambda number: shipped.FindBatchSize(tiny_loader, start=number), "start"),
        (lambda number: shipped.FindLearningRate(steps=number), "steps"),
        (lambda number: shipped.Limit(train=number), "train"),
        (lambda number: shipped.SampleImages(number), "count"),
        (lambda number: shipped.Summary(number), "depth"),
        (lambda number: shipped.Swa(lr=0.1, anneal_steps=number), "anneal_steps"),
    ],
)
def test_whole_numbers_may_be_those_of_numpy_and_not_booleans_or_floats(make: Callable[[Any], object], argument: str) -> None:
    assert type(getattr(make(numpy.int64(12)), argument)) is int
    for wrong in (True, 12.0, -1):
        with pytest.raises(ValueError, match=rf"^{argument} must be .*whole number of at least \d+; got {wrong!r}$"):
            make(wrong)


# -- wrong arguments when it is made ------------------------------------------------------------------


def rows(make: Callable[[Any], object], wrong: Iterable[Any], message: str) -> list[tuple[Callable[[], object], str]]:
    """Return a row for each value that is wrong for the same reason."""
    return [(partial(make, value), message) for value in wrong]


KEEP_LAST = "keep_last must be a whole number of at least 1, or None to keep all; got"
PAIRS: list[Any] = ["eval/acc", [("eval/acc",)], [["eval/acc", "max", 1]]]
RAMPUP = "rampup must be True, False or a whole number of at least 2; got"
WITHOUT_STEPS: list[Any] = ["1 epoch", "0.5 epoch", "100 samples", "1 min", lambda run: True]
PATTERN = r"must be a pattern such as 'encoder\.\*', a sequence of patterns, or a function"
FORMATS = r"needs a path ending in \.parquet, \.csv or \.jsonl; got 'a\.txt', with the suffix '\.txt'"
DURATION = r'duration must be a time such as "90 s", "30 min" or "2 h"; got \'5 steps\''
GRADIENTS = r'needs an interval in steps, such as "500 steps"; got .*use a second Histograms'

MADE: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    ValueError: [
        (lambda: shipped.Alert("loss explodes"), r"the rule 'loss explodes' cannot be read. Use one of: \"train/loss > 10\""),
        (lambda: shipped.Alert("x rises 0 times"), "needs a number of at least 1; got 0"),
        (lambda: shipped.Alert("no record for 10 steps"), r'needs a time such as "90 s", "10 min" or "2 h"; got \'10 steps\''),
        (lambda: shipped.Alert("non-finite", to=[]), "at least one target; got none"),
        (lambda: shipped.Alert("non-finite", level="warn"), r"got 'warn'. Did you mean 'warning'"),
        (lambda: shipped.BestWeights("acc"), r"BestWeights needs mode='min' or mode='max'.*BestWeights\('acc', 'min'\)"),
        (lambda: shipped.Capsule(last=0), "last must be a whole number"),
        (lambda: shipped.Capsule(weights="1 epoch"), "weights must be a number of steps"),
        *rows(lambda wrong: shipped.Checkpoint(keep_last=wrong), (0, -1, 1.5), KEEP_LAST),
        *rows(lambda wrong: shipped.Checkpoint(keep_best=wrong), PAIRS, "keep_best must be a pair"),
        (lambda: shipped.ClipGradients(), "expected max_norm or max_value, not both; got max_norm="),
        (lambda: shipped.ClipGradients(1.0, max_value=1.0), "expected max_norm or max_value, not both; got max_norm="),
        (lambda: shipped.ClipGradients(0), "max_norm must be greater than 0; got 0"),
        (lambda: shipped.ClipGradients(1.0, norm_type=-1), "norm_type must be greater than 0; got -1"),
        (lambda: shipped.ConfusionMatrix(normalize="rows"),
         "normalize must be None or one of 'true', 'pred', 'all'; got 'rows'"),
        (lambda: shipped.ConfusionMatrix(["a", "b"], classes=3), "got 2 for classes=3"),
        (lambda: shipped.ConfusionMatrix(["a"]), "the number of classes must be None or a whole number of at least 2; got 1"),
        (lambda: shipped.EarlyStopping("acc"), r"EarlyStopping needs mode='min' or mode='max'.*EarlyStopping\('acc', 'min'\)"),
        (lambda: shipped.EarlyStopping("x", "min", patience=0), "patience must be a whole number of at least 1; got 0"),
        (lambda: shipped.EarlyStopping("x", "min", patience=1.5), r"patience must be a whole number of at least 1; got 1\.5"),
        (lambda: shipped.EarlyStopping("x", "min", ignore_first=-1),
         "ignore_first must be a whole number of at least 0; got -1"),
        (lambda: shipped.EarlyStopping("x", "min", min_delta=-0.1), r"min_delta must be 0 or more; got -0\.1"),
        (lambda: shipped.EarlyStopping("x", "min", min_delta=math.nan), "min_delta must be 0 or more; got nan"),
        (lambda: shipped.EarlyStopping("x", "min", threshold=1.0, diverged=0.5),
         r"diverged must be worse than threshold=1\.0; got 0\.5"),
        *rows(lambda wrong: shipped.Ema(wrong), (-0.1, 1.0, 2.0), "decay must be at least 0 and less than 1; got"),
        *rows(lambda wrong: shipped.Ema(rampup=wrong), (1, -3, 0, 2.5), RAMPUP),
        (lambda: shipped.Ema(name=""), "Ema: name must be a text such as 'ema'; got ''"),
        (lambda: shipped.FindBatchSize(tiny_loader, start=0), "start must be a whole number of at least 1; got 0"),
        (lambda: shipped.FindBatchSize(tiny_loader, max_size=2.5),
         r"max_size must be None or a whole number of at least 1; got 2\.5"),
        (lambda: shipped.FindBatchSize(tiny_loader, start=8, max_size=4), "max_size must be at least start, 8; got 4"),
        (lambda: shipped.FindLearningRate(start=0.0),
         r"start must be greater than 0 and less than end; got start=0\.0, end=10"),
        (lambda: shipped.FindLearningRate(start=1.0, end=0.1), "less than end"),
        (lambda: shipped.FindLearningRate(steps=5), "steps must be a whole number of at least 10"),
        (lambda: shipped.Histograms(weights=False), "nothing to log"),
        (lambda: shipped.LearningRate(halving, every="batch"), "every must be '1 step' or '1 epoch'; got 'batch'"),
        (lambda: shipped.LearningRate(ReduceLROnPlateau, mode="min"), "LearningRate: mode='min' needs monitor="),
        (lambda: shipped.LearningRate(halving, stretch=True), r"expected a function \(optimizer, total\) -> scheduler"),
        (lambda: shipped.LearningRate(ReduceLROnPlateau, monitor=("eval/acc", "most")), "mode must be 'min' or 'max'"),
        *rows(lambda wrong: shipped.Limit(train=wrong), (0, 1.5), "train must be None or a whole number of at least 1; got"),
        (lambda: shipped.Limit(evaluation=-1), "evaluation must be None or a whole number of at least 1; got"),
        (lambda: shipped.LogTraining(throughput=("token",)), r"throughput has no 'token'; expected .* Did you mean 'tokens'\?"),
        (lambda: shipped.LogTraining(peak_flops=0), "peak_flops must be above 0; got 0"),
        (lambda: shipped.LogTraining(flops=math.nan), "flops must be above 0; got nan"),
        (lambda: LowerRate(2.0, 10), "factor must be above 0"),
        (lambda: shipped.OptunaPruning(FixedTrial({}), "x"), "OptunaPruning needs mode='min' or mode='max'"),
        (lambda: shipped.OptunaPruning(trial(), "x", per="batch"), "per must be 'step' or 'epoch'"),
        (lambda: shipped.OptunaPruning(trial(), "x", "max"),
         r"mode='max' contradicts the study, which wants the minimum.*direction='maximize'"),
        (lambda: shipped.OptunaPruning(trial(), ("x", "max")), "contradicts the study"),
        (lambda: shipped.OptunaPruning(trial("minimize", "maximize"), "x"),
         "one objective, because Optuna does not prune studies with several; got 2"),
        *rows(lambda wrong: shipped.Profile(window=wrong), ((0, 0), 5), "window must be"),
        (lambda: shipped.Profile(trace=3), "trace must be"),
        (lambda: shipped.Profile(torch_profiler={"actve": 3}), "torch_profiler takes .*'actve'"),
        (lambda: shipped.Recover(skip=None), "skip=None repeats the same steps"),
        (lambda: shipped.Recover(skip="all"), "skip must be"),
        (lambda: shipped.Recover(back="1 epoch"), "back must be a number of steps"),
        (lambda: shipped.Recover(times=0), "times must be"),
        (lambda: shipped.ReplayCheck(action="stop"), "action must be one of 'raise', 'warn', 'majority'; got 'stop'"),
        (lambda: shipped.SampleImages(0), "count must be a whole number of at least 1; got 0"),
        (lambda: shipped.SampleImages(mean=0.5), r"expected both mean and std, or none; got mean=0\.5 and std=None"),
        (lambda: shipped.SavePredictions("a.txt"), FORMATS),
        (lambda: shipped.SavePredictions("{batch}.csv"), r"may have the fields {epoch} and {step}; got {batch}"),
        (lambda: shipped.SavePredictions("{epoch.csv"), r"cannot be parsed: .*Double a brace that is not part of a field"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {}), "schedule must hold at least one value"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {-1: 1.0}), "whole number of at least 0; got -1"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {0.5: 1.0}),
         r"each key of schedule, a step, must be a whole number of at least 0; got 0\.5"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {0: 1.0}, between="cubic"),
         "between must be 'linear' or 'hold'; got 'cubic'"),
        (lambda: shipped.SequenceLength({0: 0}), r"lengths\[0\] must be at least 1"),
        (lambda: shipped.SequenceLength({0: 1, "3 stps": 2}), "Did you mean 'steps'"),
        (lambda: shipped.SequenceLength({"3 steps": 2}), "the length at the start"),
        (lambda: shipped.StopOnNonFinite("ignore"), "action must be 'stop', 'raise' or 'skip'; got 'ignore'"),
        (lambda: Spike(ratio=1.0), "ratio must be above 1"),
        (lambda: shipped.Summary(-1), "depth must be None or a whole number of at least 0; got -1"),
        (lambda: shipped.Swa(1.0), "start must be at least 0 and less than 1 as a fraction of the run; got 1.0"),
        (lambda: shipped.Swa(-0.5), "start must be at least 0"),
        (lambda: shipped.Swa(lr=0.0), "lr must be greater than 0, or None to leave the rates alone; got 0.0"),
        (lambda: shipped.Swa(lr=0.1, anneal_steps=-1), "anneal_steps must be a whole number of at least 0; got -1"),
        (lambda: shipped.Swa(anneal_steps=3), "anneal_steps=3 needs a learning rate to anneal to; got lr=None"),
        (lambda: shipped.Swa(update_batch_norm=True),
         "update_batch_norm must be None or a whole number of at least 0; got True"),
        (lambda: shipped.TimeLimit("5 steps"), DURATION),
        (lambda: shipped.Timer().elapsed_s("trian"), r"Timer has no 'trian'; it has 'fit', 'train',.*mean 'train'\?"),
        (lambda: shipped.Warmup(500), r'length must be such as "500 steps" .*; got 500\. Did you mean "500 steps"\?'),
        *((lambda wrong=wrong: shipped.Warmup(wrong), re.escape(f"got {wrong!r}")) for wrong in (0.0, 1.5, "10 min")),
        (lambda: shipped.Warmup("5 steps", shape="square"), "shape must be 'linear', 'constant' or 'cosine'; got 'square'"),
        (lambda: shipped.Warmup("5 steps", start=2.0), r"start must be a factor from 0 to 1; got 2\.0"),
        (lambda: shipped.Warmup("5 steps", shape="constant"), "a constant warm-up with start=0 has a rate of 0"),
    ],
    ScheduleError: [
        (lambda: shipped.Alert("no record for 10 mni"), "Did you mean 'min'"),
        (lambda: shipped.ClipGradients(1.0, log="norm", log_every="5 stps"), "unknown unit 'stps'"),
        (lambda: shipped.DeviceStats("often"), "often"),
        (lambda: shipped.Evaluate(tiny_loader(), -1), "is no schedule"),
        (lambda: shipped.Fingerprint("1 epoch"), r"so Fingerprint\(every=...\) needs an interval in steps"),
        (lambda: shipped.Freeze("head", "3 epoks"), "unknown unit 'epoks'"),
        (lambda: shipped.Freeze("head", "10 min"), "no point of a run that is the same after a resume"),
        *rows(lambda wrong: shipped.Histograms(wrong, gradients=True), WITHOUT_STEPS, GRADIENTS),
        *rows(shipped.ReplayCheck, WITHOUT_STEPS, r"so ReplayCheck\(every=...\) needs an interval in steps"),
        (lambda: shipped.SampleImages(every="2 stps"), "unknown unit 'stps'"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {0: 1.0}, every="2 stps"), "unknown unit 'stps'"),
        (lambda: shipped.Swa("8 epoks"), "unknown unit 'epoks'"),
        (lambda: shipped.Swa("10 min"), "'10 min' is no point of a run that is the same after a resume"),
        (lambda: shipped.TimeLimit("12 parsecs"), "unknown unit 'parsecs'"),
        (lambda: shipped.Warmup("5 stps"), "unknown unit 'stps'"),
    ],
    TypeError: [
        (lambda: shipped.Alert(3), "a rule must be a text or a function; got 3"),
        (lambda: shipped.Alert(lambda a, b, c: None), "it takes 3 arguments"),
        (lambda: shipped.Alert("non-finite", to=["mail", "me"]), "or a function of an AlertMessage; got 'mail'"),
        (lambda: shipped.Alert("non-finite", to="file:///etc/passwd"), "a URL must begin with https:// or http://"),
        (lambda: shipped.Capsule(when=lambda loss: True), "when must be NonFinite"),
        (lambda: shipped.Capsule(when=NonFinite() | Spike), r"when must be NonFinite\(\), .*got <class '.*Spike'>"),
        (lambda: shipped.ClipGradients(1.0, parameters=3),
         r"parameters=\.\.\.\) must be a pattern such as 'encoder\.\*', .*; got 3"),
        (lambda: shipped.ConfusionMatrix("ab"), "got the text 'ab'"),
        (lambda: shipped.ConfusionMatrix(10), r"got 10\. For a number of classes write ConfusionMatrix\(classes=10\)"),
        (lambda: shipped.FindBatchSize([1], max_size=4), "make_loader must be a function"),
        (lambda: shipped.Freeze("head", 3), 'until must be a point of the run such as "3 epochs".* got 3'),
        (lambda: shipped.Freeze({"head": "1 epoch"}, "3 epochs"), "modules is a mapping, .* Leave out until='3 epochs'"),
        (lambda: shipped.Freeze(nn.Linear(1, 1)), "a function of the model such as lambda model: model.backbone; got Linear"),
        (lambda: shipped.Freeze([nn.Linear(1, 1)]), "got Linear"),
        *rows(lambda wrong: shipped.Histograms(parameters=wrong), ([], [3]), PATTERN),
        (lambda: shipped.LogTraining(throughput="tokens"),
         "throughput must be True, False or a sequence of 'steps', .*; got 'tokens'"),
        (lambda: shipped.LogTraining(outputs="loss"),
         r'outputs must be a sequence of names, such as \("loss",\); got \'loss\''),
        (lambda: shipped.MoveModules(nn.MSELoss(), torch.ones(1)),
         "MoveModules takes modules, which can be moved in place; got Tensor"),
        (lambda: shipped.MoveModules(), r"such as MoveModules\(loss\); got none"),
        (lambda: shipped.OptunaPruning(optuna.create_study(), "x"),
         "trial must be the trial that Optuna passes to the objective"),
        (lambda: shipped.Recover(then=0.5), "then must be LowerRate"),
        (lambda: shipped.SampleImages(images=0), r"images must be a function \(batch, outputs\), or None; got 0"),
        (lambda: shipped.SavePredictions("a.csv", columns={"a": 3}),
         r"columns\['a'\] must be a function \(batch, outputs\) -> values; got 3"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", 0.5),
         r"schedule must be a function of the step, or a mapping .*; got 0\.5"),
        (lambda: shipped.ScheduleValue(nn.Dropout(), "p", {0: "warm"}),
         r"between='linear' needs numbers; got 'warm' at step 0\. Use between='hold'"),
        (lambda: shipped.Swa(8), r'such as 0.75, or a point such as "8 epochs"; got 8'),
    ],
}  # fmt: skip
CASES = [(make, error, message) for error, rows in MADE.items() for make, message in rows]


@pytest.mark.parametrize(("make", "error", "message"), CASES, ids=[message for _, _, message in CASES])
def test_wrong_arguments_are_errors_at_once(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("matplotlib", "figures", lambda: shipped.ConfusionMatrix()),
        ("matplotlib", "figures", lambda: shipped.SampleImages(titles=lambda batch, outputs: [])),
        ("psutil", "stats", lambda: shipped.DeviceStats(machine=True)),
        ("pyarrow", "parquet", lambda: shipped.SavePredictions("a.parquet")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, extra: str, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*pip install 'cadenza\[{extra}\]'"):
        make()
    assert shipped.SampleImages()
    assert shipped.SavePredictions("a.csv")


# -- and before the first step ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (lambda: shipped.BestWeights("valid/acc", "max"), "BestWeights"),
        (lambda: Checkpoint(keep_best=("valid/acc", "max")), "Checkpoint"),
        (lambda: EarlyStopping("valid/acc", "max", name="mine"), "mine"),
        (lambda: LearningRate(ReduceLROnPlateau, monitor="valid/acc"), "LearningRate"),
        (lambda: shipped.OptunaPruning(trial(), "valid/acc"), "OptunaPruning"),
    ],
)
def test_a_result_that_no_evaluation_reports_is_an_error_before_the_first_step(
    callback: Callable[[], Callback], name: str, tmp_path: Path
) -> None:
    recorder = Recorder(Callback.on_step_start)
    for others in ([], [Evaluate(tiny_loader(1)), shipped.Capsule(), shipped.Recover()]):
        with pytest.raises(MonitorError, match=f"{name} watches 'valid/acc', but no evaluation will report it"):
            tiny_run(callbacks=[recorder, *others, callback()], directory=tmp_path)
    assert recorder.names == []


class TwoRanks(SingleDriver):
    world_size = 2


JUDGE = Evaluate(tiny_loader(1))
UNSIZED: dict[str, Any] = {"loader": iter(tiny_loader())}
FUNCTION = r"the optimizer and the total\) needs a run of known length: .*"
NO_WEIGHTS = r"Evaluate\(weights='emma'\) needs averaged weights, but no callback provides 'emma'; available: 'ema', 'fast'\."

SET_UP: dict[type[Exception], list[tuple[Callable[[], list[Callback]], dict[str, Any], str]]] = {
    ValueError: [
        (lambda: [shipped.Capsule()], {}, "give Trainer"),
        (lambda: [Checkpoint()], {}, r"needs a folder: give Trainer\(directory=...\) or Checkpoint\(directory=...\)"),
        (lambda: [shipped.Recover()], {}, "give Trainer"),
        (lambda: [shipped.Fingerprint()], {}, "Fingerprint writes fingerprints.jsonl to the directory of the run"),
        (lambda: [shipped.Profile(torch_profiler={})], {}, "needs a directory"),
        (lambda: [shipped.ClipGradients(1.0, parameters=["bias", "wieght"])], {},
         r"no parameter .* matches 'wieght'\. Did you mean 'weight'\? It has weight, bias"),
        (lambda: [shipped.ClipGradients(1.0, parameters=lambda name, parameter: False)], {},
         r"the function chose no parameter of the model\. It has weight, bias"),
        (lambda: [shipped.Histograms(parameters=["bias", "wieght"])], {},
         r"no parameter of the model matches 'wieght'\. Did you mean 'weight'"),
        (lambda: [shipped.LogTraining(1, throughput=("mfu",))], {},
         "needs the peak of the device, and that of 'cpu' is not known. Give .*peak_flops="),
        (lambda: [shipped.Warmup("5 steps", optimizer=1)], {}, r"Warmup: optimizer must be an index from 0 to 0; got 1"),
        (lambda: [shipped.Warmup(0.1)], UNSIZED,
         r"Warmup\(0\.1\), a fraction of the run, needs a run of known length: its loader does not"),
        (lambda: [shipped.Warmup("1 epoch")], {**UNSIZED, "steps": 3},
         r"Warmup\('1 epoch'\) needs a loader with __len__; this loader has none"),
        (lambda: [shipped.Swa()], {**UNSIZED, "epochs": 1},
         r"Swa\(start=0.75\) needs the length of the run, which is not known.* max_steps="),
        (lambda: [shipped.ScheduleValue(nn.Dropout(), "p", lambda step, total: step / total)], UNSIZED,
         "ScheduleValue with a function of the step and the total needs a run of known length"),
        (lambda: [LearningRate(lambda one, total: StepLR(one, total))], {**UNSIZED, "epochs": 2},
         FUNCTION + r" max_steps= is not"),
        (lambda: [LearningRate(lambda one, total: StepLR(one, total), every="1 epoch")], {**UNSIZED, "steps": 2},
         FUNCTION + r" max_epochs= is not"),
        (lambda: [LearningRate(halving(torch.optim.SGD(tiny_model().parameters(), 0.1)))], {},
         "scheduler of LearningRate belongs to an optimizer that this run does not have"),
        (lambda: [LearningRate(ReduceLROnPlateau)], {}, "ReduceLROnPlateau needs a result; got none"),
        (lambda: [JUDGE, LearningRate(halving, monitor="eval/loss")], {},
         "monitor= is for ReduceLROnPlateau; got a StepLR, which reads no result"),
        (lambda: [JUDGE, LearningRate(ReduceLROnPlateau, monitor=("eval/loss", "max"))], {},
         r"has mode='max', but its ReduceLROnPlateau has mode='min'\. Make both"),
        (lambda: [LearningRate(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6))], {"steps": 7},
         r"LearningRate has total_steps=6, and the run has 7 steps: torch would raise an"),
        (lambda: [shipped.StopOnNonFinite(gradients=True)], {"precision": "fp16"},
         r"in fp16 the scaler already skips .* expected StopOnNonFinite\(gradients=False"),
        (lambda: [shipped.ReplayCheck()], {"step_fn": lambda run, batch: None}, "in a step_fn only your code computes them"),
        (lambda: [shipped.FindBatchSize(tiny_loader)], {}, "FindBatchSize needs max_size= on the CPU"),
        (lambda: [shipped.FindBatchSize(tiny_loader, max_size=4)], {"driver": TwoRanks("cpu")},
         "FindBatchSize works in one process; got 2"),
        (lambda: [Ema(), Evaluate([]), Evaluate([], weights="ema")], {}, "two evaluations have the name 'eval'"),
        (lambda: [Ema(), Ema(name="fast"), Evaluate([], weights="emma")], {}, NO_WEIGHTS + r".*Did you mean 'ema'\?"),
        (lambda: [Evaluate([], weights="ema")], {}, r"no callback provides 'ema'\. Add Ema\(\.\.\.\) to callbacks\."),
        (lambda: [shipped.Freeze("*")], {}, r"nothing is left to learn: '\*' freezes every parameter of the optimizers"),
        (lambda: [shipped.ConvertSyncBatchNorm()], {"model": nn.BatchNorm1d(1), "driver": TwoRanks("cpu")},
         r"replaces layers inside a model; got a model that is one\. Wrap it"),
        (lambda: [JUDGE, shipped.OptunaPruning(None, "eval/loss")], {},
         r"needs a trial on the main process; got None.*FixedTrial"),
    ],
    TypeError: [
        (lambda: [LearningRate(cast("Any", lambda optimizer: None))], {},
         "the function of LearningRate must return a scheduler of torch, transformers or timm; got None"),
        (lambda: [LearningRate(cast("Any", StepLR))], {}, "step_size"),
        (lambda: [shipped.Freeze(lambda model: "head")], {}, "expected modules or parameters to freeze; got 'h'"),
    ],
    AttributeError: [
        (lambda: [shipped.ScheduleValue(nn.Dropout(), "pp", {0: 0.5})], {},
         r"cannot set 'pp': a Dropout has no such option\. Did you mean 'p'\?"),
        (lambda: [shipped.ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "momemtum", {0: 0.5})], {},
         r"a dict has no such option\. Did you mean 'momentum'\?"),
    ],
    CallbackError: [
        (lambda: [Ema(0.9), Ema(0.99)], {}, r"two callbacks hold weights that are called 'ema'.* such as Ema\(name='slow'\)"),
    ],
    DirectoryError: [
        (lambda: [JUDGE, shipped.SavePredictions("/proc/predictions.csv", evaluation="eval")], {},
         r"SavePredictions cannot write to .*/proc.*Give"),
    ],
}  # fmt: skip
REFUSED = [(make, arguments, error, message) for error, rows in SET_UP.items() for make, arguments, message in rows]


@pytest.mark.parametrize(("make", "arguments", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_this_run_cannot_serve_is_an_error_before_the_first_step(
    make: Callable[[], list[Callback]], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    recorder = Recorder(Callback.on_step_start)
    with pytest.raises(error, match=message):
        tiny_run(callbacks=[recorder, *make()], **arguments)
    assert recorder.names == []


def test_what_no_batch_or_evaluation_has_is_an_error_when_it_is_missed() -> None:
    with pytest.raises(ValueError, match=r"has 'tokens', but nothing counts them: return 'tokens' from compute_loss, or give"):
        tiny_run(callbacks=[shipped.LogTraining(1, throughput=("tokens",))])
    with pytest.raises(OutputError, match=r"the batch has no output 'los'; it has \['loss'\]\. Did you mean 'loss'\?"):
        tiny_run(callbacks=[shipped.LogTraining("1 step", outputs=("los",))])
    with pytest.raises(MonitorError, match=r"watches 'eval/los', but the evaluation 'eval' reported only \['eval/loss'\]"):
        tiny_run(callbacks=[JUDGE, shipped.Alert("eval/los > 1")], epochs=2)

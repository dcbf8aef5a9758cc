"""Settings that differ from those of the checkpoint: each is told or refused, and `override` takes the present ones."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import RandomSampler, WeightedRandomSampler

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, EarlyStopping, Ema, Evaluate, LearningRate, Limit, SequenceLength, Warmup
from cadenza.checkpoint.snapshot import Snapshot
from cadenza.errors import CheckpointMismatchError
from cadenza.loading import TensorBatches
from cadenza.loading.settings import loader_settings
from cadenza.testing import tiny_trainer
from tests.optim.parts import DATA, adamw, cosine, falling, fit, groups, loader, made, rate_of, sgd

Arguments = dict[str, Any]


def told(run: Run) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == "setting differs"]


# -- one of each kind ---------------------------------------------------------------------------------


def callbacks(*given: Callback) -> Arguments:
    return {"callbacks": given}


def stopping(patience: int) -> Arguments:
    return callbacks(Evaluate(loader(12)), EarlyStopping("eval/loss", "min", patience=patience))


CHANGED: dict[str, tuple[Arguments, Arguments, str]] = {
    "lr": ({}, {"optimizer": made(RMSprop, lr=0.2)}, "lr: saved 0.1, now 0.2"),
    "weight_decay": ({}, {"optimizer": made(RMSprop, weight_decay=0.1)}, "weight_decay: saved 0, now 0.1"),
    "alpha": ({}, {"optimizer": made(RMSprop, alpha=0.5)}, "alpha: saved 0.99, now 0.5"),
    "gamma": (callbacks(falling(0.5)), callbacks(falling(0.9)), "gamma of LearningRate: saved 0.5, now 0.9"),
    "max_norm": (
        callbacks(ClipGradients(max_norm=1.0)),
        callbacks(ClipGradients(max_norm=0.5)),
        "max_norm of ClipGradients: saved 1.0, now 0.5",
    ),
    "decay": (callbacks(Ema(0.9)), callbacks(Ema(0.99)), "decay of Ema: saved 0.9, now 0.99"),
    "warm-up": (callbacks(Warmup("2 steps")), callbacks(Warmup("4 steps")), "length of Warmup: saved 2 steps, now 4 steps"),
    "patience": (stopping(3), stopping(5), "patience of EarlyStopping: saved 3, now 5"),
    "lengths": (
        callbacks(SequenceLength(1)),
        callbacks(SequenceLength({0: 1, "5 steps": 2})),
        "lengths of SequenceLength: saved 1, now ",
    ),
    "max_epochs": ({"epochs": 1}, {"epochs": 3}, "max_epochs: saved 1, now 3"),
}
REFUSED: dict[str, tuple[Arguments, Arguments, str]] = {
    "accumulate": ({"accumulate": 1}, {"accumulate": {0: 1, "5 steps": 2}}, "accumulate: saved 1, now {'0': 1, '5 steps': 2}"),
    "precision": ({}, {"precision": "bf16"}, "precision: saved fp32, now bf16"),
    "seed": ({"seed": 1}, {"seed": 2}, "seed: saved 1, now 2"),
}


def trained(directory: Path, given: Arguments, steps: int) -> Run:
    options = {"epochs": 4, "optimizer": made(RMSprop), "loader": loader(), **given}
    return fit(directory, steps, *options.pop("callbacks", ()), **options)


@pytest.mark.parametrize(("before", "after", "said"), CHANGED.values(), ids=CHANGED.keys())
def test_a_changed_hyperparameter_is_told_with_both_values_and_one_that_is_not_is_not(
    before: Arguments, after: Arguments, said: str, tmp_path: Path
) -> None:
    trained(tmp_path, before, 3)
    assert told(trained(tmp_path, before, 4)) == []
    run = trained(tmp_path, after, 5)
    found = [one for one in run.decisions if one.what in ("setting differs", "limit changed")]
    assert [one for one in found if re.search(re.escape(said), one.why)]
    assert all({"setting", "saved", "now", "used"} <= {*one.data} for one in found)


@pytest.mark.parametrize(("before", "after", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_hyperparameter_that_must_not_change_is_refused_with_both_values(
    before: Arguments, after: Arguments, said: str, tmp_path: Path
) -> None:
    trained(tmp_path, before, 3)
    assert told(trained(tmp_path, before, 4)) == []
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        trained(tmp_path, after, 5)


# -- optimizers ---------------------------------------------------------------------------------------


def test_other_arguments_of_an_optimizer_are_told_and_the_saved_ones_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, 2, optimizer=adamw(weight_decay=0.1))
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = fit(tmp_path, 4, optimizer=adamw(lr=0.01, betas=(0.5, 0.9), weight_decay=0.1))
    lines = ["lr: saved 0.1, now 0.01", "betas: saved [0.9, 0.999], now [0.5, 0.9]"]
    assert told(run) == [f"{line}; the run uses the saved value" for line in lines]
    (warning,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert all(line in warning for line in lines)
    assert "override=('lr', 'betas')" in warning
    [group] = groups(run)
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))


@pytest.mark.parametrize(
    ("kind", "option", "value"), [(AdamW, "amsgrad", True), (RMSprop, "centered", True), (RMSprop, "momentum", 0.9)]
)
def test_an_option_that_needs_a_state_that_the_checkpoint_does_not_have_cannot_be_taken(
    tmp_path: Path, kind: Callable[..., Optimizer], option: str, value: float
) -> None:
    fit(tmp_path, 2, optimizer=made(kind))
    with pytest.raises(CheckpointMismatchError, match=f"{option} needs the state .* remove '{option}' from override"):
        fit(tmp_path, 4, optimizer=made(kind, **{option: value}), override=[option])
    assert fit(tmp_path, 4, optimizer=made(kind, **{option: value})).progress.step == 4


def test_sgd_makes_its_momentum_when_it_needs_it(tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=made(SGD))
    [group] = groups(fit(tmp_path, 4, optimizer=made(SGD, momentum=0.9), override=["momentum"]))
    assert group["momentum"] == 0.9


def test_the_next_checkpoint_holds_the_arguments_that_count(tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=adamw())
    fit(tmp_path, 3, optimizer=adamw(lr=0.01))
    assert told(fit(tmp_path, 4, optimizer=adamw(lr=0.01))) == ["lr: saved 0.1, now 0.01; the run uses the saved value"]
    assert told(fit(tmp_path, 5, optimizer=adamw())) == []
    taken = fit(tmp_path, 6, optimizer=adamw(lr=0.01), override=["lr"])
    assert told(taken) == ["lr: saved 0.1, now 0.01; the run uses the present value"]
    assert told(fit(tmp_path, 7, optimizer=adamw(lr=0.01))) == []


def test_override_takes_the_present_values_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, 2, optimizer=adamw())
    given = adamw(lr=0.01, weight_decay=0.5, betas=(0.5, 0.9))
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = fit(tmp_path, 4, optimizer=given, override=("lr", "betas"))
    [group] = groups(run)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.5, 0.9), 0.01)
    assert "weight_decay: saved 0.01, now 0.5" in caplog.text
    assert "lr: saved" not in caplog.text


def test_groups_and_optimizers_are_told_apart(tmp_path: Path) -> None:
    def two(rate: float) -> Callable[[list[nn.Parameter]], list[Optimizer]]:
        def make(parameters: list[nn.Parameter]) -> list[Optimizer]:
            groups: Any = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": rate}]
            return [SGD(groups, 0.1), Adam(parameters, torch.tensor(rate), capturable=False, foreach=False)]

        return make

    fit(tmp_path, 2, optimizer=two(0.2))
    run = fit(tmp_path, 4, optimizer=two(0.5), override=("lr",))
    assert [line.partition(";")[0] for line in told(run)] == [
        "lr of optimizer 0 of group 1: saved 0.2, now 0.5",
        "lr of optimizer 1: saved 0.20000000298023224, now 0.5",
    ]
    assert [float(group["lr"]) for group in groups(run)] == [0.1, 0.5, 0.5]


def test_an_optimizer_that_was_trained_with_before_has_the_arguments_it_was_made_with(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    fit(tmp_path, 2, falling(0.5), model=model, optimizer=optimizer)
    run = fit(tmp_path, 4, falling(0.5), model=model, optimizer=optimizer)
    assert told(run) == []
    assert rate_of(run) == pytest.approx(0.1 * 0.5**4)


# -- schedules ----------------------------------------------------------------------------------------


def test_other_arguments_of_a_schedule_are_told(tmp_path: Path) -> None:
    fit(tmp_path, 2, falling(0.5))
    run = fit(tmp_path, 3, falling(0.1))
    assert told(run) == ["gamma of LearningRate: saved 0.5, now 0.1; the run uses the saved value"]
    assert rate_of(run) == pytest.approx(0.1 * 0.5**3)


@pytest.mark.parametrize(("override", "expected"), [(("lr",), 0.8 * 0.5**3), (("gamma", "lr"), 0.8 * 0.1**3)])
def test_a_schedule_goes_on_as_if_it_had_had_the_present_values_from_the_start(
    override: tuple[str, ...], expected: float, tmp_path: Path
) -> None:
    gamma = 0.1 if "gamma" in override else 0.5
    fit(tmp_path, 2, falling(0.5), optimizer=sgd(0.2))
    run = fit(tmp_path, 3, falling(gamma), optimizer=sgd(), override=override)
    assert rate_of(run) == pytest.approx(expected)
    assert rate_of(fit(tmp_path, 4, falling(gamma), optimizer=sgd())) == pytest.approx(expected * gamma)


def test_a_schedule_of_another_class_is_refused_unless_it_is_made_anew(tmp_path: Path) -> None:
    fit(tmp_path, 4, falling(0.5), optimizer=sgd())
    with pytest.raises(
        CheckpointMismatchError,
        match=r"scheduler of LearningRate: saved ExponentialLR, now CosineAnnealingLR.*override=\(\"scheduler\",\)",
    ):
        fit(tmp_path, 6, cosine(), optimizer=sgd())
    run = fit(tmp_path, 6, cosine(), optimizer=sgd(), override=("scheduler",))
    assert rate_of(run) == pytest.approx(rate_of(fit(tmp_path / "whole", 6, cosine(), optimizer=sgd())))


def test_a_scheduler_that_cannot_be_made_anew_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    def trained(steps: int, **options: Any) -> Run:
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), 0.3)
        rate = LearningRate(schedulers.ExponentialLR(optimizer, 0.5))
        return fit(tmp_path, steps, rate, model=model, optimizer=optimizer, **options)

    trained(2)
    with pytest.raises(ValueError, match="LearningRate needs a function"):
        trained(3, override=("lr",))
    assert trained(3).progress.origin.step == 2


# -- loaders ------------------------------------------------------------------------------------------


OTHER_LOADERS = {
    "batch_size": (lambda: loader(4, 13), lambda: loader(3, 13, drop_last=True), "batch_size: saved 4, now 3"),
    "samples": (loader, lambda: loader(samples=23), "samples: saved 24, now 23"),
    "shuffle": (lambda: loader(shuffle=True), loader, "shuffle: saved True, now False"),
    "sampler": (
        lambda: loader(shuffle=True),
        lambda: loader(sampler=WeightedRandomSampler([1.0] * 24, 24)),
        "sampler: saved nothing, now WeightedRandomSampler",
    ),
    "replacement": (
        lambda: loader(shuffle=True),
        lambda: loader(sampler=RandomSampler(range(24), replacement=True)),
        "replacement: saved nothing, now True",
    ),
    "generator": (
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(4)),
        "generator seed: saved 3, now 4",
    ),
    "TensorBatches": (
        lambda: TensorBatches(*DATA.tensors, batch_size=4, shuffle=True),
        lambda: TensorBatches(*DATA.tensors, batch_size=4),
        "shuffle: saved True, now False",
    ),
    "list": (
        lambda: [(torch.ones(2, 1), torch.ones(2, 1))] * 5,
        lambda: [(torch.ones(3, 1), torch.ones(3, 1))] * 5,
        "batch_size: saved 2, now 3",
    ),
}


@pytest.mark.parametrize(("before", "after", "said"), OTHER_LOADERS.values(), ids=OTHER_LOADERS.keys())
def test_other_samples_are_refused_inside_an_epoch_and_told_between_two(
    before: Callable[[], Any], after: Callable[[], Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = len(before())
    assert len(after()) == batches
    fit(tmp_path, 2, loader=before())
    with pytest.raises(CheckpointMismatchError, match=f"nothing was restored.*{said}.*must not change inside an epoch"):
        fit(tmp_path, batches, loader=after(), override=("lr",))
    fit(tmp_path, batches, loader=before())
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = fit(tmp_path, batches + 1, loader=after())
    assert f"{said}; the run uses the present value" in told(run)
    assert said in caplog.text


def test_workers_and_where_the_data_lie_may_change_inside_an_epoch(tmp_path: Path) -> None:
    fit(tmp_path, 2, loader=loader(shuffle=True))
    assert told(fit(tmp_path, 4, loader=loader(shuffle=True, num_workers=1, collate_fn=None))) == []


def test_another_number_of_batches_is_refused_with_what_makes_it(tmp_path: Path) -> None:
    fit(tmp_path, 6, loader=loader(4))
    with pytest.raises(CheckpointMismatchError, match="batches an epoch: saved 6, now 12; batch_size: saved 4, now 2"):
        fit(tmp_path, 12, loader=loader(2))


def test_a_limit_is_a_fact_and_an_empty_list_has_none(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    look = on(Callback.on_fit_start)(lambda run: seen.append(loader_settings(run.loader)))
    fit(tmp_path, 2, Limit(train=3), look)
    assert seen == [{"loader": "list", "batch_size": 2, "limit": 3}]
    assert loader_settings([]) == {"loader": "list"}


# -- what cannot be overridden ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "resume", "kind", "message"),
    [
        (("weight_decya",), "auto", ValueError, r"override names 'weight_decya'.*Did you mean 'weight_decay'"),
        ("lr", "auto", TypeError, "list of names"),
        (3, "auto", TypeError, "list of names"),
        ([1], "auto", TypeError, "list of names"),
        (["lr"], False, ValueError, "expected resume="),
    ],
)
def test_what_is_no_list_of_settings_is_an_error_also_at_the_first_start(
    override: Any, resume: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        tiny_trainer(directory=tmp_path).fit(resume=resume, override=override)


def test_a_checkpoint_of_an_older_version_continues(tmp_path: Path) -> None:
    @on(Callback.on_save)
    def as_before(run: Run, snapshot: Snapshot) -> None:
        del snapshot.state["given"]

    fit(tmp_path, 2, as_before)
    assert told(fit(tmp_path, 4, optimizer=sgd(0.7), loader=loader(4, 20))) == []

"""Settings that differ from those of the checkpoint: told, refused, or given by `fit(override={...})`: each is a decision."""

from __future__ import annotations

import json
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
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, EarlyStopping, Ema, Evaluate, LearningRate, Limit, SequenceLength, Warmup
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import TensorBatches
from cadenza.loading.settings import loader_settings
from cadenza.testing import launch, tiny_trainer
from tests.optim.parts import DATA, adamw, cosine, falling, fit, groups, loader, made, rate_of, sgd, trainer

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
    as_before = on(Callback.on_save)(lambda run, snapshot: snapshot.state.pop("given"))
    fit(tmp_path, 2, as_before)
    assert told(fit(tmp_path, 4, optimizer=sgd(0.7), loader=loader(4, 20))) == []


# -- values in override: optimizers ------------------------------------------------------------------


def overridden(run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the decisions of `override`: the saved and the new value of each setting."""
    return {one.data["setting"]: (one.data["saved"], one.data["now"]) for one in run.decisions if one.who == "override"}


def test_values_are_in_effect_and_each_is_a_decision_with_the_old_and_the_new_value(tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=adamw())
    run = fit(tmp_path, 4, optimizer=adamw(), override={"lr": 0.01, "weight_decay": 0.2, "betas": (0.5, 0.9)})
    (group,) = groups(run)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.01, 0.2, (0.5, 0.9))
    assert overridden(run) == {"lr": (0.1, 0.01), "betas": ([0.9, 0.999], [0.5, 0.9]), "weight_decay": (0.01, 0.2)}
    assert "by override at epoch 1, step 2, batch 2: weight_decay: saved 0.01, now 0.2" in run.why("override")
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["override"] == {"lr": 0.01, "weight_decay": 0.2, "betas": [0.5, 0.9]}
    assert facts["arguments"]["optimizer"][0]["lr"] == 0.01


def test_values_may_come_from_a_configuration_file_and_the_same_again_change_nothing(tmp_path: Path) -> None:
    config = pytest.importorskip("omegaconf", reason="OmegaConf is not installed").OmegaConf
    fit(tmp_path, 2, optimizer=adamw())
    (group,) = groups(fit(tmp_path, 4, optimizer=adamw(), override=config.create({"lr": 0.01, "betas": [0.5, 0.9]})))
    assert (group["lr"], group["betas"]) == (0.01, (0.5, 0.9))
    again = fit(tmp_path, 6, optimizer=adamw(), override={"lr": 0.01})
    assert overridden(again) == {}
    assert rate_of(again) == 0.01


@pytest.mark.parametrize(
    ("given", "override"),
    [
        (lambda: {"optimizer": adamw()}, {"lr": 0.02, "weight_decay": 0.3}),
        (lambda: {"loader": shuffled()}, {"batch_size": 8, "accumulate": 2}),
    ],
    ids=["rates", "batches"],
)
def test_a_run_with_new_values_resumes_to_the_same_bits(
    given: Callable[[], dict[str, Any]], override: dict[str, Any], tmp_path: Path
) -> None:
    for name, stops in {"whole": [10], "killed": [4, 5, 8, 10]}.items():
        fit(tmp_path / name, 2, falling(), **given())
        for steps in stops:
            run = fit(tmp_path / name, steps, falling(), **given(), override=override)
    first, second = (max((tmp_path / name / "checkpoints").iterdir()) / "model.safetensors" for name in ("whole", "killed"))
    assert first.read_bytes() == second.read_bytes()
    assert run.progress.step == 10


def test_a_start_without_a_checkpoint_uses_the_values_too(tmp_path: Path) -> None:
    run = fit(tmp_path, 2, optimizer=adamw(), override={"lr": 0.01, "accumulate": 2})
    assert (groups(run)[0]["lr"], run.progress.batch) == (0.01, 4)
    assert overridden(run) == {"lr": (None, 0.01), "accumulate": (None, 2)}


def two(parameters: list[nn.Parameter]) -> list[Optimizer]:
    first: Any = [{"params": parameters[:1], "name": "weights"}, {"params": parameters[1:], "lr": 0.2}]
    return [SGD(first, 0.1), Adam(parameters, 0.3)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7]),
        ({1: 0.5}, [0.1, 0.5, 0.3]),
        ({"weights": 0.5, 2: 0.7}, [0.5, 0.2, 0.7]),
    ],
)
def test_groups_of_several_optimizers_get_their_own_values(given: Any, expected: list[float], tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=two)
    run = fit(tmp_path, 3, optimizer=two, override={"lr": given})
    assert [group["lr"] for group in groups(run)] == expected
    assert len(overridden(run)) == sum(one != before for one, before in zip(expected, [0.1, 0.2, 0.3], strict=True))
    again = fit(tmp_path, 4, optimizer=two)
    assert [group["lr"] for group in groups(again)] == expected


def test_groups_that_are_not_named_keep_the_saved_value_also_if_the_trainer_has_another(tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], 0.1))
    of_other: Any = {"optimizer": lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], 0.9)}
    run = fit(tmp_path, 3, **of_other, override={"lr": {0: 0.5}})
    assert [group["lr"] for group in groups(run)] == [0.5, 0.1]


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ({"wieght_decay": 0.1}, ValueError, r"no setting of this run\. Did you mean 'weight_decay'"),
    "text": ({"lr": "0.1"}, TypeError, r"lr must be a finite number, such as 0\.1; got '0\.1'"),
    "nan": ({"lr": float("nan")}, TypeError, "lr must be a finite number"),
    "negative": ({"lr": -1.0}, ValueError, "AdamW does not take lr=-1.0: Invalid learning rate"),
    "range": ({"betas": (0.9, 1.5)}, ValueError, "AdamW does not take betas"),
    "count": ({"betas": (0.9,)}, TypeError, r"betas must be 2 numbers, such as \(0\.9, 0\.999\); got \(0\.9,\)"),
    "bool": ({"amsgrad": 1}, TypeError, "amsgrad must be a bool, such as False; got 1"),
    "groups": ({"lr": [0.1, 0.2]}, ValueError, "2 values, but 1 parameter group"),
    "group": ({"lr": {3: 0.1}}, ValueError, r"parameter group 3, which does not exist\. Use any of \[0\]"),
    "accumulate": ({"accumulate": 0}, ValueError, "accumulate must be at least 1; got 0"),
    "batch size": ({"batch_size": 2.5}, TypeError, "batch_size must be a whole number; got 2.5"),
    "a list of batches": ({"batch_size": 3}, ValueError, r"a list cannot be built again.*override=\(\"batch_size\",\)"),
    "names": ({3: 1}, TypeError, "a mapping of names to values"),
    "scheduler": ({"scheduler": 3}, ValueError, "no setting of this run"),
}


@pytest.mark.parametrize(("override", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values_are_errors_before_anything_is_trained(
    override: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    fit(tmp_path, 2, optimizer=adamw())
    with pytest.raises(kind, match=message):
        fit(tmp_path, 4, optimizer=adamw(), override=override)
    assert fit(tmp_path, 3, optimizer=adamw()).progress.origin.step == 2


# -- schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [({"lr": 0.4}, 0.4 * 0.5**3), ({"gamma": 0.1}, 0.8 * 0.1**3), ({"lr": 0.4, "gamma": 0.1}, 0.4 * 0.1**3)],
)
def test_a_schedule_is_made_again_with_the_values_and_continues_at_its_position(
    override: dict[str, float], expected: float, tmp_path: Path
) -> None:
    fit(tmp_path, 2, falling(), optimizer=sgd())
    run = fit(tmp_path, 3, falling(), optimizer=sgd(), override=override)
    assert rate_of(run) == pytest.approx(expected)
    assert {*overridden(run)} == {{"gamma": "gamma of LearningRate"}.get(name, name) for name in override}


def test_a_function_replaces_the_whole_schedule(tmp_path: Path) -> None:
    fit(tmp_path, 4, falling(), optimizer=sgd())
    run = fit(tmp_path, 6, falling(), optimizer=sgd(), override={"scheduler": lambda o: schedulers.CosineAnnealingLR(o, 8)})
    assert rate_of(run) == pytest.approx(rate_of(fit(tmp_path / "whole", 6, cosine(), optimizer=sgd())))


def test_a_schedule_that_does_not_keep_its_arguments_is_given_whole(tmp_path: Path) -> None:
    def cycle() -> LearningRate:
        return LearningRate(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=9))

    fit(tmp_path, 2, cycle(), optimizer=sgd())
    with pytest.raises(
        ValueError, match=r"OneCycleLR does not keep its argument 'pct_start'|OneCycleLR does not keep .*override="
    ):
        fit(tmp_path, 4, cycle(), optimizer=sgd(), override={"max_lr": 0.1})


def test_milestones_are_values_and_a_name_that_optimizer_and_plateau_share_is_that_of_the_optimizer(tmp_path: Path) -> None:
    def steps(*milestones: int) -> LearningRate:
        return LearningRate(lambda optimizer: schedulers.MultiStepLR(optimizer, [*milestones]))

    fit(tmp_path / "steps", 2, steps(4), optimizer=sgd())
    run = fit(tmp_path / "steps", 4, steps(4), optimizer=sgd(), override={"milestones": [1, 3]})
    assert rate_of(run) == pytest.approx(0.008)

    def plateau() -> LearningRate:
        return LearningRate(lambda optimizer: schedulers.ReduceLROnPlateau(optimizer), monitor=lambda evaluation: 1.0)

    fit(tmp_path / "plateau", 2, plateau(), optimizer=adamw())
    run = fit(tmp_path / "plateau", 3, plateau(), optimizer=adamw(), override={"eps": 1e-5})
    assert groups(run)[0]["eps"] == 1e-5


# -- batches in a step --------------------------------------------------------------------------------


def test_accumulation_changes_if_it_is_declared_and_is_refused_if_not(tmp_path: Path) -> None:
    fit(tmp_path, 3, accumulate=1)
    with pytest.raises(CheckpointMismatchError, match=r"accumulate: saved 1, now 2.*override=\('accumulate',\)"):
        fit(tmp_path, 5, accumulate=2)
    given = fit(tmp_path, 5, override={"accumulate": 2})
    assert (given.progress.step, given.progress.batch, overridden(given)) == (5, 7, {"accumulate": (1, 2)})
    named = fit(tmp_path, 6, accumulate=3, override=("accumulate",))
    assert (named.progress.batch, overridden(named)) == (10, {"accumulate": (2, 3)})


def test_a_step_fn_takes_no_accumulation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step_fn does its own accumulation"):
        fit(tmp_path, 2, step_fn=lambda run, batch: run.loss, override={"accumulate": 2})


# -- the batch size -----------------------------------------------------------------------------------


def shuffled(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return loader(batch_size, shuffle=True, **options)


class Samples(Callback):
    """Keeps the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.batches.append(batch[0].flatten().int().tolist())


def flat(*seen: Samples) -> list[int]:
    return [sample for one in seen for batch in one.batches for sample in batch]


@pytest.mark.parametrize("kind", ["DataLoader", "workers", "TensorBatches", "Limit"])
def test_a_run_continues_at_the_same_sample_with_another_batch_size(kind: str, tmp_path: Path) -> None:
    def given() -> Any:
        if kind == "TensorBatches":
            return TensorBatches(*DATA.tensors, batch_size=4, shuffle=True)
        return shuffled(num_workers=int(kind == "workers"))

    if kind == "Limit":
        fit(tmp_path, 2, Limit(train=5), loader=given())
        with pytest.raises(DataError, match="no position by sample"):
            fit(tmp_path, 4, Limit(train=5), loader=given(), override={"batch_size": 8})
        return
    whole, first, rest = Samples(), Samples(), Samples()
    tiny_trainer(callbacks=[whole], loader=given(), seed=1, epochs=2).fit()
    fit(tmp_path, 2, first, loader=given())
    run = trainer(tmp_path, 6, rest, loader=given()).fit(resume="auto", override={"batch_size": 8})
    assert flat(first, rest) == flat(whole)[: len(flat(first, rest))]
    assert [len(batch) for batch in rest.batches] == [8, 8, 8, 8]
    assert (run.progress.epoch, run.progress.batch_in_epoch, run.progress.samples) == (1, 2, 40)
    assert overridden(run) == {"batch_size": (4, 8)}


def test_a_position_that_no_new_batch_has_is_refused_with_those_that_work(tmp_path: Path) -> None:
    fit(tmp_path, 1, loader=shuffled())
    with pytest.raises(
        DataError, match=r"4 samples of each rank.*batches of 8.*any multiple of 2 batches.*Nothing was restored"
    ):
        fit(tmp_path, 4, loader=shuffled(), override={"batch_size": 8})
    fit(tmp_path, 6, loader=shuffled())
    assert fit(tmp_path, 7, loader=shuffled(), override={"batch_size": 10}).progress.samples == 34


def test_another_batch_size_that_is_not_declared_is_refused_and_the_loader_keeps_its_own(tmp_path: Path) -> None:
    given = shuffled()
    fit(tmp_path, 2, loader=given)
    with pytest.raises(CheckpointMismatchError, match=r"batch_size: saved 4, now 8.*override=\('batch_size',\)"):
        fit(tmp_path, 4, loader=shuffled(8))
    run = fit(tmp_path, 4, loader=shuffled(8), override=("batch_size",))
    assert (run.progress.samples, overridden(run)) == (24, {"batch_size": (4, 8)})
    fit(tmp_path, 6, loader=given, override={"batch_size": 8})
    assert (given.batch_size, len(given)) == (4, 6)


def test_names_that_take_no_value_say_where_to_give_it(tmp_path: Path) -> None:
    message = "override gives 'shuffle' a value, but this setting is an argument of the loader"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, 2, loader=shuffled(), override={"shuffle": False})


def test_on_two_ranks_each_sample_of_the_epoch_is_seen_once_and_a_change_that_does_not_fit_is_refused_on_both(
    tmp_path: Path,
) -> None:
    """Half of an epoch of 24 samples in batches of 2, then the rest in batches of 4."""
    options: dict[str, Any] = {"driver": "ddp", "device": "cpu"}
    override = {"batch_size": 4, "lr": 0.01, "accumulate": 2}

    def train() -> tuple[str, list[int], Any]:
        fit(tmp_path / "odd", 1, loader=shuffled(2), **options)
        with pytest.raises(DataError) as refused:
            fit(tmp_path / "odd", 4, loader=shuffled(2), **options, override=override)
        first, rest = Samples(), Samples()
        fit(tmp_path / "even", 2, first, loader=shuffled(2), **options)
        run = fit(tmp_path / "even", 4, rest, loader=shuffled(2), **options, override=override)
        samples = [sample for batch in [*first.batches, *rest.batches[:2]] for sample in batch]
        return str(refused.value), samples, [run.progress.samples, overridden(run), rate_of(run)]

    ranks = launch(train, 2)
    assert all("no whole number of batches of 4" in error for error, _, _ in ranks)
    assert sorted(sample for _, samples, _ in ranks for sample in samples) == [*range(24)]
    assert ranks[0][2] == ranks[1][2]
    assert ranks[0][2][1] == {"lr": (0.1, 0.01), "batch_size": (2, 4), "accumulate": (1, 2)}

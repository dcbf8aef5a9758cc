"""`fit(override={...})` gives values: each is in effect from the checkpoint on, and each is a decision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from cadenza import Callback, Run
from cadenza.callbacks import LearningRate, Limit
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import TensorBatches
from cadenza.testing import launch, tiny_trainer
from tests.optim.parts import DATA, adamw, cosine, falling, fit, groups, loader, rate_of, sgd, trainer


def overridden(run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the decisions of `override`: the saved and the new value of each setting."""
    return {one.data["setting"]: (one.data["saved"], one.data["now"]) for one in run.decisions if one.who == "override"}


# -- optimizers ---------------------------------------------------------------------------------------


def test_values_are_in_effect_and_each_is_a_decision_with_the_old_and_the_new_value(tmp_path: Path) -> None:
    fit(tmp_path, 2, optimizer=adamw())
    run = fit(tmp_path, 4, optimizer=adamw(), override={"lr": 0.01, "weight_decay": 0.2, "betas": (0.5, 0.9)})
    (group,) = groups(run)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.01, 0.2, (0.5, 0.9))
    assert overridden(run) == {
        "lr": (0.1, 0.01),
        "betas": ([0.9, 0.999], [0.5, 0.9]),
        "weight_decay": (0.01, 0.2),
    }
    assert "by override at epoch 0, step 2, batch 2: weight_decay: saved 0.01, now 0.2" in run.why("override")
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
    def other(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], 0.9)

    fit(tmp_path, 2, optimizer=lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], 0.1))
    run = fit(tmp_path, 3, optimizer=other, override={"lr": {0: 0.5}})
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
    assert {*overridden(run)} == {"lr", "gamma of LearningRate"} & {
        name if name == "lr" else f"{name} of LearningRate" for name in override
    }


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


class Seen(Callback):
    """Keeps the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.batches.append(batch[0].flatten().int().tolist())


def flat(*seen: Seen) -> list[int]:
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
    whole, first, rest = Seen(), Seen(), Seen()
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
        first, rest = Seen(), Seen()
        fit(tmp_path / "even", 2, first, loader=shuffled(2), **options)
        run = fit(tmp_path / "even", 4, rest, loader=shuffled(2), **options, override=override)
        samples = [sample for batch in [*first.batches, *rest.batches[:2]] for sample in batch]
        return str(refused.value), samples, [run.progress.samples, overridden(run), rate_of(run)]

    ranks = launch(train, 2)
    assert all("no whole number of batches of 4" in error for error, _, _ in ranks)
    assert sorted(sample for _, samples, _ in ranks for sample in samples) == [*range(24)]
    assert ranks[0][2] == ranks[1][2]
    assert ranks[0][2][1] == {"lr": (0.1, 0.01), "batch_size": (2, 4), "accumulate": (1, 2)}

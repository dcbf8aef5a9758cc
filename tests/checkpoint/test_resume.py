"""A run that was cut continues to the same bits: `prove_resume` over what makes runs differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
)
from cadenza.status.plain import first_difference
from cadenza.testing import prove_resume
from tests.loading.data import noise_of

SAMPLES, BATCH = 26, 4  # 7 batches, the last one short


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points that the generators named in `noise` move at each reading."""

    def __init__(self, *noise: str) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.linspace(0, index / SAMPLES, 4) + sum(map(noise_of, self.noise))
        return point, torch.tensor(index % 3)


def network() -> nn.Module:
    """Return a model with dropout and batch norm, always the same."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def points(*noise: str, workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Points(*noise), batch_size=BATCH, shuffle=True, num_workers=workers, **options)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def make(
    callbacks: Callable[[], list[Callback]] = list, loader: Callable[[], Iterable[Any]] = points, **arguments: Any
) -> Callable[[Path], Trainer]:
    """Return what makes a trainer with new parts for a directory."""

    def trainer(directory: Path) -> Trainer:
        given = {"max_epochs": 2, "seed": 7, **arguments}
        optimizer = given.pop("optimizer", adamw)
        loss = None if "step_fn" in given else supervised(nn.CrossEntropyLoss())
        parts = [network(), optimizer, loader(), loss]
        return Trainer(*parts, directory=directory, device="cpu", progress=False, callbacks=callbacks(), **given)

    return trainer


def evaluation(**options: Any) -> Evaluate:
    return Evaluate(DataLoader(Points("torch"), batch_size=13), **options)


def final(make_trainer: Callable[[Path], Trainer], directory: Path) -> dict[str, Tensor]:
    trainer = make_trainer(directory)
    trainer.fit()
    return dict(trainer.model.state_dict())


# -- the table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("noise", ["no", "torch", "numpy", "python"])
def test_exact_at_start_middle_and_end_of_an_epoch(noise: str, accumulate: int) -> None:
    augmentation = () if noise == "no" else (noise,)
    steps = -(-7 // accumulate)
    prove_resume(
        make(lambda: [Ema(0.9), evaluation()], lambda: points(*augmentation), accumulate=accumulate),
        at=[steps, steps + 1, steps + steps // 2 + 1],
        in_process=True,
    )


@pytest.mark.parametrize(
    ("noise", "accumulate", "precision"), [("numpy", 3, "bf16"), ("python", 1, "fp16"), ("torch", 3, "fp32")]
)
def test_exact_with_workers(noise: str, accumulate: int, precision: str) -> None:
    steps = -(-7 // accumulate)
    prove_resume(
        make(lambda: [Ema(0.9)], lambda: points(noise, workers=2), accumulate=accumulate, precision=precision),
        at=[steps, steps + 2],
        in_process=True,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_at_every_single_step(precision: str) -> None:
    def callbacks() -> list[Callback]:
        schedule = LearningRate(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.01, total_steps=20))
        return [schedule, ClipGradients(1.0), Ema(0.9), evaluation(), LogTraining("1 step", throughput=False)]

    trainer = make(
        callbacks, lambda: points("torch", "python"), max_epochs=None, max_steps=20, precision=precision, accumulate=2
    )
    prove_resume(trainer, at=range(1, 21), in_process=True)


def test_fp16_continues_with_the_scale_of_the_losses() -> None:
    prove_resume(make(precision="fp16", accumulate=3), at=[1, 3, 4], in_process=True)


def test_exact_where_the_last_step_ends_inside_a_group_at_the_end_of_an_epoch() -> None:
    # 7 batches in groups of 3: step 3 holds one batch, and step 6 is the end of epoch 2.
    prove_resume(make(lambda: [evaluation()], accumulate=3, max_epochs=None, max_steps=6), at=[2, 3, 5, 6], in_process=True)


# -- independence -------------------------------------------------------------------------------------


def test_weights_do_not_depend_on_workers_logging_or_how_often_one_evaluates(tmp_path: Path) -> None:
    plain = final(make(loader=lambda: points("torch", "numpy")), tmp_path / "plain")
    others = {
        "workers": make(loader=lambda: points("torch", "numpy", workers=2)),
        "persistent workers": make(loader=lambda: points("torch", "numpy", workers=1, persistent_workers=True)),
        "logging": make(lambda: [LogTraining("1 step")], lambda: points("torch", "numpy")),
        "evaluation": make(lambda: [evaluation(every="1 step"), evaluation(name="b")], lambda: points("torch", "numpy")),
        "saving": make(lambda: [Checkpoint("2 steps")], lambda: points("torch", "numpy")),
    }
    for name, trainer in others.items():
        assert first_difference(plain, final(trainer, tmp_path / name)) is None, name


class Killed(BaseException):
    """Ends a run in the middle."""


def killed_after(step: int) -> Callback:
    def kill(run: Run, batch: Any, outputs: Any) -> None:
        if run.progress.step == step:
            raise Killed

    return on(Callback.on_batch_end)(kill)


def cut(make_trainer: Callable[[Path], Trainer], directory: Path, step: int, resume: bool = False) -> None:
    """Let a run be killed in the middle of the step after `step`."""
    trainer = make_trainer(directory)
    trainer.callbacks.append(killed_after(step))
    with pytest.raises(Killed):
        trainer.fit(resume="auto" if resume else False)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_a_run_with_workers_continues_without_them_and_the_reverse(before: int, after: int, tmp_path: Path) -> None:
    def trainer(workers: int) -> Callable[[Path], Trainer]:
        return make(lambda: [Checkpoint("2 steps")], lambda: points("torch", "python", workers=workers))

    whole = final(trainer(before), tmp_path / "whole")
    cut(trainer(before), tmp_path / "cut", 5)
    continued = trainer(after)(tmp_path / "cut")
    run = continued.fit(resume="auto")
    assert run.progress.origin.step == 4
    assert first_difference(whole, dict(continued.model.state_dict())) is None


def test_a_run_can_be_continued_again_and_again(tmp_path: Path) -> None:
    trainer = make(lambda: [Checkpoint("1 step"), LogTraining("1 step", throughput=False)], lambda: points("numpy"))
    whole = final(trainer, tmp_path / "whole")
    cut(trainer, tmp_path / "cut", 3)
    for step in (4, 7, 8, 12):
        cut(trainer, tmp_path / "cut", step, resume=True)
    continued = trainer(tmp_path / "cut")
    continued.fit(resume="auto")
    assert first_difference(whole, dict(continued.model.state_dict())) is None
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def records(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_no_line_of_records_or_decisions_is_doubled_or_lost(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [LogTraining("1 step", throughput=False), evaluation(every="2 steps"), Checkpoint("3 steps")]

    make(callbacks)(tmp_path / "whole").fit()
    cut(make(callbacks), tmp_path / "cut", 8)
    assert records(tmp_path / "cut")[-1]["step"] == 8
    run = make(callbacks)(tmp_path / "cut").fit(resume="auto")
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert [step for step, _ in run.history["train/loss"]] == list(range(1, 15))
    decided = [json.loads(line) for line in (tmp_path / "cut" / "decisions.jsonl").read_text().splitlines()]
    steps = [one["step"] for one in decided if one["what"] == "evaluated"]
    assert steps == [2, 4, 6, 8, 10, 12, 14]
    assert [one["step"] for one in decided if one["what"] == "resumed"] == [6]


# -- edges and limits ---------------------------------------------------------------------------------


def test_exact_from_between_two_epochs(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        halve = LearningRate(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5), per="epoch")
        return [evaluation(), halve, Checkpoint("1 epoch")]

    trainer = make(callbacks, lambda: points("torch"), max_epochs=3)
    whole = final(trainer, tmp_path / "whole")
    cut(trainer, tmp_path / "cut", 9)
    continued = trainer(tmp_path / "cut")
    run = continued.fit(resume="auto")
    assert run.progress.origin.epoch == 1
    assert run.progress.origin.batch_in_epoch == 0
    assert first_difference(whole, dict(continued.model.state_dict())) is None


@pytest.mark.parametrize("every", ["1 epoch", "7 steps", "3 steps"])
def test_a_finished_run_goes_on_when_its_limit_is_raised(every: str, tmp_path: Path) -> None:
    def trainer(epochs: int) -> Callable[[Path], Trainer]:
        return make(lambda: [evaluation(), Checkpoint(every)], lambda: points("torch"), max_epochs=epochs)

    whole = final(trainer(3), tmp_path / "whole")
    trainer(1)(tmp_path / "raised").fit()
    continued = trainer(3)(tmp_path / "raised")
    run = continued.fit(resume="auto")
    assert run.progress.origin.epoch == 1
    assert first_difference(whole, dict(continued.model.state_dict())) is None


def test_raised_steps_go_on_inside_the_epoch(tmp_path: Path) -> None:
    def trainer(steps: int) -> Callable[[Path], Trainer]:
        return make(lambda: [Checkpoint("4 steps")], lambda: points("torch"), max_epochs=None, max_steps=steps)

    whole = final(trainer(12), tmp_path / "whole")
    trainer(5)(tmp_path / "raised").fit()
    continued = trainer(12)(tmp_path / "raised")
    assert continued.fit(resume="auto").progress.origin.step == 5
    assert first_difference(whole, dict(continued.model.state_dict())) is None


# -- schedules and optimizers -------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[], LearningRate]] = {
    "OneCycleLR": lambda: LearningRate(lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=14)),
    "CosineAnnealingLR": lambda: LearningRate(lambda o: schedulers.CosineAnnealingLR(o, T_max=14)),
    "CosineAnnealingWarmRestarts": lambda: LearningRate(lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4)),
    "LambdaLR": lambda: LearningRate(lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step)),
    "MultiStepLR": lambda: LearningRate(lambda o: schedulers.MultiStepLR(o, [3, 3, 6, 11], 0.5)),
    "SequentialLR": lambda: LearningRate(
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
        )
    ),
    "ReduceLROnPlateau": lambda: LearningRate(
        lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0), monitor="eval/loss"
    ),
    "StepLR per epoch": lambda: LearningRate(lambda o: schedulers.StepLR(o, 1, 0.1), per="epoch"),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning", "ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules_continue(schedule: Callable[[], LearningRate]) -> None:
    prove_resume(
        make(lambda: [evaluation(every="2 steps"), schedule(), LogTraining("1 step", throughput=False)]),
        at=[3, 7, 9],
        in_process=True,
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: SGD(parameters, 0.05, momentum=0.9, nesterov=True),
        lambda parameters: Adam(parameters, 0.01, amsgrad=True),
        lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5, centered=True),
        lambda parameters: torch.optim.Adafactor(parameters, 0.01),
        lambda parameters: [AdamW(parameters[:4], 0.01), SGD(parameters[4:], 0.1, momentum=0.5)],
        lambda parameters: AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "weight_decay": 0.5}]),
    ],
    ids=["SGD", "Adam", "RMSprop", "Adafactor", "two optimizers", "parameter groups"],
)
def test_optimizers_continue(optimizer: Any) -> None:
    prove_resume(make(optimizer=optimizer), at=[1, 7, 9], in_process=True)


def _two_players(run: Run, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Train two halves of a model against each other, as a GAN does."""
    first, second = run.optimizers
    points, _ = batch
    noise = torch.randn_like(points)
    loss = run.model(points + noise).pow(2).mean()
    run.backward(loss)
    run.update(first)
    against = -run.model(points - torch.randn_like(points)).tanh().mean()
    run.backward(against)
    run.update(second)
    return {"loss": loss.detach(), "against": against.detach()}


def test_a_step_function_with_two_optimizers_continues() -> None:
    def two(parameters: list[nn.Parameter]) -> list[Optimizer]:
        return [AdamW(parameters[:4], 0.01), SGD(parameters[4:], 0.1, momentum=0.5)]

    prove_resume(make(optimizer=two, step_fn=_two_players), at=[1, 7, 9], in_process=True)


# -- callbacks ----------------------------------------------------------------------------------------


def test_early_stopping_continues_with_its_patience() -> None:
    def callbacks() -> list[Callback]:
        return [evaluation(every="1 step"), EarlyStopping("eval/loss", mode="max", patience=4), BestWeights("eval/loss", "max")]

    prove_resume(make(callbacks, max_epochs=9), at=[1, 2, 3], in_process=True)


def test_an_evaluation_that_waits_for_a_better_one_still_waits() -> None:
    def callbacks() -> list[Callback]:
        often = evaluation(every="2 steps")
        return [often, evaluation(name="test", every="5 steps", when_better=("eval/loss", "min"))]

    prove_resume(make(callbacks), at=[2, 3, 4, 6, 8], in_process=True)


def test_two_callbacks_of_one_class_keep_apart() -> None:
    def callbacks() -> list[Callback]:
        stops = [EarlyStopping("eval/loss", mode=mode, patience=patience) for mode, patience in (("min", 9), ("max", 5))]  # type: ignore[arg-type]  # of a tuple
        return [
            evaluation(every="1 step"),
            *stops,
            Ema(0.9),
            Ema(0.5, name="fast"),
            BestWeights("eval/loss", "min"),
            BestWeights("eval/loss", "max"),
        ]

    prove_resume(make(callbacks), at=[2, 4], in_process=True)


def test_the_runs_own_state_continues() -> None:
    def count(run: Run) -> None:
        run.state["seen"] = run.state.get("seen", 0) + 1
        run.state["sums"] = [*run.state.get("sums", []), run.loss]
        run.log("seen", run.state["seen"])

    prove_resume(make(lambda: [on(Callback.on_step_end)(count)]), at=[1, 8], in_process=True)


def test_requests_and_skipped_batches_continue() -> None:
    def skip(run: Run, batch: Any) -> None:
        if torch.rand(()) < 0.3:
            run.skip_batch("by chance")

    def end(run: Run) -> None:
        if run.progress.batch_in_epoch == 5:
            run.end_epoch("five are enough")

    prove_resume(
        make(lambda: [on(Callback.on_batch_start)(skip), on(Callback.on_step_end)(end)], max_epochs=3),
        at=[4, 5, 6, 11],
        in_process=True,
    )

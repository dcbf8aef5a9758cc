"""A run that was cut continues to the same bits: `prove_resume` over what makes runs differ, and with all callbacks at once."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cadenza import Callback, Run, Trainer, callbacks, on, supervised
from cadenza.callbacks import BestWeights, Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LearningRate, LogTraining
from cadenza.status.encoding import first_difference
from cadenza.testing import prove_resume
from tests.callbacks.shipped import CALLBACKS, made
from tests.loading.data import noise_of
from tests.long import LONG

Make = Callable[[Path], Trainer]
SAMPLES, BATCH = 26, 4  # 7 batches, the last one short


NOISE = ("torch", "numpy", "python")


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


def make(
    callbacks: Callable[[], list[Callback]] = list, loader: Callable[[], Iterable[Any]] = points, **arguments: Any
) -> Make:
    """Return what makes a trainer with new parts for a directory."""

    def trainer(directory: Path) -> Trainer:
        given = {"max_epochs": 2, "seed": 7, **arguments}
        optimizer = given.pop("optimizer", lambda parameters: AdamW(parameters, lr=0.01))
        loss = None if "step_fn" in given else supervised(nn.CrossEntropyLoss())
        parts = [network(), optimizer, loader(), loss]
        return Trainer(*parts, directory=directory, device="cpu", progress=False, callbacks=callbacks(), **given)

    return trainer


def evaluation(**options: Any) -> Evaluate:
    return Evaluate(DataLoader(Points("torch"), batch_size=13), **options)


def final(make_trainer: Make, directory: Path) -> dict[str, Tensor]:
    return weights_of(make_trainer(directory).fit())


def weights_of(run: Run) -> dict[str, Tensor]:
    return dict(run.model.state_dict())


# -- steps, precisions and workers --------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_exact_at_start_middle_and_end_of_an_epoch(accumulate: int) -> None:
    steps = -(-7 // accumulate)
    prove_resume(
        make(lambda: [Ema(0.9), evaluation()], lambda: points(*NOISE), accumulate=accumulate),
        at=[steps, steps + 1, steps + steps // 2 + 1],
        in_process=True,
    )


@pytest.mark.parametrize(("accumulate", "precision"), [(3, "bf16"), (1, "fp16")])
def test_exact_with_workers(accumulate: int, precision: str) -> None:
    steps = -(-7 // accumulate)
    prove_resume(
        make(lambda: [Ema(0.9)], lambda: points(*NOISE, workers=2), accumulate=accumulate, precision=precision),
        at=[steps, steps + 2],
        in_process=True,
    )


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_exact_at_every_single_step(precision: str) -> None:
    def callbacks() -> list[Callback]:
        schedule = LearningRate(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.01, total_steps=20))
        return [schedule, ClipGradients(1.0), Ema(0.9), evaluation(), LogTraining("1 step", throughput=False)]

    trainer = make(
        callbacks, lambda: points("torch", "python"), max_epochs=None, max_steps=20, precision=precision, accumulate=2
    )
    prove_resume(trainer, at=range(1, 21), in_process=True)


# -- schedules, optimizers and callbacks --------------------------------------------------------------

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
    "StepLR per epoch": lambda: LearningRate(lambda o: schedulers.StepLR(o, 1, 0.1), every="1 epoch"),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning", "ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules_continue(schedule: Callable[[], LearningRate]) -> None:
    prove_resume(
        make(lambda: [evaluation(every="2 steps"), schedule(), LogTraining("1 step", throughput=False)]),
        at=[7 if schedule().unit == "epoch" else 3],  # and again at step 11 or 9
        in_process=True,
    )


def two_optimizers(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [AdamW(parameters[:4], 0.01), SGD(parameters[4:], 0.1, momentum=0.5)]


def two_players(run: Run, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
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


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": lambda parameters: SGD(parameters, 0.05, momentum=0.9, nesterov=True)},
    "Adam": {"optimizer": lambda parameters: Adam(parameters, 0.01, amsgrad=True)},
    "RMSprop": {"optimizer": lambda parameters: RMSprop(parameters, 0.01, momentum=0.5, centered=True)},
    "Adafactor": {"optimizer": lambda parameters: Adafactor(parameters, 0.01)},
    "parameter groups": {
        "optimizer": lambda parameters: AdamW(
            [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "weight_decay": 0.5}]
        )
    },
    "two optimizers": {"optimizer": two_optimizers},
    "a step function": {"optimizer": two_optimizers, "step_fn": two_players},
}


@pytest.mark.parametrize("arguments", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_continue(arguments: dict[str, Any]) -> None:
    prove_resume(make(**arguments), at=[1], in_process=True)  # and again at step 8, the first of an epoch


def stops_early() -> list[Callback]:
    return [evaluation(every="1 step"), EarlyStopping("eval/loss", mode="max", patience=4), BestWeights("eval/loss", "max")]


def waits_for_a_better_evaluation() -> list[Callback]:
    return [evaluation(every="2 steps"), evaluation(name="test", every="5 steps", when_better=("eval/loss", "min"))]


def two_of_each_class() -> list[Callback]:
    return [
        evaluation(every="1 step"),
        EarlyStopping("eval/loss", mode="min", patience=9),
        EarlyStopping("eval/loss", mode="max", patience=5),
        Ema(0.9),
        Ema(0.5, name="fast"),
        BestWeights("eval/loss", "min"),
        BestWeights("eval/loss", "max"),
    ]


@on(Callback.on_step_end)
def count_in_the_run(run: Run) -> None:
    run.state["seen"] = run.state.get("seen", 0) + 1
    run.state["sums"] = [*run.state.get("sums", []), run.loss]
    run.log("seen", run.state["seen"])


@on(Callback.on_batch_start)
def skip_by_chance(run: Run, batch: Any) -> None:
    if torch.rand(()) < 0.3:
        run.skip_batch("by chance")


@on(Callback.on_step_end)
def end_epoch_after_five(run: Run) -> None:
    if run.progress.batch_in_epoch == 5:
        run.end_epoch("five are enough")


PARTS: dict[str, tuple[Make, Sequence[int]]] = {
    "the scale of fp16": (make(precision="fp16", accumulate=3), [1, 4]),
    # 7 batches in groups of 3: step 3 holds one batch, and step 6 is the end of epoch 2.
    "a last step inside a group": (make(lambda: [evaluation()], accumulate=3, max_epochs=None, max_steps=6), [3, 5, 6]),
    "early stopping": (make(stops_early, max_epochs=9), [2]),
    "an evaluation that waits": (make(waits_for_a_better_evaluation), [3, 4]),
    "two of each class": (make(two_of_each_class), [4]),
    "the state of the run": (make(lambda: [count_in_the_run]), [1]),
    "skipped batches": (make(lambda: [skip_by_chance, end_epoch_after_five], max_epochs=3), [4, 5, 6]),
}


@pytest.mark.parametrize(("trainer", "at"), PARTS.values(), ids=PARTS.keys())
def test_other_parts_continue(trainer: Make, at: Sequence[int]) -> None:
    prove_resume(trainer, at=at, in_process=True)


# -- independence -------------------------------------------------------------------------------------


def test_weights_do_not_depend_on_workers_logging_or_how_often_one_evaluates(tmp_path: Path) -> None:
    def watching() -> list[Callback]:
        return [LogTraining("1 step"), evaluation(every="1 step"), evaluation(name="b"), Checkpoint("2 steps")]

    plain = final(make(loader=lambda: points("torch", "numpy")), tmp_path / "plain")
    others = {
        "workers": make(loader=lambda: points("torch", "numpy", workers=2)),
        "persistent workers": make(loader=lambda: points("torch", "numpy", workers=1, persistent_workers=True)),
        "logging, evaluation and saving": make(watching, lambda: points("torch", "numpy")),
    }
    for name, trainer in others.items():
        assert first_difference(plain, final(trainer, tmp_path / name)) is None, name


# -- kills between and inside epochs ------------------------------------------------------------------


class Killed(BaseException):
    """Ends a run in the middle."""


def killed_after(step: int) -> Callback:
    def kill(run: Run, batch: Any, outputs: Any) -> None:
        if run.progress.step == step:
            raise Killed

    return on(Callback.on_batch_end)(kill)


def cut(make_trainer: Make, directory: Path, step: int, resume: bool = False) -> None:
    """Let a run be killed in the middle of the step after `step`."""
    trainer = make_trainer(directory)
    trainer.callbacks.append(killed_after(step))
    with pytest.raises(Killed):
        trainer.fit(resume="auto" if resume else False)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_a_run_with_workers_continues_without_them_and_the_reverse(before: int, after: int, tmp_path: Path) -> None:
    def trainer(workers: int) -> Make:
        return make(lambda: [Checkpoint("2 steps")], lambda: points("torch", "python", workers=workers))

    whole = final(trainer(before), tmp_path / "whole")
    cut(trainer(before), tmp_path / "cut", 5)
    run = trainer(after)(tmp_path / "cut").fit(resume="auto")
    assert run.progress.origin.step == 4
    assert first_difference(whole, weights_of(run)) is None


STEPS_5: dict[str, Any] = {"max_epochs": None, "max_steps": 5}
STEPS_12: dict[str, Any] = {"max_epochs": None, "max_steps": 12}


@pytest.mark.parametrize(
    ("every", "before", "after", "origin"),
    [
        ("1 epoch", {"max_epochs": 1}, {"max_epochs": 3}, 7),
        ("7 steps", {"max_epochs": 1}, {"max_epochs": 3}, 7),
        ("3 steps", {"max_epochs": 1}, {"max_epochs": 3}, 7),
        ("4 steps", STEPS_5, STEPS_12, 5),
    ],
    ids=["1 epoch", "7 steps", "3 steps", "inside an epoch"],
)
def test_a_finished_run_goes_on_when_its_limit_is_raised(
    every: str, before: dict[str, Any], after: dict[str, Any], origin: int, tmp_path: Path
) -> None:
    def trainer(limit: dict[str, Any]) -> Make:
        return make(lambda: [evaluation(), Checkpoint(every)], lambda: points("torch"), **limit)

    whole = final(trainer(after), tmp_path / "whole")
    trainer(before)(tmp_path / "raised").fit()
    run = trainer(after)(tmp_path / "raised").fit(resume="auto")
    assert (run.progress.origin.step, run.progress.origin.epoch) == (origin, origin // 7)
    assert first_difference(whole, weights_of(run)) is None


# -- records ------------------------------------------------------------------------------------------


def records(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_a_run_can_be_continued_again_and_again(tmp_path: Path) -> None:
    trainer = make(lambda: [Checkpoint("1 step"), LogTraining("1 step", throughput=False)], lambda: points("numpy"))
    whole = final(trainer, tmp_path / "whole")
    cut(trainer, tmp_path / "cut", 3)
    for step in (4, 7, 8, 12):
        cut(trainer, tmp_path / "cut", step, resume=True)
    run = trainer(tmp_path / "cut").fit(resume="auto")
    assert first_difference(whole, weights_of(run)) is None
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


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


# -- every callback that has state, and many that have none, in one list -------------------------------


CLOCKS = ("*_per_s", "time/*", "process/*")


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def images(count: int, *, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(count)
    pixels = torch.rand(count, 1, 4, 4, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return DataLoader(TensorDataset(pixels, labels), batch_size=4, shuffle=shuffle)


def largest(run: Any) -> Tensor:
    found: Tensor = run.outputs["predictions"].max()
    return found


def everything() -> list[Callback]:
    """Return all callbacks that act in a run that continues: those without arguments for this run as their first case."""
    chosen = fitted_to_this_run()
    names = CALLBACKS.keys() - {type(callback).__name__ for callback in chosen}
    return [*chosen, *(cast("Callback", made(name)) for name in sorted(names) if CALLBACKS[name].resumes)]


def fitted_to_this_run() -> list[Callback]:
    valid = images(8, shuffle=False)
    return [
        callbacks.Summary(),
        callbacks.Freeze("1", until="3 steps"),
        callbacks.MoveModules(nn.BatchNorm1d(3)),
        callbacks.ConvertSyncBatchNorm(),
        callbacks.Limit(evaluation=2),
        callbacks.Derive(largest=largest),
        callbacks.SequenceLength({0: 8, "5 steps": 16}, dim=3),
        callbacks.Ema(0.9, rampup=True),
        callbacks.Ema(0.5, every="2 steps", name="fast"),
        callbacks.Swa(start="6 steps", every="1 step", lr=0.01, update_batch_norm=2),
        callbacks.StopOnNonFinite("skip", gradients=True),
        callbacks.ClipGradients(max_norm=1.0, log="train/norm", log_every="2 steps"),
        callbacks.Warmup("5 steps"),
        callbacks.LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)),
        callbacks.ScheduleValue(lambda run: run.model[4], "p", {0: 0.1, 12: 0.3}),
        callbacks.Evaluate(valid, every="2 steps"),
        callbacks.Evaluate(valid, every="3 steps", name="averaged", weights="ema"),
        callbacks.Evaluate(valid, every="1 step", name="better", when_better=("eval/loss", "min")),
        callbacks.EarlyStopping("eval/loss", mode="min", patience=6, ignore_first=1, restore_best=True),
        callbacks.BestWeights("averaged/loss", "min", restore=False),
        callbacks.ConfusionMatrix(classes=3),
        callbacks.SampleImages(4, every="4 steps"),
        callbacks.SavePredictions("predictions-{step}.csv", evaluation="eval"),
        callbacks.Histograms("4 steps", gradients=True),
        callbacks.DeviceStats("4 steps"),
        callbacks.LogTraining("1 step", outputs=("loss", "largest")),
        callbacks.Alert("train/loss > 1"),
        callbacks.Timer("3 steps"),
        callbacks.TimeLimit("1 h"),
        callbacks.Profile(),
        callbacks.Capsule(),
        callbacks.Recover(),
        callbacks.ReplayCheck("3 steps"),
        callbacks.Fingerprint("2 steps"),
        callbacks.Checkpoint(every="2 steps", keep_best=("eval/loss", "min")),
    ]


def with_everything(directory: Path) -> Trainer:
    return Trainer(
        classifier(),
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        images(20, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=4,
        accumulate=2,
        seed=3,
        directory=directory,
        callbacks=everything(),
        device="cpu",
        progress=False,
    )


def test_a_run_with_all_callbacks_continues_to_the_same_bits() -> None:
    at = range(1, 12) if LONG else (2, 5)  # and again at steps 7 and 9
    prove_resume(with_everything, at=at, ignore=CLOCKS, in_process=True)  # an error names the step


def test_none_of_the_names_that_are_left_out_of_the_comparison_is_more_than_a_clock(tmp_path: Path) -> None:
    names = with_everything(tmp_path).fit().history.names
    left_out = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in CLOCKS)]
    assert 0 < len(left_out) < 2 * len(names) / 3
    assert not [name for name in left_out if name.startswith(("eval/", "averaged/", "better/"))]

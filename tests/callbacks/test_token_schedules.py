"""Schedules of a run that only ``max_tokens`` ends: they count tokens, however many tokens a step has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.optim.lr_scheduler as lr
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cadenza import Callback, Run, Trainer
from cadenza.callbacks import Checkpoint, LearningRate, LogTraining, ScheduleValue, Swa, Warmup
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer

LIMIT = 1000


def tokens_of(batch: tuple[Tensor, ...]) -> int:
    return 20 + int(batch[0].abs().sum().item() * 37) % 90


class Seen(Callback):
    """The tokens at each update, with the batches of the update, and the rate that the update uses."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        self.tokens.append(run.progress.tokens)
        self.rates.append(float(run.optimizers[0].param_groups[0]["lr"]))


def seen_with(*callbacks: Any, **arguments: Any) -> Seen:
    seen = Seen()
    run = tiny_run(callbacks=[*callbacks, seen], batches=7, max_tokens=LIMIT, tokens=tokens_of, **arguments)
    assert run.progress.tokens >= LIMIT > seen.tokens[-2]
    assert len({after - before for before, after in zip(seen.tokens, seen.tokens[1:], strict=False)}) > 3, "unequal steps"
    return seen


def fall(optimizer: Optimizer, total: int) -> LRScheduler:
    return lr.LambdaLR(optimizer, lambda done: 1 - done / total)


KINDS: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "LambdaLR": fall,
    "StepLR": lambda o, total: lr.StepLR(o, total // 4, 0.5),
    "MultiStepLR": lambda o, total: lr.MultiStepLR(o, [total // 3, total // 2], 0.5),
    "ConstantLR": lambda o, total: lr.ConstantLR(o, 0.3, total_iters=total // 2),
    "LinearLR": lambda o, total: lr.LinearLR(o, 1.0, 0.0, total_iters=total),
    "ExponentialLR": lambda o, total: lr.ExponentialLR(o, 0.01 ** (1 / total)),
    "PolynomialLR": lambda o, total: lr.PolynomialLR(o, total, power=2.0),
    "CosineAnnealingLR": lambda o, total: lr.CosineAnnealingLR(o, total),
    "CyclicLR": lambda o, total: lr.CyclicLR(o, 0.01, 0.1, step_size_up=total // 5),
    "CosineAnnealingWarmRestarts": lambda o, total: lr.CosineAnnealingWarmRestarts(o, total // 3),
    "OneCycleLR": lambda o, total: lr.OneCycleLR(o, 0.2, total_steps=total + 1),
    "SequentialLR": lambda o, total: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=total // 5), lr.CosineAnnealingLR(o, total - total // 5)], [total // 5]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_update_has_the_rate_of_a_schedule_that_is_stepped_once_for_each_token(kind: str, accumulate: int) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler, one_by_one = KINDS[kind](optimizer, LIMIT), []
    for _ in range(LIMIT + 1):
        one_by_one.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    seen = seen_with(LearningRate(KINDS[kind]), accumulate=accumulate)
    assert seen.rates == pytest.approx([one_by_one[tokens] for tokens in [0, *seen.tokens[:-1]]], rel=1e-6, abs=1e-12)


def test_a_run_that_continues_has_the_rates_of_one_that_does_not_stop() -> None:
    def make(directory: Path) -> Trainer:
        callbacks = [LearningRate(KINDS["SequentialLR"]), Warmup("10%"), Checkpoint("1 step")]
        return tiny_trainer(callbacks=callbacks, directory=directory, seed=1, batches=7, max_tokens=LIMIT, tokens=tokens_of)

    prove_resume(make, at=[2, 5], in_process=True)


def test_a_fraction_of_warm_up_is_one_of_the_tokens() -> None:
    warmup = Warmup("30%")
    seen = seen_with(warmup)
    assert (warmup.unit, warmup.count) == ("token", 0.3 * LIMIT)
    assert seen.rates == pytest.approx([0.1 * min(1, tokens / 300) for tokens in seen.tokens])
    assert seen_with(Warmup("3 steps")).rates[:4] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1])


def test_a_value_follows_the_tokens_so_far() -> None:
    drop, values = nn.Dropout(), []

    class Look(Callback):
        def on_step_start(self, run: Run) -> None:
            values.append((run.progress.tokens, drop.p))

    seen_with(
        ScheduleValue(drop, "p", lambda done, total: done / total / 2), Look(), model=nn.Sequential(nn.Linear(1, 1), drop)
    )
    assert len(values) > 5
    assert [value for _, value in values] == pytest.approx([tokens / LIMIT / 2 for tokens, _ in values])


def test_an_average_begins_at_a_fraction_of_the_tokens() -> None:
    swa = Swa(0.5, lr=0.01, anneal_steps=0)
    seen = seen_with(swa)
    assert [rate == 0.01 for rate in seen.rates] == [before >= LIMIT / 2 for before in [0, *seen.tokens[:-1]]]


def test_what_is_logged_is_the_rate_by_the_tokens_so_far() -> None:
    seen = Seen()
    callbacks = [LearningRate(fall), LogTraining("1 step"), seen]
    run = tiny_run(callbacks=callbacks, batches=7, max_tokens=LIMIT, tokens=tokens_of)
    assert [rate for _, rate in run.history["train/lr"]][:-1] == pytest.approx(seen.rates[1:])


@pytest.mark.parametrize("kind", [lr.ChainedScheduler, lr.MultiplicativeLR])
def test_a_scheduler_whose_rate_depends_on_the_rate_before_is_refused(kind: type) -> None:
    def make(optimizer: Optimizer, total: int) -> LRScheduler:
        inner = lr.MultiplicativeLR(optimizer, lambda step: 0.9)
        return lr.ChainedScheduler([inner]) if kind is lr.ChainedScheduler else inner

    with pytest.raises(
        ValueError, match=r"MultiplicativeLR can only be stepped, once for each update: it cannot count the tokens"
    ):
        tiny_run(callbacks=[LearningRate(make)], max_tokens=LIMIT, tokens=tokens_of)


def test_beside_another_limit_the_total_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"Give Trainer max_tokens= alone, or max_steps= instead"):
        tiny_run(callbacks=[LearningRate(fall)], max_tokens=LIMIT, tokens=tokens_of, steps=30)


def test_a_schedule_keeps_its_unit_when_the_run_continues(tmp_path: Path) -> None:
    def fit(**limits: Any) -> None:
        trainer = tiny_trainer(
            loader=tiny_loader(7),
            callbacks=[LearningRate(fall), Checkpoint("1 step")],
            directory=tmp_path,
            tokens=tokens_of,
            **limits,
        )
        trainer.fit(resume="auto")

    fit(steps=3)
    with pytest.raises(ValueError, match="made over steps, and would now go over tokens"):
        fit(max_tokens=LIMIT)

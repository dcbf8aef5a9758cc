"""LearningRate: every scheduler of torch, its length taken from the run, and the same bits after a resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, Limit, Warmup
from cadenza.errors import CallbackError
from cadenza.testing import prove_resume, simulate, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import halving, two_optimizers
from tests.long import LONG

TOTAL = 12


class Halving:
    """A function with a memory, which is saved."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 0.5 ** (self.asked // 3)


KINDS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR with a memory": lambda o: LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "ConstantLR": lambda o: ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: SequentialLR(o, [MultiStepLR(o, [2], 0.5), StepLR(o, 2), MultiStepLR(o, [1, 2])], [4, 7]),
    "PolynomialLR": lambda o: PolynomialLR(o, 10, power=2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: ChainedScheduler([ConstantLR(o, 0.1, 4), StepLR(o, 3)], o),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.2, total_steps=TOTAL),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5, cooldown=1),
}


def two_groups(parameters: Any) -> Optimizer:
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.05}]
    return torch.optim.SGD(groups, momentum=0.9)


def scheduled(kind: str, scheduler: Any) -> list[Callback]:
    if kind == "ReduceLROnPlateau":
        return [Evaluate(tiny_loader(1), every="2 steps"), LearningRate(scheduler, monitor="eval/loss")]
    return [LearningRate(scheduler)]


def rates(callbacks: list[Callback], **arguments: Any) -> list[list[float]]:
    seen: list[list[float]] = []
    look = on(Callback.on_step_start)(lambda run: seen.append([group["lr"] for group in run.optimizers[0].param_groups]))
    tiny_run(callbacks=[*callbacks, look], optimizer=two_groups, **{"steps": TOTAL, **arguments})
    return seen


def test_every_kind_that_torch_has_is_among_them() -> None:
    assert {kind.partition(" ")[0] for kind in KINDS} == {*lr_scheduler.__all__} - {"LRScheduler"}


STATEFUL = ("SequentialLR", "ChainedScheduler", "LambdaLR with a memory", "ReduceLROnPlateau", "OneCycleLR", "MultiStepLR")
RESUMED = [one if one in STATEFUL else pytest.param(one, marks=pytest.mark.long) for one in KINDS]


@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_continues_has_the_same_bits(kind: str, warm: bool) -> None:
    def make(directory: Path) -> Trainer:
        callbacks = [*([Warmup("6 steps")] if warm else []), *scheduled(kind, KINDS[kind])]
        return tiny_trainer(callbacks=callbacks, directory=directory, optimizer=two_groups, steps=TOTAL, seed=1)

    prove_resume(make, at=[3, 8] if LONG else [3], in_process=True)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_scheduler_made_outside_continues_with_the_same_bits(kind: str) -> None:
    def make(directory: Path) -> Trainer:
        model = tiny_model()
        optimizer = two_groups(list(model.parameters()))
        callbacks = [Warmup(0.3), *scheduled(kind, KINDS[kind](optimizer))]
        return tiny_trainer(model=model, optimizer=optimizer, callbacks=callbacks, directory=directory, steps=TOTAL, seed=1)

    prove_resume(make, at=[5], in_process=True)


def rate_after(run: Run) -> float:
    return cast("float", run.optimizers[0].param_groups[0]["lr"])


def test_a_schedule_moves_with_each_step_or_each_whole_epoch() -> None:
    assert rate_after(tiny_run(callbacks=[LearningRate(halving)], steps=3)) == pytest.approx(0.1 / 8)
    assert rate_after(tiny_run(callbacks=[LearningRate(halving, per="epoch")], epochs=3)) == pytest.approx(0.1 / 8)
    assert rate_after(tiny_run(callbacks=[LearningRate(halving, per="epoch")], steps=7)) == pytest.approx(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_it_sets_the_rates_that_the_scheduler_sets_by_itself(kind: str) -> None:
    optimizer = two_groups(list(tiny_model().parameters()))
    scheduler, alone = KINDS[kind](optimizer), []
    for step in range(TOTAL):
        alone.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if kind != "ReduceLROnPlateau":
            scheduler.step()
        elif step % 2:
            scheduler.step(1.0)  # type: ignore[arg-type]  # torch types the argument as an epoch
    losses = {"losses": [1.0] * TOTAL} if kind == "ReduceLROnPlateau" else {}
    evaluate = Evaluate(tiny_loader(1), every="2 steps", compute=lambda model, batch: {"loss": torch.tensor(1.0)})
    schedule = LearningRate(KINDS[kind], monitor="eval/loss" if losses else None)
    assert rates([evaluate, schedule], **losses) == alone


def test_a_function_may_ask_for_the_total_of_steps_or_of_epochs() -> None:
    totals: list[int] = []

    def fall(optimizer: Optimizer, total: int) -> LRScheduler:
        totals.append(total)
        return LinearLR(optimizer, 1.0, 0.0, total_iters=total)

    tiny_run(callbacks=[LearningRate(fall)], epochs=3, batches=5, accumulate=2)
    tiny_run(callbacks=[LearningRate(fall)], epochs=3, steps=8)
    tiny_run(callbacks=[LearningRate(fall, per="epoch")], epochs=3)
    tiny_run(callbacks=[LearningRate(fall, per="epoch")], steps=12)
    tiny_run(callbacks=[LearningRate(fall)], steps=7, loader=(batch for batch in tiny_loader(9)))
    tiny_run(callbacks=[LearningRate(fall), Limit(train=2)], epochs=3)  # of the loader that others leave
    assert totals == [9, 8, 3, 2, 7, 6]
    seen = rates([LearningRate(lambda optimizer, total: OneCycleLR(optimizer, 0.2, total_steps=total))], steps=20)
    assert max(rate for rate, _ in seen) == pytest.approx(0.2, rel=0.05)
    assert seen[-1][0] < 1e-5


def test_a_loader_that_is_replaced_too_late_is_an_error() -> None:
    def shorten(run: Any) -> None:
        run.replace_loader(tiny_loader(2))

    late = [LearningRate(lambda optimizer, total: StepLR(optimizer, total)), on(Callback.on_setup)(shorten)]
    with pytest.raises(ValueError, match=r"a schedule for 5 steps, .* the run now has 2\. Put that callback before"):
        tiny_run(callbacks=late)
    tiny_run(callbacks=late[::-1])


def test_a_part_of_a_class_is_not_asked_for_the_total() -> None:
    """Its second argument has a meaning of its own: StepLR would take the total for its step size."""
    halve = partial(StepLR, step_size=1, gamma=0.5)
    assert rates([LearningRate(halve)], steps=2) == [[0.1, 0.05], [0.05, 0.025]]


TOTALS: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "LinearLR": lambda o, total: LinearLR(o, 1.0, 0.0, total_iters=total),
    "CosineAnnealingLR": lambda o, total: CosineAnnealingLR(o, total),
    "LambdaLR": lambda o, total: LambdaLR(o, lambda step: 1 - step / total),
    "SequentialLR": lambda o, total: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 2), CosineAnnealingLR(o, total - 2)], [2]),
    "ChainedScheduler": lambda o, total: ChainedScheduler([ConstantLR(o, 0.1, 2), LinearLR(o, 1.0, 0.0, total)], o),
    "OneCycleLR": lambda o, total: OneCycleLR(o, 0.2, total_steps=total),
}


def longer(
    directory: Path, schedule: Any, *, more: Sequence[Callback] = (), stretch: Any = True, **arguments: Any
) -> tuple[Run, list[list[float]]]:
    """Return the run that continues in `directory`, or begins there, and the rates and momenta of its steps."""
    seen: list[list[float]] = []
    keys = ("lr", "momentum")
    look = on(Callback.on_step_start)(lambda run: seen.append([g[key] for g in run.optimizers[0].param_groups for key in keys]))
    callbacks = [LearningRate(schedule, stretch=stretch), look, *(more or [Checkpoint("4 steps")])]
    trainer = tiny_trainer(callbacks=callbacks, optimizer=two_groups, directory=directory, **arguments)
    return trainer.fit(resume="auto"), seen


def test_a_run_that_is_made_longer_is_refused_before_anything_is_restored(tmp_path: Path) -> None:
    longer(tmp_path, TOTALS["LinearLR"], steps=4, stretch=False)
    message = r"the run was made longer: .* made for 4 steps, and the run now has 8\. .*LearningRate\(\.\.\., stretch=True\)"
    with pytest.raises(ValueError, match=message):
        longer(tmp_path, TOTALS["LinearLR"], steps=8, stretch=False)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    with pytest.raises(ValueError, match="is over after 4 steps, so stretch='rest' has no rest"):
        longer(tmp_path, TOTALS["LinearLR"], steps=8, stretch="rest")


@pytest.mark.parametrize("kind", TOTALS)
def test_a_stretched_schedule_goes_on_as_if_the_run_had_always_been_so_long(kind: str, tmp_path: Path) -> None:
    longer(tmp_path / "a", TOTALS[kind], steps=4)
    run, after = longer(tmp_path / "a", TOTALS[kind], steps=8)
    _, whole = longer(tmp_path / "b", TOTALS[kind], steps=8)
    assert run.progress.step == 8
    assert after == [pytest.approx(rates, abs=1e-9) for rates in whole[4:]]
    assert run.why("schedule stretched").endswith("to the new total of 8 steps; its position is 4")


def interrupting(at: int) -> list[Callback]:
    def interrupt(run: Run) -> None:
        if run.progress.step == at:
            raise KeyboardInterrupt

    return [Checkpoint("1 step"), on(Callback.on_step_start)(interrupt)]


def test_a_stretched_schedule_resumes_as_it_is_and_stretches_again(tmp_path: Path) -> None:
    one_cycle = TOTALS["OneCycleLR"]
    _, whole = longer(tmp_path / "b", one_cycle, epochs=3)
    longer(tmp_path / "a", one_cycle, epochs=1)
    longer(tmp_path / "a", one_cycle, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        longer(tmp_path / "a", one_cycle, epochs=3, more=interrupting(11))
    run, after = longer(tmp_path / "a", one_cycle, epochs=3)
    assert after == [pytest.approx(rates, abs=1e-9) for rates in whole[11:]]
    assert not any(decision.what == "schedule stretched" for decision in run.decisions)


def test_the_rest_of_a_schedule_is_stretched_from_the_rate_at_which_the_run_stopped(tmp_path: Path) -> None:
    def train(name: str, steps: int, stop: int) -> tuple[Run, list[list[float]]]:
        return longer(tmp_path / name, TOTALS["LinearLR"], more=interrupting(stop), stretch="rest", steps=steps)

    for name, stops in {"whole": [(8, 4)], "killed": [(8, 4), (16, 9), (16, 13)]}.items():
        for steps, stop in stops:
            with pytest.raises(KeyboardInterrupt):
                train(name, steps, stop)
    run, whole = train("whole", 16, -1)
    _, rest = train("killed", 16, -1)
    rates = [group[0] for group in whole]
    assert rates == pytest.approx([rates[0] * (1 - step / 12) for step in range(12)])
    assert rest == whole[9:]
    assert run.why("schedule stretched").endswith("to the new total of 24 steps; its position is 12")
    assert rates[0] == pytest.approx(run.optimizers[0].param_groups[0]["initial_lr"] / 2)


def test_a_run_that_is_cut_short_keeps_its_schedule_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_start)(lambda run: seen.append(run.optimizers[0].param_groups[0]["lr"]))

    def fit(steps: int, stop: int) -> list[float]:
        seen.clear()
        callbacks = [LearningRate(TOTALS["LambdaLR"]), look, *interrupting(stop)]
        with suppress(KeyboardInterrupt):
            tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")
        return seen

    fit(10, stop=4)
    with caplog.at_level(logging.WARNING, "cadenza"):
        assert fit(8, stop=6)[:2] == pytest.approx([0.06, 0.05])
    assert "the schedule was made for 10 steps, and the run now has 8: the run ends before the schedule" in caplog.text
    assert fit(10, stop=10) == pytest.approx([0.04, 0.03, 0.02, 0.01])  # back to the first total: nothing to say


class Tracker(Callback):
    aim = None  # a callback of another purpose may have an attribute of this name

    def on_step_end(self, run: Run) -> None: ...


def test_two_for_one_optimizer_are_refused_when_the_trainer_is_made() -> None:
    model = tiny_model()
    optimizers = two_optimizers(model.parameters())
    made = [LearningRate(halving(one)) for one in optimizers]
    clash = r"LearningRate and LearningRate#2 set the learning rate of the same optimizer.*SequentialLR.*optimizer=1"
    for callbacks in ([LearningRate(halving), LearningRate(halving)], [made[1], LearningRate(halving, optimizer=1)]):
        with pytest.raises(CallbackError, match=clash):
            tiny_trainer(model=model, optimizer=optimizers, callbacks=callbacks)
    later = [LearningRate(halving), LearningRate(halving(optimizers[0]))]  # known when the optimizers are made
    with pytest.raises(CallbackError, match=clash):
        tiny_trainer(model=model, optimizer=lambda parameters: optimizers, callbacks=later).fit()
    second = LearningRate(halving, optimizer=1)
    allowed: list[tuple[list[Callback], float]] = [([second], 0.1), ([Tracker(), LearningRate(halving), second], 0.05)]
    for given, rate in allowed:
        run = tiny_run(optimizer=two_optimizers, callbacks=given, steps=1)
        assert [one.param_groups[0]["lr"] for one in run.optimizers] == [rate, 0.05]


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("min", [0.1, 0.2, 0.3], 0.025),
        ("max", [0.1, 0.2, 0.3], 0.1),
        ("min", [3.0, 3.0, 2.0, 2.0], 0.025),
        ("min", [1.0, math.nan, math.nan], 0.025),  # what is no number is no gain
    ],
)
def test_a_plateau_gets_each_result_and_judges_by_its_own_mode(mode: Any, values: list[float], expected: float) -> None:
    def plateau(optimizer: Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, mode=mode, factor=0.5, patience=0)

    for monitor in ("eval/x", ("eval/x", mode)):
        run = simulate([LearningRate(plateau, monitor=cast("Any", monitor))], metrics={"eval/x": values})
        assert rate_after(run) == pytest.approx(expected)

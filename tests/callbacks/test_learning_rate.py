"""LearningRate, with every scheduler of torch, and the finders; that these leave no trace is shown in test_trial.py."""

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
import torch.optim.lr_scheduler as lr
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cadenza import Callback, Run, Trainer, on
from cadenza import callbacks as shipped
from cadenza.callbacks import Checkpoint, Evaluate, FindLearningRate, LearningRate, Limit, Warmup
from cadenza.errors import CallbackError
from cadenza.testing import prove_resume, simulate, tiny_loader, tiny_model, tiny_run, tiny_trainer
from cadenza.timetravel.finders import suggested
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
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR with a memory": lambda o: lr.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.MultiStepLR(o, [2], 0.5), lr.StepLR(o, 2), lr.MultiStepLR(o, [1, 2])], [4, 7]
    ),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 10, power=2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 4), lr.StepLR(o, 3)], o),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.2, total_steps=TOTAL),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5, cooldown=1),
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
    assert {kind.partition(" ")[0] for kind in KINDS} == {*lr.__all__} - {"LRScheduler"}


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


def rate_of(run: Run, optimizer: int = 0) -> float:
    return cast("float", run.optimizers[optimizer].param_groups[0]["lr"])


def test_a_schedule_moves_with_each_step_or_each_whole_epoch() -> None:
    assert rate_of(tiny_run(callbacks=[LearningRate(halving)], steps=3)) == pytest.approx(0.1 / 8)
    assert rate_of(tiny_run(callbacks=[LearningRate(halving, every="1 epoch")], epochs=3)) == pytest.approx(0.1 / 8)
    assert rate_of(tiny_run(callbacks=[LearningRate(halving, every="1 epoch")], steps=7)) == pytest.approx(0.05)


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
        return lr.LinearLR(optimizer, 1.0, 0.0, total_iters=total)

    tiny_run(callbacks=[LearningRate(fall)], epochs=3, batches=5, accumulate=2)
    tiny_run(callbacks=[LearningRate(fall)], epochs=3, steps=8)
    tiny_run(callbacks=[LearningRate(fall, every="1 epoch")], epochs=3)
    tiny_run(callbacks=[LearningRate(fall, every="1 epoch")], steps=12)
    tiny_run(callbacks=[LearningRate(fall)], steps=7, loader=(batch for batch in tiny_loader(9)))
    tiny_run(callbacks=[LearningRate(fall), Limit(train=2)], epochs=3)  # of the loader that others leave
    assert totals == [9, 8, 3, 2, 7, 6]
    seen = rates([LearningRate(lambda optimizer, total: lr.OneCycleLR(optimizer, 0.2, total_steps=total))], steps=20)
    assert max(rate for rate, _ in seen) == pytest.approx(0.2, rel=0.05)
    assert seen[-1][0] < 1e-5
    # The second argument of a part of a class has a meaning of its own: StepLR would take the total for its step size.
    halve = partial(lr.StepLR, step_size=1, gamma=0.5)
    assert rates([LearningRate(halve)], steps=2) == [[0.1, 0.05], [0.05, 0.025]]


def test_a_loader_that_is_replaced_too_late_is_an_error() -> None:
    shorten = on(Callback.on_setup)(lambda run: run.replace_loader(tiny_loader(2)))
    late = [LearningRate(lambda optimizer, total: lr.StepLR(optimizer, total)), shorten]
    with pytest.raises(ValueError, match=r"a schedule for 5 steps, .* the run now has 2\. Put that callback before"):
        tiny_run(callbacks=late)
    tiny_run(callbacks=late[::-1])


TOTALS: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "LinearLR": lambda o, total: lr.LinearLR(o, 1.0, 0.0, total_iters=total),
    "CosineAnnealingLR": lambda o, total: lr.CosineAnnealingLR(o, total),
    "LambdaLR": lambda o, total: lr.LambdaLR(o, lambda step: 1 - step / total),
    "SequentialLR": lambda o, total: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 2), lr.CosineAnnealingLR(o, total - 2)], [2]),
    "ChainedScheduler": lambda o, total: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 2), lr.LinearLR(o, 1.0, 0.0, total)], o),
    "OneCycleLR": lambda o, total: lr.OneCycleLR(o, 0.2, total_steps=total),
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


def test_the_rest_of_a_schedule_made_again_for_another_rate_has_its_position(tmp_path: Path) -> None:
    """With the same total, for which there is nothing to stretch."""
    rest: list[float] = []
    look = on(Callback.on_step_start)(lambda run: rest.append(rate_of(run)))
    for override, more in (({}, interrupting(4)), ({"lr": 1.0}, [look])):
        callbacks = [LearningRate(TOTALS["LinearLR"], stretch="rest"), *more]
        with suppress(KeyboardInterrupt):
            tiny_trainer(callbacks=callbacks, steps=10, directory=tmp_path).fit(resume="auto", override=override)
    assert rest == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_run_that_is_cut_short_keeps_its_schedule_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_start)(lambda run: seen.append(rate_of(run)))

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
        return lr.ReduceLROnPlateau(optimizer, mode=mode, factor=0.5, patience=0)

    for monitor in ("eval/x", ("eval/x", mode)):
        run = simulate([LearningRate(plateau, monitor=cast("Any", monitor))], metrics={"eval/x": values})
        assert rate_of(run) == pytest.approx(expected)


# -- FindLearningRate ---------------------------------------------------------------------------------


def parabola(**arguments: Any) -> Run:
    """A loss of (weight - 2)^2, for which each rate above 1 makes it worse."""

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        return (model.get_parameter("weight") - 2).square().sum()

    return tiny_run(compute_loss=compute_loss, **arguments)


def test_it_suggests_a_rate_with_which_the_loss_falls_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    find = FindLearningRate(start=1e-5, end=100)
    run = parabola(callbacks=[find])
    assert find.suggestion is not None
    assert 1e-3 < find.suggestion < 1
    assert rate_of(run) == 0.1, "it is only a suggestion"
    assert "the run keeps its rate" in run.why("learning rate found")
    assert capsys.readouterr().out == f"FindLearningRate: {run.decisions[-1].why}\n"
    assert f"{find.suggestion:.3g}: " in run.decisions[-1].why
    # The rates grow by a factor, and the test ends when the loss does not come back.
    growth = [after / before for before, after in zip(find.rates, find.rates[1:], strict=False)]
    assert find.rates[0] == 1e-5
    assert growth == pytest.approx([(100 / 1e-5) ** (1 / 99)] * len(growth))
    assert 1 < find.rates[-1] < 100
    assert len(find.losses) == len(find.smoothed) == len(find.rates)
    assert find.smoothed[-1] > 4 * min(find.smoothed)


def test_the_plot_shows_the_smoothed_losses_and_a_last_one_that_is_lost_does_not_flatten_them() -> None:
    find = FindLearningRate(steps=40)
    tiny_run(losses=[4.0 - 0.1 * number for number in range(20)] + [1e6] * 30, callbacks=[find], steps=1)
    bottom, top = find.plot().axes[0].get_ylim()
    assert bottom < min(find.smoothed)
    assert max(find.smoothed) < top < 1e6


@pytest.mark.parametrize(
    ("losses", "steps", "tested"),
    [([1.0] * 20 + [math.nan] + [1.0] * 100, 100, 21), ([-1.0] * 40, 20, 20)],
    ids=["no number ends the test", "below zero"],
)
def test_the_test_alone_needs_a_stop(losses: list[float], steps: int, tested: int) -> None:
    find = FindLearningRate(steps=steps)
    stop = on(Callback.on_fit_start)(lambda run: run.stop("only the test"))
    run = tiny_run(losses=losses, callbacks=[find, shipped.StopOnNonFinite("raise"), stop])
    assert run.progress.step == 0
    assert len(find.losses) == tested


def test_where_no_rate_helps_there_is_no_suggestion() -> None:
    find = FindLearningRate(steps=20, apply=True)
    run = tiny_run(losses=[float(number) for number in range(1, 60)], callbacks=[find], steps=1)
    assert (find.suggestion, rate_of(run)) == (None, 0.1)
    assert "and the loss fell with none of them; the run keeps its rate" in run.why("learning rate not found")


def test_the_suggestion_is_where_the_smoothed_loss_falls_most_or_a_tenth_of_its_lowest() -> None:
    rates = [10.0**power for power in range(-6, 2)]
    assert suggested(rates, [5.0, 5.0, 4.9, 1.0, 0.9, 0.5, 9.0, 1.0]) == pytest.approx(1e-4)
    assert suggested(rates, [5.0, 5.0, 4.9, 4.8, 4.7, 0.5, 9.0, 1.0]) == pytest.approx(1e-2)
    assert suggested(rates, [5.0, 5.0, 4.9, 4.8, 4.7, 4.6, math.nan, math.inf])
    assert suggested(rates, [1.0] * 8) is None
    assert suggested([], []) is None


def test_applied_it_is_the_rate_from_which_a_schedule_starts_and_groups_keep_their_proportion() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": rate} for one, rate in zip(parameters, (0.1, 0.01), strict=True)])

    find = FindLearningRate(start=1e-4, end=1, apply=True)
    run = parabola(callbacks=[find], optimizer=groups)
    first, second = (group["lr"] for group in run.optimizers[0].param_groups)
    assert (first, second) == (find.suggestion, pytest.approx(first / 10))
    halve = LearningRate(lambda optimizer: lr.LambdaLR(optimizer, lambda step: 0.5**step))
    cycle = LearningRate(
        lambda o, total: lr.OneCycleLR(o, o.param_groups[0]["lr"], total_steps=total, pct_start=0.5), optimizer=1
    )
    run = parabola(callbacks=[halve, cycle, find], optimizer=two_optimizers, steps=3)
    assert find.suggestion is not None
    assert rate_of(run) == pytest.approx(find.suggestion / 8)
    assert run.optimizers[1].param_groups[0]["initial_lr"] == pytest.approx(0.1 / 25)
    assert "the run starts with it" in run.why("learning rate found")


def test_a_scheduler_given_as_it_is_cannot_start_anew() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = LearningRate(lr.StepLR(optimizer, 3))
    with pytest.raises(ValueError, match=r"this StepLR has already started\. Give LearningRate a function"):
        tiny_run(model=model, optimizer=optimizer, callbacks=[schedule, FindLearningRate(apply=True)])
    tiny_run(model=model, optimizer=optimizer, callbacks=[schedule, FindLearningRate(steps=10)])


@pytest.mark.parametrize("apply", [False, True])
def test_a_run_that_continues_is_not_tested_again(apply: bool) -> None:
    finders: list[FindLearningRate] = []

    def make(directory: Path) -> Trainer:
        finders.append(FindLearningRate(start=1e-3, steps=12, apply=apply))
        schedule = LearningRate(lambda optimizer: lr.StepLR(optimizer, 2, 0.5))
        return tiny_trainer(callbacks=[finders[-1], schedule], directory=directory, epochs=2, seed=1)

    prove_resume(make, at=[1, 4], in_process=True)
    assert len({tuple(finder.losses) for finder in finders}) == 1


def test_the_curve_is_drawn_and_logged_if_a_callback_listens_to_records() -> None:
    pictures: list[Any] = []
    take = on(Callback.on_log)(lambda run, record: pictures.extend(record.media.values()))
    find = FindLearningRate(start=1e-4, end=1)
    parabola(callbacks=[find, take])
    axes = pictures[0].figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["loss", "smoothed", f"suggestion {find.suggestion:.2g}"]
    assert axes.get_xscale() == "log"
    assert list(axes.lines[1].get_ydata()) == find.smoothed
    assert "learning_rate/range_test" not in parabola(callbacks=[FindLearningRate(steps=10)]).history


@pytest.mark.parametrize(
    ("scheduler", "length"),
    [
        (lambda one: lr.CosineAnnealingLR(one, 6), "T_max=6"),
        (lambda one: lr.MultiStepLR(one, [2, 4]), "milestones=[2, 4]"),
        (lambda one: lr.StepLR(one, 2), "step_size=2"),
        (lambda one: lr.LinearLR(one, 1.0, 0.1, total_iters=6), "total_iters=6"),
        (lambda one: lr.SequentialLR(one, [lr.ConstantLR(one, 0.1, 2), lr.CosineAnnealingLR(one, 4)], [2]), "T_max=4"),
        (lambda one: lr.CosineAnnealingLR(one, 120), None),
        (lambda one: lr.MultiStepLR(one, [50, 100]), None),
        (lambda one: lr.StepLR(one, 1, gamma=0.99), None),
        (lambda one: lr.LinearLR(one, 0.1, 1.0, total_iters=5), None),
        (lambda one: lr.ExponentialLR(one, 0.99), None),
    ],
)
def test_a_schedule_that_is_written_in_epochs_and_stepped_after_each_update_is_questioned(
    scheduler: Any, length: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cadenza"):
        tiny_run(epochs=6, batches=20, callbacks=[LearningRate(scheduler)])
        assert (f"{length} fits 6 epochs: every='1 epoch' steps it" in caplog.text) == (length is not None)
        caplog.clear()
        tiny_run(epochs=6, batches=20, callbacks=[LearningRate(scheduler, every="1 epoch")])
    assert "fits 6" not in caplog.text


def test_a_group_that_a_hook_adds_in_the_update_keeps_its_rate_beside_a_warmup() -> None:
    extra = torch.nn.Parameter(torch.zeros(1))

    @on(Callback.on_after_optimizer_step, at=2)
    def add(run: Run) -> None:
        run.optimizers[0].add_param_group({"params": [extra], "lr": 0.01})

    run = tiny_run(steps=5, callbacks=[add, Warmup("4 steps")])
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1, 0.01]

"""Histograms: the very weights and gradients of their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza import Callback, Histogram, Hooks, Run, on
from cadenza.callbacks import Checkpoint, ClipGradients, Histograms
from cadenza.errors import ScheduleError
from cadenza.hooks.dispatch import hooks_of
from cadenza.records.record import Record
from cadenza.sinks import TensorBoard
from cadenza.testing import tiny_run, tiny_trainer

Seen = dict[tuple[int, str], list[float]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))


def logged(*callbacks: Callback, **arguments: Any) -> Seen:
    """Return the values of each histogram, by step and name."""
    seen: Seen = {}

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        for name, value in record.media.items():
            assert isinstance(value, Histogram)
            seen[record.step, name] = value.values.flatten().tolist()

    tiny_run(callbacks=[*callbacks, look], **arguments)
    return seen


def test_parameters_are_those_after_the_step() -> None:
    weights: Seen = {}

    @on(Callback.on_step_end, every=2)
    def look(run: Run) -> None:
        weights[run.progress.step, "parameters/weight"] = run.model.get_parameter("weight").flatten().tolist()

    assert logged(look, Histograms("2 steps", parameters="weight"), steps=5) == weights


def test_gradients_are_those_that_the_optimizer_gets_in_the_same_step() -> None:
    applied: dict[tuple[int, str], Any] = {}
    before: list[float] = []

    @on(Callback.on_step_start)
    def begin(run: Run) -> None:
        before[:] = run.model.get_parameter("weight").flatten().tolist()

    @on(Callback.on_step_end, every=3)
    def end(run: Run) -> None:
        [after] = run.model.get_parameter("weight").flatten().tolist()
        applied[run.progress.step, "gradients/weight"] = [pytest.approx((before[0] - after) / 0.1, rel=1e-4)]

    histograms = Histograms("3 steps", parameters="weight", weights=False, gradients=True)
    seen = logged(begin, end, histograms, steps=7)
    assert seen == applied
    assert list(seen) == [(3, "gradients/weight"), (6, "gradients/weight")]


def test_gradients_of_a_step_of_several_batches_are_complete() -> None:
    histograms = Histograms("2 steps", gradients=True, weights=False)
    together = torch.linspace(0, 1, 8).reshape(1, 8, 1)
    seen = logged(histograms, loader=list(together[0].split(2)), accumulate=4, compute_loss=square, epochs=2)
    whole = logged(histograms, loader=list(together), compute_loss=square, epochs=2)
    assert seen == {key: pytest.approx(values, rel=1e-5) for key, values in whole.items()}
    assert list(seen) == [(2, "gradients/weight"), (2, "gradients/bias")]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) ** 2).mean()
    return loss


def test_what_clips_before_it_is_seen_and_what_clips_after_it_is_not() -> None:
    def norm(*callbacks: Callback) -> float:
        return float(torch.tensor(list(logged(*callbacks, steps=1).values())).norm())

    histograms = Histograms("1 step", gradients=True, weights=False)
    assert norm(ClipGradients(max_norm=0.1), histograms) == pytest.approx(0.1, rel=1e-4)
    assert norm(histograms, ClipGradients(max_norm=0.1)) > 0.5


def test_both_stand_in_one_record() -> None:
    assert list(logged(Histograms("2 steps", gradients=True), steps=2)) == [
        (2, "gradients/weight"),
        (2, "gradients/bias"),
        (2, "parameters/weight"),
        (2, "parameters/bias"),
    ]


def test_parameters_may_be_looked_at_once_an_epoch() -> None:
    assert list(logged(Histograms(parameters="bias"), epochs=2)) == [(5, "parameters/bias"), (10, "parameters/bias")]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0.weight", "0.bias", "1.weight"]),
        ("1.*", ["1.weight", "1.bias"]),
        (["0.weight", "*bias"], ["0.weight", "0.bias", "1.bias"]),
        (lambda name, parameter: parameter.ndim == 2, ["0.weight", "1.weight"]),
    ],
)
def test_the_parameters_are_chosen_by_pattern_or_function(chosen: Any, names: list[str]) -> None:
    model = network()
    model.get_parameter("1.bias").requires_grad_(False)
    model.get_parameter("1.bias").grad = None
    seen = logged(Histograms("1 step", parameters=chosen), model=model, steps=1)
    assert [name for _, name in seen] == [f"parameters/{name}" for name in names]


def test_a_parameter_without_gradient_has_no_histogram_of_it() -> None:
    model = network()
    model.get_parameter("1.bias").requires_grad_(False)
    seen = logged(Histograms("1 step", parameters="*", weights=False, gradients=True), model=model, steps=1)
    assert [name for _, name in seen] == ["gradients/0.weight", "gradients/0.bias", "gradients/1.weight"]


def test_several_updates_in_a_step_give_each_parameter_its_own_gradients() -> None:
    applied: list[float] = []

    def turns(run: Run, batch: Any) -> Tensor:
        for optimizer in run.optimizers:
            loss = square(run.model, batch[0])
            run.backward(loss)  # adds to the gradients of both
            [parameter] = optimizer.param_groups[0]["params"]
            before = parameter.item()
            run.update(optimizer)
            applied.append((before - parameter.item()) / 0.1)
        return loss.detach()

    def one_for_each(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]

    histograms = Histograms("2 steps", gradients=True, weights=False)
    seen = logged(histograms, step_fn=turns, optimizer=one_for_each, steps=3)
    assert list(seen) == [(2, "gradients/weight"), (2, "gradients/bias")]
    assert [value for values in seen.values() for value in values] == pytest.approx(applied[2:4], rel=1e-4)


def test_a_continued_run_has_them_at_the_same_steps(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        seen.extend((record.step, name) for name in record.media)

    def fit(steps: int) -> None:
        callbacks = [Histograms("3 steps", parameters="bias", gradients=True), Checkpoint(every="1 step"), look]
        tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")

    for steps in (2, 4, 7):
        fit(steps)
    assert seen == [(step, f"{kind}/bias") for step in (3, 6) for kind in ("gradients", "parameters")]


def test_in_other_steps_nothing_of_it_is_called() -> None:
    hooks = Hooks([Histograms("1000 steps", gradients=True)])
    assert {moment.__name__ for moment in hooks.by_moment} == {"on_fit_start", "on_before_optimizer_step", "on_step_end"}
    run = tiny_run(callbacks=[histograms := Histograms("4 steps", gradients=True)], steps=9)
    calls = {listener.moment.__name__: listener.calls for heard in hooks_of(run).by_moment.values() for listener in heard}
    assert calls == {"on_fit_start": 0, "on_before_optimizer_step": 2, "on_step_end": 2}  # unfiltered ones are not counted
    assert histograms.gradients is not None
    assert str(histograms.gradients) == "every 4 steps"


def test_tensorboard_shows_every_value(tmp_path: Path) -> None:
    run = tiny_run(model=network(), callbacks=[Histograms("2 steps", gradients=True), TensorBoard(tmp_path)], steps=2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["histograms"]) == 8
    [event] = events.Histograms("parameters/0.weight")
    weights = run.model.get_parameter("0.weight")
    counted = event.histogram_value
    assert (event.step, counted.num) == (2, 3)
    assert (counted.min, counted.max) == (weights.min().item(), weights.max().item())


@pytest.mark.parametrize("every", ["1 epoch", "0.5 epoch", "100 samples", "1 min", lambda run: True])
def test_gradients_at_a_cadence_without_steps_are_an_error(every: Any) -> None:
    with pytest.raises(ScheduleError, match=r'needs an interval in steps, such as "500 steps"; got .*use a second Histograms'):
        Histograms(every, gradients=True)
    Histograms(every)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="nothing to log"):
        Histograms(weights=False)
    for wrong in ([], [3]):
        with pytest.raises(
            TypeError,
            match=r"must be a pattern such as 'encoder\.\*', a sequence of patterns, or a function",
        ):
            Histograms(parameters=wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"no parameter of the model matches 'wieght'\. Did you mean 'weight'"):
        tiny_run(callbacks=[Histograms(parameters=["bias", "wieght"])])

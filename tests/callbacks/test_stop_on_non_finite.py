"""StopOnNonFinite: what is not finite never reaches the weights, and it is said where it came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on, supervised
from cadenza.callbacks import ClipGradients, Derive, LearningRate, StopOnNonFinite
from cadenza.engine.session import session_of
from cadenza.errors import LossError, NonFiniteError
from cadenza.optim.finite import all_finite, first_not_finite, tensors_at
from cadenza.status.plain import same
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.reads import reads_in

Poison = Callable[[nn.Module, Any], Tensor]


def poisoned_gradient(bad: float, at: int) -> Poison:
    """Return a loss that is finite, while the weight's gradient in batch `at` is not."""
    batches = iter(range(1, 1000))

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        weight = model.get_parameter("weight")
        if next(batches) == at and weight.requires_grad:
            loss = loss + Poisoned.apply(weight, bad).sum() * 0.0  # type: ignore[no-untyped-call]  # torch's own
        return loss

    return compute_loss


class Poisoned(torch.autograd.Function):
    """Zeros forward, and one bad number backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.bad), None


def decided(run: Run, what: str) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == what]


# -- the loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_weights(bad: float) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss * next(factors)

    recorder = Recorder(Callback.on_after_backward)
    factors = iter([1.0, bad, 1.0])
    run = tiny_run(compute_loss=compute_loss, callbacks=[StopOnNonFinite("skip"), recorder], batches=3)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    assert len(recorder.names) == 2
    assert run.why("batch skipped").endswith(f"the loss is {bad}")


def test_it_stops_or_raises_if_that_is_wanted() -> None:
    run = tiny_run(losses=[1.0, math.nan, 1.0], callbacks=[StopOnNonFinite()])
    assert run.outcome is not None
    assert (run.outcome.kind, run.progress.step) == ("stopped", 2)
    with pytest.raises(NonFiniteError, match=r"the loss is nan in batch 2\. Lower the learning rate"):
        tiny_run(losses=[1.0, math.nan], callbacks=[StopOnNonFinite("raise")])
    with pytest.raises(ValueError, match="action must be 'stop', 'raise' or 'skip'; got 'ignore'"):
        StopOnNonFinite(cast("Any", "ignore"))


def test_the_first_output_that_is_not_finite_is_named_with_its_path() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        predictions = model(batch[0])
        hidden = {"kind": "two layers", "layers": [predictions * 1.0, predictions / torch.tensor([[1.0], [0.0]])]}
        return {"loss": predictions.mean() * math.nan, "hidden": hidden, "predictions": predictions * math.nan}

    run = tiny_run(compute_loss=compute_loss, callbacks=[StopOnNonFinite()])
    assert decided(run, "stopped") == ["the loss is nan; outputs['hidden']['layers'][1] is -inf, first at index (1, 0)"]


def test_a_weight_that_is_broken_already_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model.get_parameter("1.weight")[0, 2] = math.inf
        model.get_parameter("1.bias")[0] = math.nan
    run = tiny_run(model=model, compute_loss=supervised(nn.functional.mse_loss), callbacks=[StopOnNonFinite("skip")], steps=1)
    (said,) = decided(run, "batch skipped")
    assert "; the weight '1.weight' is inf, first at index (0, 2), already" in said
    assert said.startswith("the loss is nan; outputs['predictions'] is nan, first at index (0, 0)")


def test_the_statistics_of_layers_are_those_from_before_the_batch() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    seen: list[dict[str, Tensor]] = []

    @on(Callback.on_batch_start)
    def keep(run: Run, batch: Any) -> None:
        seen.append({name: buffer.clone() for name, buffer in run.model.named_buffers()})

    @on(Callback.on_batch_start, at=3)
    def poison(run: Run, batch: Any) -> None:
        batch[0].fill_(math.nan)

    run = tiny_run(model=model, callbacks=[keep, poison, StopOnNonFinite("skip")], steps=5)
    assert all(torch.equal(seen[2][name], buffer) for name, buffer in seen[3].items())
    assert not any(torch.equal(seen[3][name], buffer) for name, buffer in seen[4].items())
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    [why] = decided(run, "batch skipped")
    assert "already" not in why


def test_a_batch_that_is_broken_is_named() -> None:
    loader = tiny_loader(1)
    loader[0][1][1, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"the loss is nan in batch 1; batch\[1\] is nan, first at index \(1, 0\)\. Lower"):
        tiny_run(loader=loader, callbacks=[StopOnNonFinite("raise")])


def test_derived_outputs_that_were_not_read_are_not_computed_for_the_check() -> None:
    asked: list[Run] = []
    tiny_run(losses=[math.nan], callbacks=[Derive(costly=asked.append), StopOnNonFinite()])
    assert asked == []


def test_a_second_backward_of_a_step_fn_is_looked_at_as_well() -> None:
    def step_fn(run: Run, batch: Any) -> Tensor:
        first = nn.functional.mse_loss(run.model(batch[0]), batch[1])
        run.backward(first)
        run.update()
        run.backward(run.model(batch[0]).mean() * math.nan)
        run.update()
        return first

    run = tiny_run(step_fn=step_fn, callbacks=[StopOnNonFinite("skip")], steps=2)
    assert decided(run, "batch skipped") == ["the loss is nan", "the loss is nan"]
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_a_step_fn_that_is_stopped_does_not_go_on_in_the_messages(caplog: pytest.LogCaptureFixture) -> None:
    def step_fn(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model(batch[0]).mean() * (math.nan if run.progress.step == 1 else 1.0)
        run.backward(loss)
        run.update()
        return loss

    run = tiny_run(step_fn=step_fn, callbacks=[StopOnNonFinite()], steps=4)
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert "goes on" not in caplog.text


def test_the_loop_still_reports_a_loss_that_is_none() -> None:
    with pytest.raises(LossError, match=r"the loss must be a tensor of shape \(\) that has a gradient; got 'float'"):
        tiny_run(compute_loss=lambda model, batch: {"loss": 1.0}, callbacks=[StopOnNonFinite()])


# -- gradients ----------------------------------------------------------------------------------------


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.1, fused=True),
    lambda parameters: torch.optim.RMSprop(parameters, 0.1, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    lambda parameters: torch.optim.NAdam(parameters, 0.1),
    lambda parameters: torch.optim.Adafactor(parameters, 0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(
    optimizer: Callable[[Any], torch.optim.Optimizer], bad: float
) -> None:
    kept: list[Any] = []

    @on(Callback.on_step_end)
    def keep(run: Run) -> None:
        state = {"model": dict(run.model.state_dict()), "optimizer": run.optimizers[0].state_dict()["state"]}
        kept.append(copied(state))

    callbacks = [StopOnNonFinite("skip", gradients=True), keep]
    run = tiny_run(compute_loss=poisoned_gradient(bad, at=2), callbacks=callbacks, optimizer=optimizer, steps=3)
    before, poisoned, after = kept
    assert same(before, poisoned)
    assert not same(poisoned["model"], after["model"])
    assert decided(run, "step skipped") == [f"the gradient of 'weight' is {bad}, first at index (0, 0)"]
    assert run.progress.step == 3


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def test_without_looking_the_gradient_breaks_the_weights() -> None:
    run = tiny_run(compute_loss=poisoned_gradient(math.nan, at=2), callbacks=[StopOnNonFinite("skip")], steps=2)
    assert run.model.get_parameter("weight").isnan().all()


def test_it_stops_or_raises_for_a_gradient_too_and_nothing_is_applied() -> None:
    trainer = tiny_trainer(compute_loss=poisoned_gradient(math.inf, at=1), callbacks=[StopOnNonFinite(gradients=True)])
    run = trainer.fit()
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "the gradient of 'weight' is inf, first at index (0, 0)")
    assert run.model.get_parameter("weight").item() == 0.5
    raising = StopOnNonFinite("raise", gradients=True)
    with pytest.raises(NonFiniteError, match=r"the gradient of 'weight' is inf, first at index \(0, 0\) in step 2\. Lower"):
        tiny_run(compute_loss=poisoned_gradient(math.inf, at=2), callbacks=[raising])


def test_it_looks_before_clipping_spreads_it_over_all_gradients() -> None:
    callbacks = [ClipGradients(1.0), StopOnNonFinite("skip", gradients=True)]
    model = nn.Sequential()
    model.add_module("other", nn.Linear(1, 1))
    model.register_parameter("weight", nn.Parameter(torch.zeros(1, 1)))
    run = tiny_run(model=model, compute_loss=poisoned_gradient(math.nan, at=1), callbacks=callbacks, steps=1)
    assert decided(run, "step skipped") == ["the gradient of 'weight' is nan, first at index (0, 0)"]


def test_a_step_that_was_skipped_does_not_move_the_schedule() -> None:
    updated: list[bool] = []
    halve = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    look = on(Callback.on_step_end)(lambda run: updated.append(session_of(run).step.updated))
    callbacks = [halve, look, StopOnNonFinite("skip", gradients=True)]
    run = tiny_run(compute_loss=poisoned_gradient(math.nan, at=2), callbacks=callbacks, steps=3)
    assert updated == [True, False, True]
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_the_gradients_of_a_group_are_looked_at_once_when_they_are_complete() -> None:
    callbacks = [StopOnNonFinite("skip", gradients=True)]
    run = tiny_run(compute_loss=poisoned_gradient(math.nan, at=1), callbacks=callbacks, accumulate=2, batches=4)
    assert [decision.when.step for decision in run.decisions if decision.what == "step skipped"] == [0]
    assert run.progress.step == 2


def test_a_parameter_outside_of_the_model_is_named_so() -> None:
    stray = nn.Parameter(torch.zeros(2))

    @on(Callback.on_after_backward)
    def poison(run: Run, outputs: Any) -> None:
        stray.grad = torch.tensor([0.0, math.nan])

    model = tiny_model()
    optimizer = torch.optim.SGD([*model.parameters(), stray], 0.1)
    run = tiny_run(model=model, optimizer=optimizer, callbacks=[poison, StopOnNonFinite("skip", gradients=True)], steps=1)
    assert decided(run, "step skipped") == ["the gradient of a parameter outside of the model is nan, first at index (1)"]


def test_in_fp16_the_scaler_does_it_already() -> None:
    with pytest.raises(ValueError, match=r"in fp16 the scaler already skips .* expected StopOnNonFinite\(gradients=False"):
        tiny_run(precision="fp16", callbacks=[StopOnNonFinite(gradients=True)])
    tiny_run(precision="fp16", callbacks=[StopOnNonFinite()])


@pytest.mark.parametrize(("gradients", "reads"), [(False, 3 * 2), (True, 3 * (2 + 1))])
def test_it_waits_for_the_device_once_a_batch_and_for_gradients_once_more_a_step(gradients: bool, reads: int) -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3), nn.Linear(3, 1))

    def reads_with(callbacks: list[Callback]) -> int:
        return reads_in(lambda: tiny_run(model=model, callbacks=callbacks, steps=3, accumulate=2, batches=6))

    assert reads_with([StopOnNonFinite(gradients=gradients)]) - reads_with([]) == reads  # a run itself reads some at its ends


# -- finding numbers that are not finite --------------------------------------------------------------


def test_large_numbers_whose_squares_overflow_are_finite() -> None:
    assert all_finite([torch.full((4,), 1e30), torch.full((4,), -1e38)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_among_kinds_of_tensors_is_found(bad: float) -> None:
    rows = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (3, 2), check_invariants=True
    )
    fine = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), torch.ones((), dtype=torch.float64), rows]
    assert all_finite(fine)
    assert all_finite([])
    assert not all_finite([*fine, torch.tensor([1.0, bad])])
    broken = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([[3.0, bad]]), (3, 2), check_invariants=True)
    assert not all_finite([broken])
    assert first_not_finite([("rows", rows), ("broken", broken)]) == f"broken is {bad}, first at index (2, 1)"
    assert first_not_finite([("one", torch.tensor(bad))]) == f"one is {bad}"


def test_every_tensor_in_a_nested_value_has_a_path() -> None:
    value = {"a": [torch.ones(1), ("text", torch.ones(2))], "n": None, "b": torch.ones(3)}
    assert [path for path, _ in tensors_at(value, "outputs")] == ["outputs['a'][0]", "outputs['a'][1][1]", "outputs['b']"]

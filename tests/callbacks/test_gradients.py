"""ClipGradients: gradients within bounds. StopOnNonFinite: what is not finite never reaches the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on, supervised
from cadenza.callbacks import ClipGradients, Derive, LearningRate, StopOnNonFinite
from cadenza.engine.session import session_of
from cadenza.errors import LossError, NonFiniteError
from cadenza.optim.non_finite import all_finite, first_not_finite
from cadenza.status.decisions import Outcome
from cadenza.status.encoding import same
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run
from tests.callbacks.parts import Reads, two_layers


def gradients_after(*clip: Callback, **arguments: Any) -> dict[str, Tensor]:
    """Return the gradients, by the parameters' names, that one update has used."""
    seen: dict[str, Tensor] = {}

    @on(Callback.on_after_optimizer_step)
    def look(run: Run) -> None:
        seen.update({name: one.grad.clone() for name, one in run.model.named_parameters() if one.grad is not None})

    tiny_run(callbacks=[*clip, look], steps=1, **arguments)
    return seen


def together(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_scaled_down_to_their_norm_together(norm_type: float) -> None:
    clip = ClipGradients(max_norm=0.5, norm_type=norm_type)
    free, clipped = together(gradients_after()), together(gradients_after(clip))
    assert clip.norm is not None
    torch.testing.assert_close(clip.norm, free.norm(norm_type))
    torch.testing.assert_close(clipped, free * 0.5 / free.norm(norm_type), rtol=1e-4, atol=1e-6)


def test_gradients_are_cut_off_by_value_or_clipped_once_a_step_when_they_are_complete() -> None:
    free, clipped = together(gradients_after()), together(gradients_after(ClipGradients(max_value=0.65)))
    torch.testing.assert_close(clipped, free.clamp(-0.65, 0.65))
    assert not torch.equal(clipped, free)
    whole = gradients_after(ClipGradients(max_norm=0.5), batches=1, loader=tiny_loader(1, batch_size=4))
    parts = gradients_after(ClipGradients(max_norm=0.5), accumulate=2, loader=tiny_loader(2, batch_size=2))
    torch.testing.assert_close(together(parts), together(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"max_norm": 0.5}, {"max_value": 0.5, "log": "norm", "log_every": "1 step"}])
def test_a_step_without_gradients_has_nothing_to_clip(arguments: dict[str, Any]) -> None:
    clip = ClipGradients(**arguments)
    tiny_run(step_fn=lambda run, batch: (run.update(), torch.zeros(()))[1], callbacks=[clip])
    assert clip.norm is None


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (["0.*"], {"0.weight", "0.bias"}),
        (["0.weight", "0.b*"], {"0.weight", "0.bias"}),
        (lambda name, parameter: name.startswith("0."), {"0.weight", "0.bias"}),
        (lambda name, parameter: parameter.ndim == 1, {"0.bias", "1.bias"}),
    ],
)
def test_only_the_chosen_parameters_are_clipped(chosen: Any, names: set[str]) -> None:
    free = gradients_after(model=two_layers())
    clipped = gradients_after(ClipGradients(max_norm=1e-3, parameters=chosen), model=two_layers())
    norm = together({name: free[name] for name in names}).norm()
    for name, gradient in clipped.items():
        torch.testing.assert_close(gradient, free[name] * 1e-3 / norm if name in names else free[name], rtol=1e-3, atol=1e-7)


def test_several_have_parameters_and_bounds_of_their_own_and_serve_another_model() -> None:
    one, two = ClipGradients(1e-3, parameters="*weight"), ClipGradients(2e-3, parameters=["*bias"])
    for model in (two_layers(), nn.Linear(1, 1)):
        clipped = gradients_after(one, two, model=model)
        for kind, bound in (("weight", 1e-3), ("bias", 2e-3)):
            part = together({name: gradient for name, gradient in clipped.items() if name.endswith(kind)})
            assert part.norm().item() == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("arguments", [{"max_norm": 0.01}, {"max_value": 0.01}])
def test_the_norm_before_clipping_is_logged_at_its_cadence_but_not_without_gradients(arguments: dict[str, Any]) -> None:
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("not this one"))
    free = together(gradients_after()).norm().item()
    run = tiny_run(callbacks=[skip, ClipGradients(**arguments, log="train/grad_norm", log_every="1 step")], steps=3)
    assert run.history["train/grad_norm"][0] == pytest.approx((1, free))
    assert [step for step, _ in run.history["train/grad_norm"]] == [1, 3]
    run = tiny_run(callbacks=[ClipGradients(**arguments, log="norm", log_every="2 steps")], steps=5)
    assert [step for step, _ in run.history["norm"]] == [2, 4]
    assert tiny_run(callbacks=[ClipGradients(**arguments)], steps=1).history.names == []
    # Neither clipping nor logging waits for the device.
    clip = ClipGradients(**arguments, log="norm", log_every="1 step")
    before, after = (on(one)(lambda run: seen.append(reads.count)) for one in (Callback.on_step_start, Callback.on_step_end))
    seen: list[int] = []
    with Reads() as reads:
        run = tiny_run(callbacks=[before, clip, after], steps=3, seed=1)  # without a seed one is drawn at the start, and read
    # The first update of a run reads whether there is a gradient. What is logged is read at once: it lies on the host already.
    assert seen == [0, 2, 2, 3, 3, 4]
    assert len(run.history["norm"]) == 3


# -- beside torch -------------------------------------------------------------------------------------


class Own(Tensor):
    """A tensor for which torch uses no foreach function."""


def gradients_of(kind: str) -> list[Tensor]:
    torch.manual_seed(5)
    made = [torch.randn(4, 3), torch.randn(7), torch.randn(2, 2, 2), torch.randn(())]
    kinds = {
        "large": made,
        "small": [one * 0.01 for one in made],
        "not finite": [*made, torch.tensor([math.nan, 1.0])],
        "infinite": [*made, torch.tensor([math.inf, 1.0])],
        "bfloat16": [one.bfloat16() for one in made],
        "of two kinds": [made[0].bfloat16(), *made[1:], made[0].double()],
        "of a subclass": [made[0], made[1].as_subclass(Own), made[2]],
    }
    return kinds[kind]


class Weights(nn.Module):
    """Parameters that have these gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        gradients = [one.as_subclass(Tensor) for one in gradients_of(kind)]
        self.held = nn.ParameterList(nn.Parameter(torch.zeros_like(one)) for one in gradients)
        for parameter, gradient in zip(self.held, gradients_of(kind), strict=True):
            parameter.grad = gradient

    def forward(self, inputs: Tensor) -> Any:
        return inputs + sum(one.sum() for one in self.held)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("kind", ["large", "small", "not finite", "infinite", "bfloat16", "of two kinds", "of a subclass"])
def test_the_bits_are_those_of_torch(kind: str, norm_type: float) -> None:
    model, expected, clip = Weights(kind), Weights(kind), ClipGradients(0.5, norm_type=norm_type)
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5, norm_type)
    clipped: list[Tensor] = []

    @on(Callback.on_after_backward)
    def put(run: Run, outputs: Any) -> None:
        for one, gradient in zip(run.model.parameters(), gradients_of(kind), strict=True):
            one.grad = gradient

    @on(Callback.on_before_optimizer_step)
    def take(run: Run) -> None:
        for one in run.model.parameters():
            clipped.append(cast("Tensor", one.grad))
            one.grad = None  # SGD updates no subclass

    tiny_run(model=model, callbacks=[put, clip, take], steps=1)
    pairs = zip([clip.norm, *clipped], [norm, *(one.grad for one in expected.parameters())], strict=True)
    assert all(torch.allclose(cast("Tensor", one), cast("Tensor", other), 0, 0, equal_nan=True) for one, other in pairs)


# -- StopOnNonFinite ----------------------------------------------------------------------------------


def poisoned_gradient(bad: float, at: int) -> Callable[[nn.Module, Any], Tensor]:
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


def test_it_stops_or_raises_if_that_is_wanted_and_computes_no_output_for_it() -> None:
    asked: list[Run] = []
    run = tiny_run(losses=[1.0, math.nan, 1.0], callbacks=[Derive(costly=asked.append), StopOnNonFinite()])
    assert run.outcome == Outcome("stopped", "the loss is nan")
    assert run.progress.step == 2
    half = tiny_run(precision="fp16", losses=[1.0, math.nan], callbacks=[StopOnNonFinite()])  # the scaler sees gradients alone
    assert half.outcome == Outcome("stopped", "the loss is nan")
    with pytest.raises(NonFiniteError, match=r"the loss is nan in batch 2\. Lower the learning rate"):
        tiny_run(losses=[1.0, math.nan], callbacks=[Derive(costly=asked.append), StopOnNonFinite("raise")])
    assert asked == []
    with pytest.raises(LossError, match=r"the loss must be a tensor of shape \(\) that has a gradient; got 'float'"):
        tiny_run(compute_loss=lambda model, batch: {"loss": 1.0}, callbacks=[StopOnNonFinite()])


def test_the_first_output_that_is_not_finite_is_named_with_its_path() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        predictions = model(batch[0])
        layers = [predictions * 1.0, ("text", predictions / torch.tensor([[1.0], [0.0]]))]
        hidden = {"kind": "two layers", "none": None, "layers": layers}
        return {"loss": predictions.mean() * math.nan, "hidden": hidden, "predictions": predictions * math.nan}

    run = tiny_run(compute_loss=compute_loss, callbacks=[StopOnNonFinite()])
    assert decided(run, "stopped") == ["the loss is nan; outputs['hidden']['layers'][1][1] is -inf, first at index (1, 0)"]


def test_a_weight_or_a_batch_that_is_broken_already_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model.get_parameter("1.weight")[0, 2] = math.inf
        model.get_parameter("1.bias")[0] = math.nan
    run = tiny_run(model=model, compute_loss=supervised(nn.functional.mse_loss), callbacks=[StopOnNonFinite("skip")], steps=1)
    (said,) = decided(run, "batch skipped")
    assert "; the weight '1.weight' is inf, first at index (0, 2), already" in said
    assert said.startswith("the loss is nan; outputs['predictions'] is nan, first at index (0, 0)")
    loader = tiny_loader(1)
    loader[0][1][1, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"the loss is nan in batch 1; batch\[1\] is nan, first at index \(1, 0\)\. Lower"):
        tiny_run(loader=loader, callbacks=[StopOnNonFinite("raise")])


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


def test_in_a_step_fn_each_backward_is_looked_at_and_a_stop_says_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
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
    caplog.clear()
    run = tiny_run(step_fn=step_fn, callbacks=[StopOnNonFinite()], steps=4)
    assert run.outcome == Outcome("stopped", "the loss is nan")
    assert "goes on" not in caplog.text


# -- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        *((kind, {}) for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor)),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(
    kind: Any, options: dict[str, Any], bad: float
) -> None:
    optimizer, kept = partial(kind, lr=0.1, **options), list[Any]()

    @on(Callback.on_step_end)
    def keep(run: Run) -> None:
        kept.append(deepcopy({"model": dict(run.model.state_dict()), "optimizer": run.optimizers[0].state_dict()["state"]}))

    callbacks = [StopOnNonFinite("skip", gradients=True), keep]
    run = tiny_run(compute_loss=poisoned_gradient(bad, at=2), callbacks=callbacks, optimizer=optimizer, steps=3)
    before, poisoned, after = kept
    assert same(before, poisoned)
    assert not same(poisoned["model"], after["model"])
    assert decided(run, "step skipped") == [f"the gradient of 'weight' is {bad}, first at index (0, 0)"]
    assert run.progress.step == 3


def test_it_stops_or_raises_for_a_gradient_too_and_nothing_is_applied() -> None:
    run = tiny_run(compute_loss=poisoned_gradient(math.inf, at=1), callbacks=[StopOnNonFinite(gradients=True)])
    assert run.outcome == Outcome("stopped", "the gradient of 'weight' is inf, first at index (0, 0)")
    assert run.model.get_parameter("weight").item() == 0.5
    raising = StopOnNonFinite("raise", gradients=True)
    with pytest.raises(NonFiniteError, match=r"the gradient of 'weight' is inf, first at index \(0, 0\) in step 2\. Lower"):
        tiny_run(compute_loss=poisoned_gradient(math.inf, at=2), callbacks=[raising])


def test_it_looks_before_clipping_spreads_it_over_all_gradients_and_once_when_they_are_complete() -> None:
    callbacks = [ClipGradients(1.0), StopOnNonFinite("skip", gradients=True)]
    model = nn.Sequential()
    model.add_module("other", nn.Linear(1, 1))
    model.register_parameter("weight", nn.Parameter(torch.zeros(1, 1)))
    poisoned = {"compute_loss": poisoned_gradient(math.nan, at=1), "accumulate": 2, "batches": 4}
    run = tiny_run(model=model, callbacks=callbacks, **poisoned)
    assert decided(run, "step skipped") == ["the gradient of 'weight' is nan, first at index (0, 0)"]
    assert [decision.when.step for decision in run.decisions if decision.what == "step skipped"] == [0]
    assert run.progress.step == 2


def test_a_step_that_was_skipped_does_not_move_the_schedule_and_one_that_was_not_breaks_the_weights() -> None:
    updated: list[bool] = []
    halve = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    look = on(Callback.on_step_end)(lambda run: updated.append(session_of(run).step.updated))
    for gradients in (True, False):
        callbacks = [halve, look, StopOnNonFinite("skip", gradients=gradients)]
        run = tiny_run(compute_loss=poisoned_gradient(math.nan, at=2), callbacks=callbacks, steps=3)
        assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)
        assert run.model.get_parameter("weight").isnan().all() == (not gradients)
    assert updated == [True, False, True, True, True, True]


def test_a_parameter_outside_of_the_model_is_named_so() -> None:
    stray = nn.Parameter(torch.zeros(2))

    @on(Callback.on_after_backward)
    def poison(run: Run, outputs: Any) -> None:
        stray.grad = torch.tensor([0.0, math.nan])

    model = tiny_model()
    optimizer = torch.optim.SGD([*model.parameters(), stray], 0.1)
    run = tiny_run(model=model, optimizer=optimizer, callbacks=[poison, StopOnNonFinite("skip", gradients=True)], steps=1)
    assert decided(run, "step skipped") == ["the gradient of a parameter outside of the model is nan, first at index (1)"]


@pytest.mark.parametrize(("gradients", "reads"), [(False, 3 * 2), (True, 3 * (2 + 1))])
def test_it_waits_for_the_device_once_a_batch_and_for_gradients_once_more_a_step(gradients: bool, reads: int) -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3), nn.Linear(3, 1))

    def reads_with(callbacks: list[Callback]) -> Any:
        with Reads() as counted:
            tiny_run(model=model, callbacks=callbacks, steps=3, accumulate=2, batches=6)
        return counted.count

    assert reads_with([StopOnNonFinite(gradients=gradients)]) - reads_with([]) == reads  # a run itself reads some at its ends


# -- finding numbers that are not finite --------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_among_kinds_of_tensors_is_found(bad: float) -> None:
    sparse = partial(torch.sparse_coo_tensor, size=(3, 2), check_invariants=True)
    rows = sparse(torch.tensor([[0, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    broken = sparse(torch.tensor([[2]]), torch.tensor([[3.0, bad]]))
    fine = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), torch.ones((), dtype=torch.float64), rows]
    assert all_finite(fine)
    assert all_finite([])
    assert all_finite([torch.full((4,), 1e30), torch.full((4,), -1e38)])  # though their squares overflow
    assert not all_finite([*fine, torch.tensor([1.0, bad])])
    assert not all_finite([broken])
    assert first_not_finite([("rows", rows), ("broken", broken)]) == f"broken is {bad}, first at index (2, 1)"
    assert first_not_finite([("one", torch.tensor(bad))]) == f"one is {bad}"

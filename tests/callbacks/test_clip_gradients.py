"""ClipGradients: gradients within bounds, of all parameters or of chosen ones, and their norm in the records."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients
from cadenza.errors import ScheduleError
from cadenza.testing import tiny_loader, tiny_run
from tests.callbacks.reads import Reads

STEP_START, STEP_END = Callback.on_step_start, Callback.on_step_end


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))


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


# -- by norm, by value --------------------------------------------------------------------------------


def test_gradients_are_scaled_down_to_their_norm_together() -> None:
    clip = ClipGradients(max_norm=0.5)
    free, clipped = together(gradients_after()), together(gradients_after(clip))
    assert clip.norm is not None
    torch.testing.assert_close(clip.norm, free.norm())
    torch.testing.assert_close(clipped, free * 0.5 / free.norm(), rtol=1e-4, atol=1e-6)


def test_another_norm_can_be_the_bound() -> None:
    free = together(gradients_after())
    clipped = together(gradients_after(ClipGradients(max_norm=0.5, norm_type=math.inf)))
    torch.testing.assert_close(clipped, free * 0.5 / free.abs().max(), rtol=1e-4, atol=1e-6)


def test_gradients_are_cut_off_by_value() -> None:
    free, clipped = together(gradients_after()), together(gradients_after(ClipGradients(max_value=0.65)))
    torch.testing.assert_close(clipped, free.clamp(-0.65, 0.65))
    assert not torch.equal(clipped, free)


def test_gradients_are_clipped_once_a_step_when_they_are_complete() -> None:
    whole = gradients_after(ClipGradients(max_norm=0.5), batches=1, loader=tiny_loader(1, batch_size=4))
    parts = gradients_after(ClipGradients(max_norm=0.5), accumulate=2, loader=tiny_loader(2, batch_size=2))
    torch.testing.assert_close(together(parts), together(whole), rtol=1e-4, atol=1e-6)


def test_a_norm_that_is_not_finite_is_no_error() -> None:
    @on(Callback.on_after_backward)
    def poison(run: Run, outputs: Any) -> None:
        run.model.get_parameter("weight").grad = torch.full((1, 1), math.nan)

    clip = ClipGradients(max_norm=1.0)
    tiny_run(callbacks=[poison, clip], steps=1)
    assert clip.norm is not None
    assert clip.norm.isnan()


@pytest.mark.parametrize("arguments", [{"max_norm": 0.5}, {"max_value": 0.5, "log": "norm", "log_every": "1 step"}])
def test_a_step_without_gradients_has_nothing_to_clip(arguments: dict[str, Any]) -> None:
    clip = ClipGradients(**arguments)
    tiny_run(step_fn=lambda run, batch: (run.update(), torch.zeros(()))[1], callbacks=[clip])
    assert clip.norm is None


# -- chosen parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [["0.*"], ["0.weight", "0.b*"], lambda name, parameter: name.startswith("0.")])
def test_only_the_chosen_parameters_are_clipped(chosen: Any) -> None:
    free = gradients_after(model=two_layers())
    clipped = gradients_after(ClipGradients(max_norm=1e-3, parameters=chosen), model=two_layers())
    norm = together({name: free[name] for name in ("0.weight", "0.bias")}).norm()
    for name, gradient in clipped.items():
        expected = free[name] * 1e-3 / norm if name.startswith("0.") else free[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-7)


def test_a_function_sees_the_parameter_too() -> None:
    clip = ClipGradients(max_value=1e-6, parameters=lambda name, parameter: parameter.ndim == 1)
    free, clipped = gradients_after(model=two_layers()), gradients_after(clip, model=two_layers())
    changed = {name for name in free if not torch.equal(free[name], clipped[name])}
    assert changed == {"0.bias", "1.bias"}


def test_several_have_parameters_and_bounds_of_their_own() -> None:
    one, two = ClipGradients(1e-3, parameters="0.*"), ClipGradients(2e-3, parameters=["1.*"])
    clipped = gradients_after(one, two, model=two_layers())
    norms = [together({name: grad for name, grad in clipped.items() if name[0] == layer}).norm().item() for layer in "01"]
    assert norms == pytest.approx([1e-3, 2e-3], rel=1e-3)


def test_parameters_that_choose_nothing_are_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"no parameter .* matches 'wieght'\. Did you mean 'weight'\? It has weight, bias"):
        tiny_run(callbacks=[ClipGradients(1.0, parameters=["bias", "wieght"])])
    with pytest.raises(ValueError, match=r"the function chose no parameter of the model\. It has weight, bias"):
        tiny_run(callbacks=[ClipGradients(1.0, parameters=lambda name, parameter: False)])


def test_one_instance_serves_another_model() -> None:
    clip = ClipGradients(1e-3, parameters=["*weight"])
    for model in (two_layers(), nn.Linear(1, 1)):
        clipped = gradients_after(clip, model=model)
        weights = together({name: gradient for name, gradient in clipped.items() if name.endswith("weight")})
        assert weights.norm().item() == pytest.approx(1e-3, rel=1e-3)


# -- logging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"max_norm": 0.01}, {"max_value": 0.01}])
def test_the_norm_before_clipping_is_logged_at_its_cadence(arguments: dict[str, Any]) -> None:
    free = together(gradients_after()).norm().item()
    run = tiny_run(callbacks=[ClipGradients(**arguments, log="train/grad_norm", log_every="1 step")], steps=1)
    assert dict(run.history["train/grad_norm"]) == pytest.approx({1: free})
    run = tiny_run(callbacks=[ClipGradients(**arguments, log="norm", log_every="2 steps")], steps=5)
    assert [step for step, _ in run.history["norm"]] == [2, 4]
    assert tiny_run(callbacks=[ClipGradients(**arguments)], steps=1).history.names == []


def test_a_step_without_gradients_logs_no_old_norm() -> None:
    @on(Callback.on_batch_start, at=2)
    def skip(run: Run, batch: Any) -> None:
        run.skip_batch("not this one")

    run = tiny_run(callbacks=[skip, ClipGradients(0.1, log="norm", log_every="1 step")], steps=3)
    assert [step for step, _ in run.history["norm"]] == [1, 3]


@pytest.mark.parametrize("arguments", [{"max_norm": 0.01}, {"max_value": 0.01}])
def test_neither_clipping_nor_logging_waits_for_the_device(arguments: dict[str, Any]) -> None:
    clip = ClipGradients(**arguments, log="norm", log_every="1 step")
    before, after = (on(moment)(lambda run: seen.append(reads.count)) for moment in (STEP_START, STEP_END))
    seen: list[int] = []
    with Reads() as reads:
        run = tiny_run(callbacks=[before, clip, after], steps=3, seed=1)  # without a seed one is drawn at the start, and read
    assert seen == [0, 1, 1, 2, 2, 3]  # what is logged is read at once, as it lies on the host already
    assert len(run.history["norm"]) == 3


# -- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1.0, "max_value": 1.0}])
def test_clipping_takes_one_of_two(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected max_norm or max_value, not both; got max_norm="):
        ClipGradients(**arguments)


def test_wrong_arguments_are_errors_at_once() -> None:
    with pytest.raises(ValueError, match="max_norm must be greater than 0; got 0"):
        ClipGradients(0)
    with pytest.raises(ValueError, match="norm_type must be greater than 0; got -1"):
        ClipGradients(1.0, norm_type=-1)
    with pytest.raises(TypeError, match=r"parameters=\.\.\.\) must be a pattern such as 'encoder\.\*', .*; got 3"):
        ClipGradients(1.0, parameters=cast("Any", 3))
    with pytest.raises(ScheduleError, match="unknown unit 'stps'"):
        ClipGradients(1.0, log="norm", log_every="5 stps")


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

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + sum(one.sum() for one in self.held)
        return outputs


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

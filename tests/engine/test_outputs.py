"""What a batch gave, and values that are computed when, and only when, somebody asks."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Derive, Outputs, Run, on, supervised
from cadenza.errors import LossError, OutputError
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer

MSE = supervised(nn.functional.mse_loss)


def test_the_outputs_are_those_that_compute_loss_returned() -> None:
    run = tiny_run(compute_loss=MSE)
    assert set(run.outputs) == {"loss", "predictions", "targets"}


def test_the_object_is_the_same_until_the_next_batch_starts() -> None:
    seen: list[object] = []

    class Keeping(Callback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            seen.append(run.outputs)

        def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
            seen.append(outputs)

        def on_batch_end(self, run: Run, batch: Any, outputs: MutableMapping[str, Any]) -> None:
            seen.append(outputs)

        def on_step_end(self, run: Run) -> None:
            seen.append(run.outputs)

    tiny_run(callbacks=[Keeping()], batches=2)
    first, second = seen[:4], seen[4:]
    assert all(one is first[0] for one in first)
    assert all(one is second[0] for one in second)
    assert first[0] is not second[0]


def test_a_derived_value_is_computed_once_a_batch_without_gradient_and_only_if_asked_for() -> None:
    computed: list[bool] = []

    def error(run: Run) -> Tensor:
        computed.append(torch.is_grad_enabled())
        return cast("Tensor", run.outputs["predictions"] - run.outputs["targets"]).abs().max()

    @on(Callback.on_batch_end, every=2)
    def ask(run: Run, batch: Any, outputs: MutableMapping[str, Any]) -> None:
        assert outputs["error"] is outputs["error"]

    tiny_run(compute_loss=MSE, callbacks=[Derive(error=error), ask], batches=5)
    assert computed == [False, False]


def test_a_derived_value_may_stand_on_another() -> None:
    derive = Derive(one=lambda run: 1, two=lambda run: run.outputs["one"] + 1)
    values: list[int] = []
    tiny_run(callbacks=[derive, on(Callback.on_step_end)(lambda run: values.append(run.outputs["two"]))], steps=1)
    assert values == [2]


def test_a_derived_value_is_there_for_in_and_get_but_not_before_it_is_asked_for() -> None:
    facts: list[object] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        facts.extend(["one" in run.outputs, "one" in list(run.outputs), run.outputs.get("one"), run.outputs.get("none", 5)])

    tiny_run(callbacks=[Derive(one=lambda run: 1), look], steps=1)
    assert facts == [True, False, 1, 5]


def test_an_output_that_is_not_there_is_an_error_that_shows_the_nearest() -> None:
    with pytest.raises(OutputError, match=r"no output 'los'; it has \['loss', 'f1'\]\. Did you mean 'loss'\?"):
        tiny_run(callbacks=[Derive(f1=lambda run: 1), on(Callback.on_step_end)(lambda run: run.outputs["los"])])


def test_a_derived_value_asked_for_too_late_is_an_error() -> None:
    kept: list[Outputs] = []
    keep = on(Callback.on_batch_end, at=1)(lambda run, batch, outputs: kept.append(outputs))  # type: ignore[arg-type]  # they are
    tiny_run(callbacks=[Derive(f1=lambda run: 1), keep])
    with pytest.raises(OutputError, match="was not read while its batch was there, and the batch is gone"):
        kept[0]["f1"]


def test_two_derived_values_of_one_name_are_an_error() -> None:
    with pytest.raises(OutputError, match=r"two Derive callbacks define 'f1'\. Give one of the two another name"):
        tiny_run(callbacks=[Derive(f1=lambda run: 1), Derive(f1=lambda run: 2)])


def test_a_derived_value_that_is_no_function_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Derive\(f1=\.\.\.\) must be a function of the run; got 3"):
        Derive(f1=cast("Any", 3))


class WithLoss(NamedTuple):
    loss: Tensor
    logits: Tensor


def test_a_tensor_is_the_loss_and_an_object_with_a_loss_gives_its_loss() -> None:
    outputs = Outputs()
    outputs.take(torch.tensor(1.0))
    assert dict(outputs) == {"loss": torch.tensor(1.0)}
    outputs = Outputs()
    outputs.take(WithLoss(torch.tensor(1.0), torch.tensor(2.0)))
    assert outputs["loss"] == 1.0


def test_nothing_with_a_loss_is_an_error_that_says_what_is_expected() -> None:
    with pytest.raises(
        LossError, match=r"must return the loss as a tensor of shape \(\), a mapping with the key 'loss', or an"
    ):
        Outputs().take(3)


def test_a_complex_loss_is_an_error_that_says_so() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = torch.complex(model(batch[0]).mean(), torch.tensor(0.0))
        return loss

    with pytest.raises(LossError, match=r"got a complex tensor \(torch.complex64\): return a real number"):
        tiny_run(compute_loss=compute)
    with pytest.raises(LossError, match="the loss of 'eval' is complex"):
        tiny_trainer(compute_loss=compute).evaluate(tiny_loader())

"""What a run keeps of batches that are done: numbers, and neither their graphs nor the batches themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable as Function
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.testing import tiny_run


class Token:
    """Lives as long as the graph of one loss."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def marking(tokens: list[weakref.ref[Token]]) -> Function[[nn.Module, Any], dict[str, Any]]:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        token = Token()
        tokens.append(weakref.ref(token))
        loss: Any = Marked.apply(model(batch).square().mean(), token)  # type: ignore[no-untyped-call]  # torch has no types there
        return {"loss": loss}

    return compute


def steps_with(run: Run, batch: Tensor, compute: Function[[nn.Module, Any], dict[str, Any]]) -> Tensor:
    loss: Tensor = compute(run.model, batch)["loss"]
    run.backward(loss)
    run.update()
    return loss


@pytest.mark.parametrize("by", ["compute_loss", "weighted compute_loss", "step_fn"])
def test_when_a_batch_starts_no_graph_of_an_earlier_one_is_alive(by: str) -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    compute = marking(tokens)
    ways: dict[str, dict[str, Any]] = {
        "compute_loss": {"compute_loss": compute, "accumulate": 3},
        "weighted compute_loss": {"compute_loss": lambda *given: {**compute(*given), "weight": 2}, "accumulate": 3},
        "step_fn": {"step_fn": lambda run, batch: steps_with(run, batch, compute)},
    }
    count = on(Callback.on_batch_start)(lambda run, batch: alive.append(sum(token() is not None for token in tokens)))
    run = tiny_run(loader=[torch.ones(2, 1)] * 9, callbacks=[count], **ways[by])
    assert alive == [0] * 9
    assert run.loss is not None
    assert run.loss.grad_fn is None


def test_an_evaluation_with_gradients_of_its_own_keeps_no_graph() -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    compute = marking(tokens)

    def judged(model: nn.Module, batch: Any) -> dict[str, Any]:
        with torch.enable_grad():
            return compute(model, batch)

    @on(Callback.on_eval_batch_start)
    def count(run: Run, evaluation: Any, batch: Any) -> None:
        alive.append(sum(token() is not None for token in tokens))

    tiny_run(batches=1, callbacks=[Evaluate([torch.ones(2, 1)] * 4, compute=judged), count])
    assert max(alive) <= 1  # the outputs of a batch are there until the next one is computed


def test_no_batch_but_the_one_under_way_is_kept_while_a_group_is_filled() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Fresh:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(6):
                yield torch.ones(2, 1)

    @on(Callback.on_batch_start)
    def count(run: Run, batch: Tensor) -> None:
        seen.append(weakref.ref(batch))
        assert [one() is not None for one in seen] == [False] * (len(seen) - 1) + [True]

    tiny_run(loader=Fresh(), accumulate=3, compute_loss=lambda model, batch: model(batch).mean(), callbacks=[count])
    assert len(seen) == 6

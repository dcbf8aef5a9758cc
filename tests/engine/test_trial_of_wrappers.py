"""The trial before the training is undone where state lies deeper: in optimizers that hold others, in loaders of one's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import FindBatchSize, FindLearningRate
from cadenza.errors import DataError
from cadenza.testing import tiny_loader

Params = list[nn.Parameter]


class Sam(Optimizer):
    """Sharpness-aware minimization (arXiv:2010.01412): its groups are those of the optimizer inside."""

    def __init__(self, params: Params, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.clone()
            weight += 0.05 * weight.grad / (weight.grad.norm() + 1e-12)
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight]["old"])
        self.base_optimizer.step()


class Lookahead(Optimizer):
    """Lookahead (arXiv:1907.08610): slow weights and a count, neither in a state_dict; its state is that of the one inside."""

    def __init__(self, params: Params) -> None:
        self.optimizer = Adam(params, lr=0.05)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = self.optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow_weights = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        self.optimizer.step()
        self.count += 1
        if self.count % 4 == 0:
            for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
                for weight, kept in zip(group["params"], slow, strict=True):
                    kept.add_(weight - kept, alpha=0.5)
                    weight.copy_(kept)


def trained(make: Callable[[Params], Optimizer], *finders: Callback, loader: Any = None) -> dict[str, Any]:
    """Train, and return the bits of weights, of what the optimizer holds, and of each batch."""
    torch.manual_seed(0)
    model, batches = nn.Linear(1, 1), list[Tensor]()
    optimizer = make(list(model.parameters()))
    keep = on(Callback.on_batch_start)(lambda run, batch: batches.append(batch[0].clone()))

    def step(run: Run, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        run.backward(loss)
        if isinstance(optimizer, Sam):
            optimizer.climb()
            run.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        run.update()
        return loss.detach()

    loader = tiny_loader(6) if loader is None else loader
    Trainer(model, optimizer, loader, step_fn=step, max_epochs=2, seed=3, callbacks=[keep, *finders], progress=False).fit()
    inner = getattr(optimizer, "base_optimizer", optimizer)
    states = [dict(state) for state in inner.state.values()]
    held = [states, getattr(optimizer, "slow_weights", None), getattr(optimizer, "count", None)]
    return {"weights": [*model.parameters()], "held": held, "batches": batches, "rates": [g["lr"] for g in inner.param_groups]}


def finders() -> dict[str, Callback]:
    return {
        "rate": FindLearningRate(start=1e-3, end=10, steps=11),
        "size": FindBatchSize(lambda size: tiny_loader(12 // size, size), start=2, max_size=2),
    }


@pytest.mark.parametrize("finder", finders())
@pytest.mark.parametrize("make", [Sam, Lookahead], ids=lambda kind: str(kind.__name__))
def test_an_optimizer_that_holds_another_trains_to_the_same_bits_after_a_trial(make: Any, finder: str) -> None:
    plain, found = trained(make), trained(make, finders()[finder])
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def test_what_such_an_optimizer_has_learned_before_stays_its_own_object() -> None:
    def worn(params: Params) -> Optimizer:
        optimizer = Lookahead(params)
        for _ in range(3):
            for weight in params:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return optimizer

    torch.testing.assert_close(trained(worn, finders()["rate"]), trained(worn), rtol=0, atol=0)


class Own:
    """A loader whose order comes from generators of its own, and from what it has counted."""

    def __init__(self, draw: Callable[[Own], int]) -> None:
        self.draw, self.passes, self.order = draw, 0, [*range(6)]
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.old, self.new = numpy.random.RandomState(1), numpy.random.default_rng(1)
        self.indices, self.inner = numpy.arange(6), {"deep": [torch.arange(6)]}

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        batches = tiny_loader(6)
        first = self.draw(self) % 6
        yield from batches[first:] + batches[:first]


def shuffled(own: Own) -> int:
    own.python.shuffle(own.order)
    return int(own.order[0])


def shuffled_array(own: Own) -> int:
    own.old.shuffle(own.indices)
    own.inner["deep"][0].add_(1)
    return int(own.indices[0]) + int(own.inner["deep"][0][0])


DRAWS: dict[str, Callable[[Own], int]] = {
    "a count of passes": lambda own: own.passes,
    "a torch generator": lambda own: int(torch.randint(6, (), generator=own.torch)),
    "a numpy generator": lambda own: int(own.new.integers(6)),
    "a list that is shuffled in place": shuffled,
    "arrays that are changed in place": shuffled_array,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_loader_with_state_of_its_own_gives_the_same_batches_after_a_trial(draw: str) -> None:
    def sgd(params: Params) -> Optimizer:
        return SGD(params, 0.1)

    plain = trained(sgd, loader=Own(DRAWS[draw]))
    torch.testing.assert_close(trained(sgd, finders()["rate"], loader=Own(DRAWS[draw])), plain, rtol=0, atol=0)


def test_a_loader_that_holds_an_iterator_is_refused_before_it_is_read() -> None:
    class Endless:
        def __init__(self) -> None:
            self.batches = cycle(tiny_loader(6))

        def __iter__(self) -> Iterator[Any]:
            return (next(self.batches) for _ in range(6))

    loader = Endless()
    with pytest.raises(DataError, match=r"a cycle gives each batch once, and the training would miss those"):
        trained(lambda params: SGD(params, 0.1), finders()["rate"], loader=loader)
    assert torch.equal(next(loader.batches)[0], tiny_loader(6)[0][0])

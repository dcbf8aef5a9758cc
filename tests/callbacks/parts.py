"""What several tests of callbacks record and count: weights, rates, reads of the device, and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import Callback, Run, load_weights, on
from cadenza.drivers.sharding import local
from cadenza.hooks.moments import Moment
from cadenza.testing import tiny_model


def weights_at_each_step(seen: dict[int, float]) -> Callback:
    """Keep the weight of the tiny model by step."""

    def look(run: Run) -> None:
        seen[run.progress.step] = run.model.get_parameter("weight").item()

    return on(Callback.on_step_end)(look)


def failing(moment: Moment, at: int) -> Callback:
    """Raise an error at a moment of a step, counted from 1."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    return on(moment, at=at)(fail)


def state_of(run: Run) -> dict[str, Tensor]:
    return {name: local(value).clone() for name, value in run.model.state_dict().items()}


def loaded(path: Path, **arguments: Any) -> dict[str, Tensor]:
    model = tiny_model()
    load_weights(path, model, **arguments)
    return dict(model.state_dict())


def normed() -> nn.Sequential:
    """Return a network with BatchNorm, which always has the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))


def two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each parameter of the tiny model."""
    return [torch.optim.SGD([parameter], 0.1) for parameter in parameters]


def own_step(run: Run, batch: Any) -> Tensor:
    """Do what a run without a step_fn does."""
    loss = nn.functional.mse_loss(run.model(batch[0]), batch[1])
    run.backward(loss)
    run.update()
    return loss


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=1, gamma=0.5)


class Clock:
    """The time, which passes only where a test lets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def lasting(self, seconds: float, moment: Any) -> Callback:
        def last(*_: Any) -> None:
            self.now += seconds

        return on(moment)(last)


class Reads(TorchDispatchMode):
    """Inside, counts what ``item()``, ``float(tensor)`` and ``if tensor`` come down to: on a GPU each waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

"""Keep a running average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cadenza.cadence import Cadence, Filter
from cadenza.hooks import periodic
from cadenza.listener import Listener
from cadenza.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class Ema(Callback):
    """Keep an exponential moving average of the weights, by ``torch.optim.swa_utils.AveragedModel``.

    Args:
        decay: What of the average stays at each update: ``average = decay * average + (1 - decay) * weights``.
        every: How often to update; a cadence.

    >>> from cadenza.testing import tiny_run
    >>> ema = Ema(0.5)
    >>> run = tiny_run(callbacks=[ema], steps=2)
    >>> with ema.in_place(run):
    ...     averaged = run.model.weight.item()
    >>> averaged != run.model.weight.item()
    True
    """

    def __init__(self, decay: float = 0.999, every: str | Filter | Callable[[Run], bool] = "1 step") -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1; got {decay!r}")
        self.decay, self.every = decay, Cadence.parse(every)
        self._awaited: Mapping[str, Any] | None = None
        self.average: AveragedModel | None = None
        """The averaged model of the run under way; buffers are copied from the model."""

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, self._update)]

    def on_setup(self, run: Run) -> None:
        self.average = AveragedModel(run.driver.unwrap(run.model), multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        if self._awaited is not None:
            self.average.load_state_dict(self._awaited)
            self._awaited = None

    def _update(self, run: Run) -> None:
        average, model = self._of_run(), run.driver.unwrap(run.model)
        average.update_parameters(model)
        for kept, current in zip(average.module.buffers(), model.buffers(), strict=True):
            kept.copy_(current)

    @contextmanager
    def in_place(self, run: Run) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, whatever happened."""
        model = run.driver.unwrap(run.model)
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        try:
            model.load_state_dict(self._of_run().module.state_dict())
            yield
        finally:
            with torch.no_grad():
                model.load_state_dict(own)

    def _of_run(self) -> AveragedModel:
        if self.average is None:
            raise RuntimeError("Ema has no average yet: it is made when a run is set up")
        return self.average

    def state_dict(self) -> dict[str, Any]:
        average = self._awaited if self.average is None else self.average.state_dict()
        return {} if average is None else {"average": dict(average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.average is None:
            self._awaited = state.get("average")  # taken when there is a model to average
        elif "average" in state:
            self.average.load_state_dict(state["average"])

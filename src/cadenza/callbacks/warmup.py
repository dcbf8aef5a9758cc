"""Begin with small steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cadenza.engine.planned import planned
from cadenza.engine.session import session_of
from cadenza.hooks.cadence import Cadence
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.hooks.schedule import Until
from cadenza.optim.rates import optimizer_of

if TYPE_CHECKING:
    from cadenza.run import Run

Shape = Literal["linear", "constant", "cosine"]


class Warmup(Callback):
    """Scale the learning rate up from a small one in the first steps, whatever schedule there is besides.

    The rate is multiplied by a factor around each update, and afterwards is exactly what it was. So no scheduler ever goes on
    from a scaled rate, and a checkpoint holds none. The factor depends on the number of the step alone. Several warm-ups of one
    optimizer multiply. `LogTraining` logs the rates with the factor.

    Args:
        length: Such as ``"500 steps"`` or ``"1 epoch"``, or a part of the run as a float: 0.1 is its first tenth. A run that
            continues keeps the number of steps of its first start.
        shape: In step n of N the factor is ``start + (1 - start) * n / N`` if linear, ``start + (1 - start) *
            (1 - cos(pi * n / N)) / 2`` if cosine, and `start` if constant. So no step is wasted on a rate of 0, and the
            last one has the full rate, or the one after it if constant.
        start: The factor at the beginning.
        optimizer: Which of the run's optimizers, from 0; all its parameter groups are scaled alike.

    Raises:
        ValueError: An argument is wrong, or the length of the run is needed and not known.
        CadenceError: `length` cannot be read.

    >>> from cadenza.testing import tiny_run
    >>> warmup = Warmup("4 steps")
    >>> run = tiny_run(callbacks=[warmup], steps=5)
    >>> [warmup.factor(step) for step in (1, 2, 3, 4, 5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> run.optimizers[0].param_groups[0]["lr"]
    0.1
    """

    # Its rates are back before a scheduler goes on from them, and before one is saved after an error.
    before = (Phase.SCHEDULE, Phase.SAVE)

    asks = False

    def __init__(self, length: str | float, *, shape: Shape = "linear", start: float = 0.0, optimizer: int = 0) -> None:
        if shape not in ("linear", "constant", "cosine"):
            raise ValueError(f"shape must be 'linear', 'constant' or 'cosine'; got {shape!r}")
        if not 0 <= start <= 1:
            raise ValueError(f"start is a factor, from 0 to 1; got {start!r}")
        if shape == "constant" and start == 0:
            raise ValueError("a constant warm-up holds its start, and with 0 nothing is learned: give start=, such as 0.1")
        self._given, self.length = length, _checked(length)
        self.shape, self.start, self.optimizer = shape, float(start), optimizer
        self.steps: float | None = None
        """How many steps it has in the run under way; not always a whole number if it is a part of the run."""
        self._until = 0.0
        self._kept: list[tuple[dict[str, Any], float | Tensor]] = []
        self._kept_tensors: list[tuple[Tensor, Tensor]] = []

    def factor(self, step: int) -> float:
        """Return the factor in a step, counted from 1."""
        if self.steps is None or step > self.steps or (step == self.steps and self.shape != "constant"):
            return 1.0
        match self.shape:
            case "constant":
                return self.start
            case "linear":
                return self.start + (1 - self.start) * (step / self.steps)
            case "cosine":
                return self.start + (1 - self.start) * (1 - math.cos(math.pi * step / self.steps)) / 2

    def listeners(self) -> list[Listener]:
        lasting = Until(lambda: self._until)
        return [
            *super().listeners(),
            Listener(Callback.on_before_optimizer_step, self._scale_rates, lasting),
            Listener(Callback.on_after_optimizer_step, self._put_rates_back, lasting),
        ]

    def on_setup(self, run: Run) -> None:
        optimizer_of(run, self.optimizer, needed_by="Warmup")
        self.steps, self._until = None, 0.0
        self._kept, self._kept_tensors = [], []
        session_of(run).rates.factors.setdefault(self.optimizer, []).append(self.factor)

    def on_fit_start(self, run: Run) -> None:
        if self.steps is None:  # or it is restored
            self.steps = self._steps_in(run)
        # Of several for one optimizer the first one scales, for all: what two put back would depend on their order.
        callbacks = hooks_of(run).callbacks.values()
        first = next(one for one in callbacks if isinstance(one, Warmup) and one.optimizer == self.optimizer)
        first._until = max(first._until, self.steps)

    def _scale_rates(self, run: Run) -> None:
        step = run.progress.step
        optimizer = run.optimizers[self.optimizer]
        if any(optimizer is one for one in session_of(run).step.updating):
            self._scale(optimizer.param_groups, session_of(run).rates.factor(self.optimizer, step + 1))

    def _put_rates_back(self, run: Run) -> None:
        if self._kept:
            self._put_back()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._put_back()  # if the update itself failed

    def _scale(self, groups: list[dict[str, Any]], factor: float) -> None:
        self._kept = [(group, group["lr"]) for group in groups]
        # Each once: two groups may share a tensor. In place, as graphs on the device read it where it is.
        tensors = {id(rate): rate for _, rate in self._kept if isinstance(rate, Tensor)}
        self._kept_tensors = [(rate, rate.detach().clone()) for rate in tensors.values()]
        for group, rate in self._kept:
            if not isinstance(rate, Tensor):
                group["lr"] = rate * factor
        if tensors:
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.mul_(factor)

    def _put_back(self) -> None:
        for group, rate in self._kept:
            group["lr"] = rate
        if self._kept_tensors:
            with torch.no_grad():
                for tensor, before in self._kept_tensors:
                    tensor.copy_(before)
        self._kept, self._kept_tensors = [], []

    def _steps_in(self, run: Run) -> float:
        if isinstance(self.length, float):
            return self.length * planned(run, "step", needed_by=f"Warmup({self.length:g}), a part of the run,")
        if self.length.unit == "step":
            return float(self.length.interval)
        batches = run.progress.batches_said  # not the number counted since: a resume must not change it
        if batches is None:
            raise ValueError(
                f"Warmup({self._given!r}) needs a loader that knows its length (has __len__); this one does not. Give it "
                'in "steps".'
            )
        return float(self.length.interval * -(-batches // run.info.accumulate))

    def state_dict(self) -> dict[str, Any]:
        # The limits of a run may be raised when it continues; its warm-up must not begin again for that.
        return {"steps": self.steps} if isinstance(self.length, float) and self.steps is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.length, float):
            self.steps = state.get("steps")


def _checked(length: object) -> Cadence | float:
    if isinstance(length, str):
        cadence = Cadence.parse(length)
        if isinstance(cadence, Cadence) and cadence.unit in ("step", "epoch"):
            return cadence
    elif isinstance(length, float) and 0 < length <= 1:
        return length
    hint = f' Did you mean "{length:g} steps"?' if isinstance(length, int | float) and length >= 1 else ""
    raise ValueError(
        f'the length of a warm-up is written "500 steps" or "1 epoch", or is a part of the run such as 0.1; got {length!r}.'
        + hint
    )

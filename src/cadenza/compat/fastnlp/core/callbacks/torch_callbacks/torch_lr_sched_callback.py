"""Begin with small steps, and let them get smaller again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.optim.settings import set_option

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView


class TorchWarmupCallback(Callback):
    """Scale each optimizer's learning rates: up from 0 in the first part of the training, then down to 0 or not at all.

    A native `Warmup` puts the rate back after each update; here, as in fastNLP, it can be read from the optimizer afterwards.

    Args:
        warmup: The length of the first part: up to 1 a part of the training, above a number of batches; below 0 is 0.
        schedule: ``"linear"`` goes down to 0 afterwards, ``"constant"`` stays.

    Raises:
        RuntimeError: Another `schedule`.
        ValueError: The number of batches of the training is not known.
    """

    def __init__(self, warmup: float = 0.1, schedule: Literal["linear", "constant"] = "linear") -> None:
        if schedule not in ("constant", "linear"):
            raise RuntimeError(f"schedule must be 'constant' or 'linear'; got {schedule!r}")
        self.given, self.schedule = max(float(warmup), 0.0), schedule
        self.warmup = self.given
        """Its part of the training under way."""
        self.initial_lrs: list[list[float]] = []
        """The rates of each group of each optimizer before they were scaled."""
        self._restored = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        if not trainer.n_batches or trainer.n_batches < 0:
            raise ValueError("TorchWarmupCallback needs to know how many batches the training has: give a loader with a length")
        self._total = math.ceil(max(2, trainer.n_batches) / trainer.accumulation_steps) * trainer.accumulation_steps
        self.warmup = self.given if self.given <= 1 else self.given / trainer.n_batches
        if not self._restored:
            optimizers = trainer.driver.optimizers
            self.initial_lrs = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self._restored = False

    def on_before_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        factor = self.factor((trainer.global_forward_batches + trainer.accumulation_steps) / self._total)
        for optimizer, rates in zip(trainer.driver.optimizers, self.initial_lrs, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                set_option(group, "lr", rate * factor)

    def factor(self, progress: float) -> float:
        """Return the factor of the rates when this part of the training is done, 0 to 1."""
        if progress < self.warmup:
            return progress / self.warmup
        if self.schedule == "constant" or self.warmup >= 1:
            return 1.0
        return max((progress - 1) / (self.warmup - 1), 0.0)

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        return {"initial_lrs": self.initial_lrs}

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states and states["initial_lrs"]:
            self.initial_lrs, self._restored = states["initial_lrs"], True

"""Learning rate warm-up and decay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.optim.settings import set_option

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView


class TorchWarmupCallback(Callback):
    """Scale the learning rates of each optimizer: warm-up from 0, then linear decay to 0 or a constant rate.

    The native `Warmup` restores the rate after each update. This callback leaves it in the optimizer, like fastNLP.

    Args:
        warmup: The length of the warm-up: up to 1 a fraction of the training, above 1 a number of batches; below 0 is 0.
        schedule: ``"linear"`` decays to 0 after the warm-up, ``"constant"`` does not.

    Raises:
        RuntimeError: `schedule` is unknown.
        TypeError: `warmup` is not a number.
        ValueError: The number of batches of the training is unknown.
    """

    def __init__(self, warmup: float = 0.1, schedule: Literal["linear", "constant"] = "linear") -> None:
        if schedule not in ("constant", "linear"):
            raise RuntimeError(f"schedule must be 'constant' or 'linear'; got {schedule!r}")
        if not isinstance(warmup, int | float):
            raise TypeError(f"warmup must be a fraction of the training, or a number of batches; got {warmup!r}")
        self.given: float = max(float(warmup), 0.0)
        self.schedule = schedule
        self.warmup: float = self.given
        """The warm-up as a fraction of the current training."""
        self.initial_lrs: list[list[float]] = []
        """The unscaled rates of each group of each optimizer."""
        self._restored = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        if not trainer.n_batches or trainer.n_batches < 0:
            raise ValueError(
                "TorchWarmupCallback needs the number of batches of the training, which is unknown. Use a loader with a length"
            )
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
        """Return the factor of the rates at a progress of the training from 0 to 1."""
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

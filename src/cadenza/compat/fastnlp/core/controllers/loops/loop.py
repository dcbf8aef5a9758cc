"""``fastNLP.core.controllers.loops.loop``: the base class of loops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Loop(ABC):
    """A loop over the batches of a loader, for ``trainer.train_batch_loop`` or ``evaluator.evaluate_batch_loop``."""

    batch_step_fn: Callable[[Any, Any], object]
    """``batch_step_fn(controller, batch)`` does the step of a batch. The trainer or the evaluator is the controller."""

    @abstractmethod
    def run(self, controller: Any, dataloader: Any) -> Any:
        """Process all batches of a loader; for an evaluator, return the results by the names of the metrics."""

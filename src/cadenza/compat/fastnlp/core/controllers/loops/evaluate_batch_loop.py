"""``fastNLP.core.controllers.loops.evaluate_batch_loop``: an evaluation of one loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cadenza.compat.fastnlp.core.controllers.loops.loop import Loop


class EvaluateBatchLoop(Loop):
    """The evaluator's loop over the batches of a loader. A subclass may override `run`, or call it.

    Args:
        batch_step_fn: ``batch_step_fn(evaluator, batch)`` does the step instead.
    """

    def __init__(self, batch_step_fn: Callable[[Any, Any], object] | None = None) -> None:
        if batch_step_fn is not None:
            vars(self)["batch_step_fn"] = batch_step_fn

    def run(self, evaluator: Any, dataloader: Any) -> dict[str, Any]:
        """Evaluate the batches of a loader; return the result of each metric, by its name."""
        for batch in dataloader:
            evaluator.evaluate_batch(batch, self.batch_step_fn)
        results: dict[str, Any] = evaluator.get_metric()
        return results

    @staticmethod
    def batch_step_fn(evaluator: Any, batch: Any) -> None:
        """Do the step of a batch: the forward pass, and the update of the metrics."""
        evaluator.update(batch, evaluator.evaluate_step(batch))

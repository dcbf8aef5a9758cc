"""Notice a loss that is NaN or infinite, before it reaches the weights."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import NonFiniteError
from cadenza.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class StopOnNonFinite(Callback):
    """Drop a batch whose loss is not finite, so that it never reaches the weights, and stop, raise or go on.

    Looking at the loss waits for the device, once a batch.

    Args:
        action: ``"stop"`` asks for the end of the run, ``"raise"`` raises `NonFiniteError`, ``"skip"`` only drops the batch.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[StopOnNonFinite()], losses=[1.0, float("nan")]).outcome
    Outcome(kind='stopped', reason='the loss is nan')
    """

    def __init__(self, action: Literal["stop", "raise", "skip"] = "stop") -> None:
        if action not in ("stop", "raise", "skip"):
            raise ValueError(f"action must be 'stop', 'raise' or 'skip'; got {action!r}")
        self.action = action

    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        loss = float(outputs["loss"].detach())
        if math.isfinite(loss):
            return
        reason = f"the loss is {loss}"
        if self.action == "raise":
            raise NonFiniteError(
                f"{reason} in batch {run.progress.batch + 1}. Lower the learning rate, clip gradients, or look at this batch."
            )
        run.skip_batch(reason)
        if self.action == "stop":
            run.stop(reason)

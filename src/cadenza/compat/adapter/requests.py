"""Requests from foreign callbacks that a native `Run` has no method for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.adapter.foreign import callbacks_of

if TYPE_CHECKING:
    from cadenza.run import Run


def evaluate_now(run: Run) -> int:
    """Run each `Evaluate` of the list now, regardless of its schedule, and return their number. Every rank must call this.

    Call it in a separate listener that does nothing else, because after a preemption signal in the evaluation the resumed run
    calls the listener again.
    """
    evaluates = callbacks_of(run, Evaluate)
    for evaluate in evaluates:
        evaluate.evaluate(run)
    return len(evaluates)

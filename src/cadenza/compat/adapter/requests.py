"""Requests of callbacks of other systems that a native run has no verb for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.callbacks.evaluate import Evaluate
from cadenza.hooks.dispatch import hooks_of

if TYPE_CHECKING:
    from cadenza.run import Run


def evaluate_now(run: Run) -> int:
    """Run each `Evaluate` of the list now, whatever its schedule; return how many there are. Every rank must call this.

    Call it in a listener of its own, which does nothing else: after a preemption signal in the evaluation, the resumed run
    calls the listener again.
    """
    found = [one for one in hooks_of(run).callbacks.values() if isinstance(one, Evaluate)]
    for one in found:
        one.evaluate(run)
    return len(found)

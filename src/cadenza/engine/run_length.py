"""The length of a run, for schedules that depend on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cadenza.loading import num_batches
from cadenza.status.progress import Progress, Unit
from cadenza.status.signatures import signature_of

if TYPE_CHECKING:
    from cadenza.run import Run


def planned_total(run: Run, unit: Unit, *, needed_by: str) -> int:
    """Return the number of `unit` that the run completes if nothing stops it; works in ``on_setup`` too.

    Raises:
        ValueError: The number is not known. `needed_by` is the subject of the message.
    """
    given = run.progress
    limits = Progress(
        max_epochs=given.max_epochs,
        max_steps=given.max_steps,
        max_tokens=given.max_tokens,
        # In on_setup the counters are not yet those of a loader that was replaced.
        batches_per_epoch=num_batches(run.loader, run.driver.data_shard()),
    )
    total = limits.total(unit, run.info.accumulate)
    if total is None:
        raise ValueError(f"{needed_by} needs a run of known length: {why_unknown(given, unit)}")
    return total


def why_unknown(limits: Progress, unit: Unit) -> str:
    """Return why a run has no known total of `unit`, and what to give."""
    if limits.max_tokens is not None:
        return (
            f"with max_tokens={limits.max_tokens} it ends when they are reached, and how many a step has is not known. Give "
            f"Trainer {'max_epochs' if unit == 'epoch' else 'max_steps'}= instead."
        )
    silent = "its loader does not say how many batches it has (no __len__), and"
    if limits.max_epochs is None or limits.max_steps is None:
        return f"{silent} {'max_epochs' if unit == 'epoch' else 'max_steps'}= is not given. Give Trainer one of the two."
    return (
        f"{silent} with max_epochs={limits.max_epochs} and max_steps={limits.max_steps} either limit may come first. Give "
        f"Trainer {'max_epochs' if unit == 'epoch' else 'max_steps'}= alone, or a loader with __len__."
    )


def takes_total(function: Callable[..., object]) -> bool:
    """Return whether a function takes the total too, as a second argument without default.

    A class, or a partial of one, does not: its second argument has another meaning.

    >>> takes_total(lambda step: 0), takes_total(lambda step, total: 0), takes_total(lambda step, power=2: 0)
    (False, True, False)
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type):
        return False
    try:
        parameters = signature_of(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and positional[1].default is inspect.Parameter.empty

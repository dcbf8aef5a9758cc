"""The callbacks of Lightning that a native run does not run, or replaces: why, and with what. The guide has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cadenza.compat.lightning.library import classes_of_lightning, is_lightning
from cadenza.errors import AdapterError


class Refused(NamedTuple):
    """A callback class that a native run does not run."""

    why: str
    instead: str
    """The native replacement."""


REFUSED: Mapping[str, Refused] = {
    "BatchSizeFinder": Refused(
        "It runs the loops of Lightning's trainer with other data loaders, and saves and restores that trainer.",
        "cadenza.callbacks.FindBatchSize, in the same list",
    ),
    "LearningRateFinder": Refused(
        "It replaces the callbacks, loggers and limits of Lightning's trainer, and runs its training loop.",
        "cadenza.callbacks.FindLearningRate, in the same list",
    ),
}
"""By the name of the class. Their subclasses are refused as well."""


def refusal(kind: type) -> Refused | None:
    """Return why a native run does not run callbacks of this class; None if it does.

    >>> refusal(dict)
    """
    return next((REFUSED[base.__name__] for base in classes_of_lightning(kind) if base.__name__ in REFUSED), None)


def check_runs(callback: object) -> None:
    """Raise `AdapterError` for a callback that a native run does not run."""
    refused = refusal(type(callback))
    if refused is not None:
        raise AdapterError(
            f"{type(callback).__name__} does not work in a native run. {refused.why} Use {refused.instead}.",
            name=type(callback).__name__,
            obj=callback,
        )


WHOLE: Mapping[str, str] = {
    "StochasticWeightAveraging": "Use cadenza.callbacks.Swa, which averages shards.",
    "WeightAveraging": "Use cadenza.callbacks.Ema, which averages shards.",
    "ModelPruning": "Use the driver 'ddp'.",
}
"""Classes that copy or prune whole weights, which no rank has with a driver that shards, and what to use instead."""


def check_sharding(callback: object, *, shards: bool) -> None:
    """Raise `AdapterError` if a run shards the model, and the callback needs whole weights."""
    for name, instead in WHOLE.items() if shards else ():
        if is_lightning(callback, name):
            raise AdapterError(
                f"{type(callback).__name__} needs the whole weights, but with this driver each rank has a shard. {instead}",
                name=name,
                obj=callback,
            )

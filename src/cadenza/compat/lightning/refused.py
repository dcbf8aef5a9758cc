"""Lightning callbacks that are not supported or have a native replacement, with the reason. The guide has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cadenza.compat.lightning.library import classes_of_lightning, is_lightning
from cadenza.errors import AdapterError


class Refused(NamedTuple):
    """An unsupported callback class."""

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
"""By class name. Subclasses are rejected as well."""


def refusal(kind: type) -> Refused | None:
    """Return why callbacks of this class are not supported; None if they are.

    >>> refusal(dict)
    """
    return next((REFUSED[base.__name__] for base in classes_of_lightning(kind) if base.__name__ in REFUSED), None)


def check_runs(callback: object) -> None:
    """Raise `AdapterError` for an unsupported callback."""
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
"""Classes that copy or prune whole weights, which sharded models lack, and their replacements."""


def check_sharding(callback: object, *, shards: bool) -> None:
    """Raise `AdapterError` if a run shards the model, and the callback needs whole weights."""
    for name, instead in WHOLE.items() if shards else ():
        if is_lightning(callback, name):
            raise AdapterError(
                f"{type(callback).__name__} needs the whole weights, but with this driver each rank has a shard. {instead}",
                name=name,
                obj=callback,
            )

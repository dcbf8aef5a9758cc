"""Loaders as pytorch-accelerated makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader


def kwargs_for(defaults: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a loader: each that is given takes the place of a default."""
    given = dict(given or {})
    kept = dict(defaults)
    if "sampler" in given or "batch_sampler" in given:
        kept.pop("shuffle", None)  # the sampler says the order
    if "batch_sampler" in given:
        kept.pop("batch_size", None)
    return {**kept, **given}


def loader_of(dataset: Any, kwargs: Mapping[str, Any], collate_fn: Callable[[list[Any]], Any] | None) -> Iterable[Any]:
    """Return a loader of a data set."""
    return DataLoader(dataset, **({} if collate_fn is None else {"collate_fn": collate_fn}) | dict(kwargs))


def check_uneven(samples: int | None, total_batch_size: int | None, processes: int, say: Callable[[str], object]) -> None:
    """Say where the last batches of an evaluation differ between processes.

    Raises:
        ValueError: A batch of each process needs more samples than there are.
    """
    if samples is None or not total_batch_size:
        return
    if total_batch_size > samples:
        raise ValueError(
            f"an evaluation on {processes} processes takes {total_batch_size} samples at a time, and the data set has "
            f"{samples}. Lower the batch size of evaluations."
        )
    rest = samples % total_batch_size
    per_process = total_batch_size // processes
    if rest and rest <= per_process * (processes - 1):
        say(f"The last batch of an evaluation has {rest} samples for {processes} processes: some of them get none.")
    elif rest:
        say("The last batches of an evaluation differ in size between processes.")

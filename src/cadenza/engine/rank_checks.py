"""Checks that ranks have equal arguments when a run is made. Every rank must call every function here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cadenza.drivers.agreeing import by_main
from cadenza.drivers.base import Driver
from cadenza.errors import DistributedError
from cadenza.loading.loaders import length_of
from cadenza.status.formats import counted

T = TypeVar("T")
_SHOWN = 20  # differences in a message
_VALUES = 3  # different values of each
_LENGTH = 300  # characters of a value


def main_only(driver: Driver, act: Callable[[], T]) -> T | None:
    """Call `act` on the main process, and return its result there. An error of it is an error on every rank."""
    results: list[T] = []
    by_main(
        driver.meeting,
        lambda: results.append(act()),
        lambda rank, problem: DistributedError(f"the main process cannot begin, so rank {driver.rank} cannot: {problem}"),
    )
    return results[0] if results else None


def check_alike(driver: Driver, facts: Mapping[str, Any]) -> None:
    """Raise `DistributedError` if ranks have different arguments. The message names the first 20 differences.

    Ranks with equal arguments exchange two integers, which are a digest of `facts`. Only if the digests differ, each rank gets
    the facts of the main process, and sends back the names and values of its first 20 differences.
    """
    digest = int.from_bytes(hashlib.blake2b(repr([*facts.items()]).encode(), digest_size=7).digest())
    least, most = driver.reduce(torch.tensor([-digest, digest]), "max").tolist()
    if -least == most:
        return
    first: Mapping[str, Any] = driver.broadcast(dict(facts) if driver.is_main else None)
    names = [name for name in {**first, **facts} if facts.get(name) != first.get(name)]
    everyone = driver.gather_on_main((len(names), {name: _cut(facts.get(name)) for name in names[:_SHOWN]}))
    if message := driver.broadcast(_told(first, everyone) if driver.is_main else None):
        raise DistributedError(message)


def _told(first: Mapping[str, Any], everyone: Sequence[tuple[int, Mapping[str, str]]]) -> str | None:
    """Return the message about the differences of all ranks; None if there are none."""
    ranks: dict[str, dict[str, list[int]]] = {}  # by name and value
    for rank, (_, differing) in enumerate(everyone):
        for name, value in differing.items():
            ranks.setdefault(name, {}).setdefault(value, []).append(rank)
    if not ranks:
        return None
    shown = []
    for name, values in [*ranks.items()][:_SHOWN]:
        texts = [f"{value} on {_listed(own)}" for value, own in [*values.items()][:_VALUES]]
        texts += [f"other values on {counted(more, 'rank')}"] if (more := sum(map(len, [*values.values()][_VALUES:]))) else []
        shown.append(f"{name} is {', '.join(texts)} and {_cut(first.get(name))} on rank 0")
    count = max(len(ranks), *(count for count, _ in everyone))
    shown += [f"and {count - len(shown)} more"] if count > len(shown) else []
    return (
        f"all ranks must have equal arguments; {count} differ: {'; '.join(shown)}. Run the same script with the same "
        "arguments on all ranks."
    )


def _listed(ranks: Sequence[int]) -> str:
    """Name at most four ranks.

    >>> _listed([1]), _listed([1, 2, 3, 4, 5, 6])
    ('rank 1', 'ranks 1, 2, 3, 4 and 2 more')
    """
    names = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."


def facts_of(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Return the facts about a model and a loader that must be equal on all ranks, by name."""
    weights = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    seed_of = getattr(getattr(loader, "generator", None), "initial_seed", lambda: None)
    return {
        "the number of batches": length_of(loader),
        "the seed of the loader's generator": seed_of(),
        "the number of parameters that require a gradient": sum(learning.values()),
        **{f"whether {name} requires a gradient": value for name, value in learning.items()},
        **{f"the shape of {name}": tuple(value.shape) for name, value in weights},
        **{f"the type of {name}": str(value.dtype) for name, value in weights},
    }

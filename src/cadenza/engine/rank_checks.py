"""Checks that ranks have equal arguments when a run is made. Every rank must call every function here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from cadenza.drivers.agreeing import agreed
from cadenza.drivers.base import Driver
from cadenza.errors import DistributedError
from cadenza.loading.loaders import length_of

T = TypeVar("T")


def main_only(driver: Driver, act: Callable[[], T]) -> T | None:
    """Call `act` on the main process, and return its result there. An error of it is an error on every rank."""
    results: list[T] = []
    agreed(
        lambda message: [driver.broadcast(message)],
        lambda: results.append(act()) if driver.is_main else None,
        lambda rank, problem: DistributedError(f"the main process cannot begin, so rank {driver.rank} cannot: {problem}"),
    )
    return results[0] if results else None


def check_alike(driver: Driver, facts: Mapping[str, Any]) -> None:
    """Raise `DistributedError` if ranks have different arguments. The message names all differences."""
    everyone = driver.gather(dict(facts))
    first = everyone[0]
    differences = [
        f"{name} is {own.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
        for rank, own in enumerate(everyone)
        for name in {**first, **own}
        if own.get(name) != first.get(name)
    ]
    if differences:
        raise DistributedError(
            f"all ranks must have equal arguments; {len(differences)} differ: {'; '.join(differences)}. Run the same script "
            "with the same arguments on all ranks."
        )


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

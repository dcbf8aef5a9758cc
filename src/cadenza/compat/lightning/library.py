"""The installed package of Lightning: ``lightning.pytorch``, or ``pytorch_lightning`` with the same classes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

NAMES = ("lightning.pytorch", "pytorch_lightning")


def library() -> str:
    """Return the name of the package that the program has imported."""
    return next((name for name in NAMES if name in sys.modules), NAMES[0])


def library_of(base: type[Any]) -> str:
    """Return the package that a base class of callbacks comes from."""
    return "pytorch_lightning" if base.__module__.startswith("pytorch_lightning") else "lightning.pytorch"


def imported(module: str, name: str, package: str = "") -> Any:
    """Return an object of a Lightning module. Importing is cheap, because a Lightning callback already exists."""
    return getattr(import_module(f"{package or library()}.{module}"), name)


def set_rank(rank: int) -> None:
    """Set the rank that ``rank_zero_only`` compares: hooks with this decorator then run only on the main process."""
    if module := sys.modules.get("lightning_utilities.core.rank_zero"):
        module.rank_zero_only.rank = rank


def is_lightning(thing: object, name: str) -> bool:
    """Return whether `thing` is an instance of Lightning's class of this name, or of a subclass, without importing Lightning.

    >>> is_lightning({}, "ModelPruning")
    False
    """
    return any(base.__name__ == name for base in classes_of_lightning(type(thing)))


def classes_of_lightning(kind: type[Any]) -> list[type[Any]]:
    """Return the Lightning classes among `kind` and its bases."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")]

"""Functions and classes of transformers, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def original(path: str) -> Any:
    """Return an object of transformers by its path, such as ``"trainer_utils.set_seed"``. Most have no types."""
    module, _, name = f"transformers.{path}".rpartition(".")
    return getattr(import_module(module), name)

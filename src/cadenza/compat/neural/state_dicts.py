"""``nemo.backends.torch_backend``: files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save(checkpoint: Mapping[str, Any], filename: str) -> None:
    """Write a dict, such as the weights of a module, to a file."""
    torch.save(dict(checkpoint), Path(filename).expanduser())


def load(filename: str) -> dict[str, Any]:
    """Read a file of `save` to the CPU. Pickled code is never executed.

    Raises:
        pickle.UnpicklingError: The file holds pickled code.
    """
    content: dict[str, Any] = torch.load(Path(filename).expanduser(), map_location="cpu", weights_only=True)
    return content


def get_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the weights of a module by name."""
    return model.state_dict()


def set_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Set the weights of a module.

    Raises:
        RuntimeError: They do not fit.
    """
    model.load_state_dict(state_dict)

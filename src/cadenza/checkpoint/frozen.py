"""Weights that a checkpoint leaves out. A resume takes them from the model that the user builds, and compares checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import CheckpointMismatchError

LEFT_OUT = "left_out"
"""The name in the state of a checkpoint: by name of the weight, its shape and its checksum."""


def described(weight: Tensor) -> dict[str, Any]:
    """Return what a checkpoint holds instead of a weight: its shape, and the SHA-256 of its bytes in hexadecimal digits."""
    data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"shape": list(weight.shape), "sha256": hashlib.sha256(data.data).hexdigest()}


def left_out_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the weights that a checkpoint leaves out, by name."""
    return dict(state.get(LEFT_OUT, {}))


def unchanged(left_out: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the weights of a model that a checkpoint left out.

    Args:
        left_out: What the checkpoint holds instead of them.
        own: The ``state_dict`` of the model.
        where: The checkpoint, for the message.

    Raises:
        CheckpointMismatchError: A weight is missing, or has other values than at the save.
    """
    other = [name for name, one in left_out.items() if name not in own or described(own[name]) != dict(one)]
    if other:
        raise CheckpointMismatchError(
            f"{where} leaves out frozen weights, and {len(other)} of them differ in this model: {', '.join(other[:5])}. "
            "Nothing was loaded. Build the model from the same pretrained weights as in the run that wrote it."
        )
    return {name: own[name] for name in left_out}

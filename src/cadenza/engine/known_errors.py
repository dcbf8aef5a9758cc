"""Likely cures of frequent torch errors, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.errors import CadenzaError
from cadenza.loading.batches import tensors_in
from cadenza.status.counting import counted
from cadenza.text.hints import data


@dataclass(slots=True)
class InUse:
    """The objects that were in use when an error was raised."""

    device: torch.device
    module: nn.Module | None = None
    """The innermost module that was running."""
    batch: Any = None
    predictions: Any = None
    targets: Any = None
    together: int = 1
    """The number of ranks that compute each layer together, with tensor parallelism."""


def cure_of(error: Exception, scene: InUse) -> str | None:
    """Return the likely cure of an error; None if the message is unknown.

    >>> cure_of(RuntimeError("expected target dtype to be Long or Byte, but got Float"), InUse(torch.device("cpu")))
    'cross_entropy takes class indices of dtype int64: convert the targets with .long().'
    """
    if isinstance(error, CadenzaError):  # the message already says what to do
        return None
    text = f"{type(error).__name__}: {error}"
    if scene.together > 1 and re.search(_OF_SHAPES, text):
        return _parts(scene.together)
    for cure in data("cures.toml")["cure"]:
        for pattern in cure["error"]:
            if found := re.search(pattern, text):
                if "build" in cure:
                    return _BUILT[cure["build"]](found, scene)
                groups = (str(group).lower() for group in found.groups())
                return str(cure["text"]).format(found[0], *groups, device=scene.device)
    return None


def _parts(ranks: int) -> str:
    return (
        f"{counted(ranks, 'rank')} compute together, and each has a part of a split layer. Numbers that are split, such as "
        f"features and heads, must be divisible by {ranks}. A view(...) of a part must have -1 in place of this number. A "
        "layer of which the whole output is needed, such as the last one, takes ColwiseParallel(output_layouts=Replicate())."
    )


def _labels(found: re.Match[str], scene: InUse) -> str:
    classes = scene.predictions.shape[1] if isinstance(scene.predictions, Tensor) and scene.predictions.ndim > 1 else None
    known = "the number of classes, which is dimension 1 of the predictions" if classes is None else f"{classes - 1}"
    upto = f"less than {known}" if classes is None else f"at most {known}, as the predictions have {counted(classes, 'class')}"
    return (
        f"labels must be at least 0 and {upto}{_range(_labels_in(scene))}. Raise the number of the model's outputs, count "
        "labels from 0, or name the label of padding with ignore_index."
    )


def _indices(found: re.Match[str], scene: InUse) -> str:
    those = _range(scene.batch if scene.targets is None else scene.targets)
    if isinstance(scene.module, nn.Embedding):
        count = scene.module.num_embeddings
        return (
            f"the Embedding has num_embeddings={count}, so indices must be 0 to {count - 1}{those}. Raise "
            "num_embeddings to the size of the vocabulary."
        )
    return f"an index is negative or too large for the dimension that it selects from{those}."


def _channels(found: re.Match[str], scene: InUse) -> str:
    shape = [int(size) for size in found[1].split(",")]
    if len(shape) > 2 and shape[-1] == int(found[2]):
        axes = ", ".join(map(str, (0, len(shape) - 1, *range(1, len(shape) - 1))))
        return f"channels come second, and here they are last: inputs.permute({axes})."
    return (
        f"the layer takes {found[2]} channels in dimension 1 and the input has {found[3]}: make it with in_channels={found[3]}."
    )


def _labels_in(scene: InUse) -> Any:
    """Return what holds labels, and no other integers such as tokens; None if that is not known."""
    if scene.targets is not None:
        return scene.targets
    if isinstance(scene.batch, Mapping):
        named = [value for key, value in scene.batch.items() if re.search("label|target", str(key), re.IGNORECASE)]
        return named or None
    return scene.batch if len([*_integers(scene.batch)]) == 1 else None


def _range(value: Any) -> str:
    """Return the range of the integers on the host. Tensors on a device are skipped: the error may have broken the device."""
    held = [one for one in _integers(value) if one.is_cpu and one.numel()]
    if not held:
        return ""
    low, high = min(int(one.min()) for one in held), max(int(one.max()) for one in held)
    return f"; those in the batch range from {low} to {high}"


def _integers(value: Any) -> Iterator[Tensor]:
    for one in tensors_in(value):
        if not one.is_floating_point() and not one.is_complex() and one.dtype is not torch.bool:
            yield one


_OF_SHAPES = (
    r"must have same reduction dim|shapes cannot be multiplied|is invalid for input of size|is out of bounds"
    r"|must match the size|not broadcastable|Sizes of tensors must match"
)
_BUILT = {"labels": _labels, "indices": _indices, "channels": _channels}

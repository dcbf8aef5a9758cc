"""From samples to batches."""

from cadenza.compat.fastnlp.core.collators.collator import Batch, Collator
from cadenza.compat.fastnlp.core.collators.padders import (
    NullPadder,
    NumpyNumberPadder,
    NumpySequencePadder,
    NumpyTensorPadder,
    Padder,
    RawNumberPadder,
    RawSequencePadder,
    RawTensorPadder,
    TorchNumberPadder,
    TorchSequencePadder,
    TorchTensorPadder,
    get_padded_numpy_array,
)

__all__ = [
    "Batch",
    "Collator",
    "NullPadder",
    "NumpyNumberPadder",
    "NumpySequencePadder",
    "NumpyTensorPadder",
    "Padder",
    "RawNumberPadder",
    "RawSequencePadder",
    "RawTensorPadder",
    "TorchNumberPadder",
    "TorchSequencePadder",
    "TorchTensorPadder",
    "get_padded_numpy_array",
]

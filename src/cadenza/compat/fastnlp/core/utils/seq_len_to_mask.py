"""``fastNLP.core.utils.seq_len_to_mask``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def seq_len_to_mask(seq_len: Any, max_len: int | None = None) -> Any:
    """Return a mask that is True inside of each sample, and False in its padding.

    Args:
        seq_len: The length of each sample, shape (B,): a tensor or a numpy array.
        max_len: L, the length of the padded samples; None: the longest of `seq_len`.

    Returns:
        Shape (B, L), of type bool, a tensor or an array like `seq_len` and on its device.

    Raises:
        AssertionError: `seq_len` has more than one dimension.
        TypeError: `seq_len` is neither a tensor nor an array.

    >>> seq_len_to_mask(torch.tensor([1, 3])).int()
    tensor([[1, 0, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    if not isinstance(seq_len, torch.Tensor | np.ndarray):
        raise TypeError(f"seq_len must be a torch.Tensor or a numpy.ndarray; got a {type(seq_len).__name__}")
    if seq_len.ndim != 1:
        raise AssertionError(f"seq_len must have one dimension; got the shape {tuple(seq_len.shape)}")
    length = int(seq_len.max()) if max_len is None else int(max_len)
    if isinstance(seq_len, np.ndarray):
        return np.arange(length) < seq_len[:, None]
    return torch.arange(length, device=seq_len.device) < seq_len[:, None]

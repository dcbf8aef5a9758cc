"""Count how often something waits for a number on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import Run


class Reads(TorchDispatchMode):
    """Inside, counts what ``item()``, ``float(tensor)`` and ``if tensor`` come down to: on a GPU each waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_in(train: Callable[[], Run]) -> int:
    """Return how many numbers a run reads."""
    reads = Reads()
    with reads:
        train()
    return reads.count

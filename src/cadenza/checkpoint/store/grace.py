"""Write the weights first, if the process may be killed before the whole checkpoint is written."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.checkpoint.store import Content, Saved, Store

_BYTES_PER_S = 50e6  # the assumed rate before the first write


class Grace:
    """The time between a signal and the end of the process.

    Args:
        grace_s: Its length in seconds; None if it is unknown.

    Raises:
        ValueError: `grace_s` is not above 0.
    """

    def __init__(self, grace_s: float | None) -> None:
        if grace_s is not None and not grace_s > 0:
            raise ValueError(f"grace_s must be above 0 seconds, or None if no limit is known; got {grace_s!r}")
        self.grace_s, self._bytes_per_s = grace_s, _BYTES_PER_S

    def write(self, store: Store, content: Content, signalled_at: float | None) -> Saved:
        """Write a checkpoint. After a signal, write the weights alone first if the time may be too short for the whole.

        Args:
            store: The store to write to.
            content: The content of the checkpoint.
            signalled_at: The time of the signal by `time.monotonic`; None without a signal.
        """
        if self.is_short(content, signalled_at):
            facts = {**content.facts, "weights_only": True, "reason": f"{content.facts['reason']}, weights first"}
            store.write(replace(content, plain={}, tensors={}, facts=facts))
        began = time.monotonic()
        saved = store.write(content)
        self._bytes_per_s = _size(content) / max(time.monotonic() - began, 1e-6)
        return saved

    def is_short(self, content: Content, signalled_at: float | None) -> bool:
        """Return whether the expected duration of a write exceeds the remaining time."""
        if self.grace_s is None or signalled_at is None or content.facts.get("weights_only"):
            return False
        return _size(content) / self._bytes_per_s > self.grace_s - (time.monotonic() - signalled_at)


def _size(content: Content) -> int:
    return sum(tensor.nbytes for tensors in (content.model, content.tensors) for tensor in tensors.values())

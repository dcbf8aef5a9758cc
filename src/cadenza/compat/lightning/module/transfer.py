"""``on_before_batch_transfer``, ``transfer_batch_to_device`` and ``on_after_batch_transfer`` of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.view import Weak

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Move a batch to the device with the hooks of the module, or of the LightningDataModule if that overrides one.

    Args:
        attached: The module.
        move: Moves a batch without these hooks.
    """

    _attached: Weak[Attached] = Weak()

    def __init__(self, attached: Attached, move: Callable[[Any], Any]) -> None:
        self._attached, self._move = attached, move
        self.dataloader_idx = 0
        """The index of the loader of the batch; an evaluation of several loaders sets it."""

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device."""
        before, move, after = (self._holder(name) for name in HOOKS)
        index, device = self.dataloader_idx, self._attached.driver.device
        if before is not None:
            batch = before(batch, index)
        batch = self._move(batch) if move is None else move(batch, device, index)
        return batch if after is None else after(batch, index)

    def _holder(self, name: str) -> Callable[..., Any] | None:
        """Return the hook of the datamodule if it overrides it, as in Lightning, or that of the module."""
        attached = self._attached
        datamodule = attached.loaders.datamodule
        if datamodule is not None and getattr(type(datamodule), name, None) is not getattr(attached.base, name):
            own: Callable[..., Any] = getattr(datamodule, name)
            return own
        return (lambda *arguments: attached.call(name, *arguments)) if attached.overrides(name) else None


def install(attached: Attached) -> None:
    """Make the driver move batches with the module's hooks, if overridden."""
    transfer = Transfer(attached, attached.driver.to_device)
    if any(transfer._holder(name) is not None for name in HOOKS):
        attached.driver.to_device = transfer

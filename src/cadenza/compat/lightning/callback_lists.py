"""The callbacks of a trainer by class, before and in a run."""

from __future__ import annotations

from typing import Any

from cadenza.compat.lightning.library import is_lightning


class CallbackLists:
    """What ``trainer`` says of its callbacks."""

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of Lightning in the list."""
        raise NotImplementedError

    def _of_class(self, name: str) -> list[Any]:
        return [one for one in self.callbacks if is_lightning(one, name)]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Each ``EarlyStopping`` of Lightning in the list."""
        return self._of_class("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first ``EarlyStopping`` of Lightning; None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Each ``Checkpoint`` of Lightning in the list."""
        return self._of_class("Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first ``Checkpoint`` of Lightning; None without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar of Lightning; None without one."""
        return next(iter(self._of_class("ProgressBar")), None)

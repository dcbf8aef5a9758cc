"""The interface between callbacks and their `CallbackManager`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from cadenza.hooks.moments import BaseCallback


class ManagedCallback(BaseCallback):
    """A callback with fastNLP's events."""

    @property
    @abstractmethod
    def callback_name(self) -> str:
        """The name under which a checkpoint holds this callback's state."""

    @abstractmethod
    def hook_at(self, event: str) -> Callable[..., Any] | None:
        """Return the hook of an event; None if this callback does not override it."""

    @abstractmethod
    def saved_state(self, trainer: Any) -> dict[str, Any]:
        """Return the entry of this callback in a checkpoint: its own states, and the counters of its filters."""

    @abstractmethod
    def restore_state(self, trainer: Any, saved: Mapping[str, Any]) -> None:
        """Restore the entry that `saved_state` returned."""

"""``fastNLP.core.callbacks.callback_manager``: fastNLP's callbacks of a training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback

logger: logging.Logger = logging.getLogger("cadenza")


class CallbackManager:
    """Calls an event on each callback, in order. During a training the native moments do that.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Iterable[ManagedCallback]) -> None:
        self.class_callbacks: list[ManagedCallback] = list(callbacks)
        self.callback_counter: Counter[str] = Counter()
        """The number of calls of each event in trainings of fastNLP's trainer."""

    def fire(self, event: str, trainer: Any, *arguments: Any) -> None:
        """Call an event on each callback, until one fails."""
        for callback in self.class_callbacks:
            if (hook := callback.hook_at(event)) is not None:
                hook(trainer, *arguments)

    def on_save_checkpoint(self, trainer: Any) -> dict[str, dict[str, Any]]:
        """Return the entries of a checkpoint by the names of the callbacks."""
        self.callback_counter["on_save_checkpoint"] += 1
        kept = {name: callback.saved_state(trainer) for name, callback in self._named()}
        return {name: state for name, state in kept.items() if state}

    def on_load_checkpoint(self, trainer: Any, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore each callback from the entry with its name."""
        self.callback_counter["on_load_checkpoint"] += 1
        named = dict(self._named())
        for name, callback in named.items():
            callback.restore_state(trainer, states.get(name, {}))
        if gone := [name for name in states if name not in named]:
            logger.warning("the checkpoint holds states of callbacks that are not in the list: %s", gone)

    def _named(self) -> Iterator[tuple[str, ManagedCallback]]:
        """Yield each callback with its name, numbered from the second of that name on."""
        seen: Counter[str] = Counter()
        for callback in self.class_callbacks:
            name = callback.callback_name
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name}#{seen[name]}", callback

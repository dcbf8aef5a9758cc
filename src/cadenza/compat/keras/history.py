"""``model.history``: the History that ``fit`` of Keras adds to each list of callbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import proxy, ref

from cadenza.compat.adapter.attributes import plain_attributes, put_back
from cadenza.compat.keras import classes


class History:
    """A `keras.callbacks.History` of the run, if its list has none. It is in ``model.history``.

    Args:
        callbacks: The adapters of the run.
        view: The ``model`` of the callbacks.
    """

    def __init__(self, callbacks: Iterable[Any], view: Any) -> None:
        own = [one.callback for one in callbacks if "History" in classes.names(one.callback)]
        self.added: Any = None
        if own:
            view._history = ref(own[-1])  # of which the view is the model
            return
        package = next((sys.modules.get(one.base.__module__.partition(".")[0]) for one in callbacks), None)
        if (kind := getattr(getattr(package, "callbacks", None), "History", None)) is not None:
            self.added = view.history = kind()
            self.added.set_model(proxy(view))
            self.added.on_train_begin()

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Add the logs of an epoch."""
        if self.added is not None:
            self.added.on_epoch_end(epoch, dict(logs))

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs and their logs."""
        kept = {} if self.added is None else plain_attributes(self.added)
        return {name: kept[name] for name in ("epoch", "history") if name in kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.added is not None:
            put_back(state, self.added)

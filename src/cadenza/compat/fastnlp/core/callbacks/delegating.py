"""A callback of fastNLP that delegates to a native one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.hooks import moments
from cadenza.hooks.listener import Listener

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.run import Run


class DelegatesToNative(Callback):
    """Registers the listeners of a native callback and saves its state."""

    native: moments.Callback
    """The native callback."""

    _loaded: dict[str, Any] | None = None  # fastNLP loads before the setup of a run, a native trainer after it

    def listeners(self) -> list[Listener]:
        kept = [Listener(moments.Callback.on_setup, self._restore), Listener(moments.Callback.on_fit_start, self._forget)]
        return [*super().listeners(), *self.native.listeners(), *kept]

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        return self.native.state_dict()

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states:
            self.native.load_state_dict(states)
            self._loaded = states

    def _restore(self, run: Run) -> None:
        if self._loaded is not None:
            self.native.load_state_dict(self._loaded)

    def _forget(self, run: Run) -> None:
        self._loaded = None

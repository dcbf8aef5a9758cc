"""The base class of the parts of ``trainer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.compat.adapter.view import View, Weak

if TYPE_CHECKING:
    from cadenza.compat.lightning.setup_view import SetupView


class PartView(View):
    """A part of ``trainer``, such as ``trainer.strategy``.

    Args:
        trainer: The view of the run.
    """

    _trainer: Weak[SetupView] = Weak()

    def __init__(self, trainer: SetupView) -> None:
        super().__init__(trainer._run)
        self._trainer = trainer

    def _reader(self) -> str:
        return self._trainer._reader()

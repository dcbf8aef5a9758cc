"""``nemo.backends.pytorch.actions`` of NeMo 0.11."""

from __future__ import annotations

from typing import ClassVar

from cadenza.compat.nemo.core.actions import Actions
from cadenza.compat.nemo.core.actions import State as StateWrapper
from cadenza.compat.nemo.core.neural_factory import NeuralModuleFactory
from cadenza.compat.neural.actions import PtActions as _PtActions
from cadenza.hooks.moments import BaseCallback

__all__ = ["PtActions", "StateWrapper"]


class PtActions(Actions, _PtActions):
    """The actions of a script without a factory of its own; for the arguments see the base class."""

    callback_classes: ClassVar[tuple[type[BaseCallback], ...]] = NeuralModuleFactory.callback_classes

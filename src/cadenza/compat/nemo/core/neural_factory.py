"""``nemo.core.neural_factory`` of NeMo 0.11."""

from __future__ import annotations

from typing import ClassVar

from cadenza.compat.nemo.core.actions import Actions
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.factory import NeuralModuleFactory as _Factory
from cadenza.compat.neural.kinds import DeviceType, OperationMode, Optimization
from cadenza.hooks.moments import BaseCallback

__all__ = ["DeviceType", "NeuralModuleFactory", "OperationMode", "Optimization"]


class NeuralModuleFactory(Actions, _Factory):
    """The entry point of NeMo 0.11 scripts. It accepts callbacks of 0.10, too."""

    callback_classes: ClassVar[tuple[type[BaseCallback], ...]] = (NeMoCallback, ActionCallback)

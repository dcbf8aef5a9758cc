"""``nemo.core.neural_types.axes``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.axes import AxisKind, AxisKindAbstract, AxisType

__all__ = ["AxisKind", "AxisKindAbstract", "AxisType"]

advise(__name__)

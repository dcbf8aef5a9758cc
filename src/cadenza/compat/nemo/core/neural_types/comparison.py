"""``nemo.core.neural_types.comparison``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.elements import NeuralTypeComparisonResult

__all__ = ["NeuralTypeComparisonResult"]

advise(__name__)

"""``nemo.utils.lr_policies``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.policies import (
    CosineAnnealing,
    InverseSquareRootAnnealing,
    PolynomialDecayAnnealing,
    SquareAnnealing,
    SquareRootAnnealing,
    WarmupAnnealing,
    WarmupHoldPolicy,
    WarmupPolicy,
)

__all__ = [
    "CosineAnnealing",
    "InverseSquareRootAnnealing",
    "PolynomialDecayAnnealing",
    "SquareAnnealing",
    "SquareRootAnnealing",
    "WarmupAnnealing",
    "WarmupHoldPolicy",
    "WarmupPolicy",
]

advise(__name__)

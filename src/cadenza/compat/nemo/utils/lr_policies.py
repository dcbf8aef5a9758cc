"""``nemo.utils.lr_policies``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.policies import (
    CosineAnnealing,
    InverseSquareRootAnnealing,
    PolynomialDecayAnnealing,
    PolynomialHoldDecayAnnealing,
    SquareAnnealing,
    SquareRootAnnealing,
    WarmupAnnealing,
    WarmupHoldPolicy,
    WarmupPolicy,
    get_all_lr_classes,
    get_lr_policy,
)

__all__ = [
    "CosineAnnealing",
    "InverseSquareRootAnnealing",
    "PolynomialDecayAnnealing",
    "PolynomialHoldDecayAnnealing",
    "SquareAnnealing",
    "SquareRootAnnealing",
    "WarmupAnnealing",
    "WarmupHoldPolicy",
    "WarmupPolicy",
    "get_all_lr_classes",
    "get_lr_policy",
]

advise(__name__)

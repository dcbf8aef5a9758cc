"""What to use instead of the names of NeMo 0.10 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from cadenza.compat.neural.absent_of_both import Rows, common

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

ABSENT: Rows = {
    **common("cadenza.compat.nemo10"),
    "core.neural_types.neural_type": {
        "CanNotInferResultNeuralType": "Catch `cadenza.compat.nemo10.core.neural_types.NeuralTypeError`.",
    },
}

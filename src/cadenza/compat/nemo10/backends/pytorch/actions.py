"""``nemo.backends.pytorch.actions`` of NeMo 0.10."""

from __future__ import annotations

from cadenza.compat.neural.actions import PtActions as _PtActions

__all__ = ["PtActions"]


class PtActions(_PtActions):
    """The actions of a script without a factory of its own; for the arguments see the base class."""

    epoch_key = "epoch_num"

"""Clip gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.compat.fastnlp.core.callbacks.delegating import DelegatesToNative


class TorchGradClipCallback(DelegatesToNative):
    """Clip the gradients before each update, with the native `ClipGradients`.

    Args:
        clip_value: The bound, greater than 0.
        clip_type: ``"norm"``: bound the total norm; ``"value"``: bound each element.
        parameters: The parameters of the model; None: all that the optimizers update.

    Raises:
        ValueError: `clip_type` is unknown, `clip_value` is not greater than 0, or the model does not have `parameters`.
    """

    def __init__(
        self,
        clip_value: float = 1,
        clip_type: Literal["norm", "value"] = "norm",
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> None:
        if clip_type not in ("norm", "value"):
            raise ValueError(f"clip_type must be 'norm' or 'value'; got {clip_type!r}")
        if not isinstance(clip_value, int | float) or not clip_value > 0:
            raise ValueError(f"clip_value must be a number greater than 0; got {clip_value!r}")
        given = [parameters] if isinstance(parameters, Tensor) else None if parameters is None else list(parameters)
        chosen = None if given is None else lambda name, parameter: any(parameter is clipped for clipped in given)
        by_norm = clip_type == "norm"
        self.native: ClipGradients = ClipGradients(
            max_norm=clip_value if by_norm else None, max_value=None if by_norm else clip_value, parameters=chosen
        )

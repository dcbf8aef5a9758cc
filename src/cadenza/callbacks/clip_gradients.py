"""Keep gradients within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from cadenza.batching import parameters_of
from cadenza.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class ClipGradients(Callback):
    """Clip the gradients of the parameters that are updated, by their total norm or each by value.

    Args:
        max_norm: Scale all gradients down together so that their total 2-norm is at most this (Pascanu et al. 2013).
        max_value: Cut each number off at plus and minus this.

    Raises:
        ValueError: Not exactly one of the two, or one that is not greater than 0.

    >>> from cadenza.testing import tiny_run
    >>> clip = ClipGradients(max_norm=0.1)
    >>> run = tiny_run(callbacks=[clip], steps=1)
    >>> clip.norm > 0.1  # before it was clipped
    tensor(True)
    """

    def __init__(self, max_norm: float | None = None, *, max_value: float | None = None) -> None:
        if (max_norm is None) == (max_value is None):
            raise ValueError(f"expected one of max_norm and max_value; got max_norm={max_norm!r}, max_value={max_value!r}")
        for name, bound in (("max_norm", max_norm), ("max_value", max_value)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be greater than 0; got {bound!r}")
        self.max_norm, self.max_value = max_norm, max_value
        self.norm: Tensor | None = None
        """The total norm before clipping by norm, shape (), on the device; None before the first step."""

    def on_before_optimizer_step(self, run: Run) -> None:
        parameters = list(parameters_of(run.updating))
        if self.max_norm is not None:
            self.norm = clip_grad_norm_(parameters, self.max_norm)
        elif self.max_value is not None:
            clip_grad_value_(parameters, self.max_value)

"""Keep gradients within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from cadenza.drivers.sharding import is_sharded, locals_of, total_norm
from cadenza.errors import nearest
from cadenza.hooks.cadence import Cadence, Interval
from cadenza.hooks.dispatch import periodic
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.loading.batches import parameters_of

if TYPE_CHECKING:
    from cadenza.run import Run

Chosen = Sequence[str] | Callable[[str, nn.Parameter], bool]


class ClipGradients(Callback):
    """Clip the gradients of the parameters that are updated, by their total norm or each by value.

    Several may stand in one list, each for parameters of its own.

    Args:
        max_norm: Scale all gradients down together so that their total norm is at most this (Pascanu et al. 2013).
        max_value: Cut each number off at plus and minus this.
        norm_type: Which norm: 2.0 is the Euclidean one, ``math.inf`` the largest magnitude.
        parameters: Which parameters: patterns for their names, such as ``["encoder.*"]``, or a function of name and parameter;
            None takes all that are updated. With either of the two, only parameters of the model.
        log: Log the total norm before clipping under this name, such as ``"train/grad_norm"``. Nothing waits for the device.
        every: How often to log; a cadence.

    Raises:
        ValueError: Not exactly one of the two bounds, a number that is not greater than 0, or `parameters` that choose none.
        CadenceError: `every` is no cadence.

    >>> from cadenza.testing import tiny_run
    >>> clip = ClipGradients(max_norm=0.1, parameters=["weight"], log="train/grad_norm", every="1 step")
    >>> run = tiny_run(callbacks=[clip], steps=2)
    >>> [step for step, norm in run.history["train/grad_norm"] if norm > 0.1]  # before it was clipped
    [1, 2]
    """

    phase = Phase.CLIP

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        max_value: float | None = None,
        norm_type: float = 2.0,
        parameters: Chosen | None = None,
        log: str | None = None,
        every: Interval = "50 steps",
    ) -> None:
        if (max_norm is None) == (max_value is None):
            raise ValueError(f"expected one of max_norm and max_value; got max_norm={max_norm!r}, max_value={max_value!r}")
        for name, bound in (("max_norm", max_norm), ("max_value", max_value), ("norm_type", norm_type)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be greater than 0; got {bound!r}")
        if isinstance(parameters, str):
            raise TypeError(f'parameters must be a sequence of patterns, such as ["encoder.*"]; got the text {parameters!r}')
        self.max_norm, self.max_value, self.norm_type = max_norm, max_value, norm_type
        self.parameters, self.log = parameters, log
        self.asks = log is not None
        self.every = Cadence.parse(every)
        self.norm: Tensor | None = None
        """The total norm before the last clipping by norm, shape (), on the device; None before the first."""
        self._step = 0  # the one under way when the norm was taken
        self._chosen: set[int] | None = None

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), *([] if self.log is None else [periodic(self.every, self._log, "logs")])]

    def on_setup(self, run: Run) -> None:
        self.norm = None

    def on_fit_start(self, run: Run) -> None:
        # Not earlier: a callback may replace parts of the model in on_setup.
        named = dict(run.driver.unwrap(run.model).named_parameters())
        self._chosen = None if self.parameters is None else {id(named[name]) for name in _names(self.parameters, named)}

    def on_before_optimizer_step(self, run: Run) -> None:
        chosen = self._chosen
        held = [one for one in parameters_of(run.updating) if one.grad is not None and (chosen is None or id(one) in chosen)]
        if not held:
            return
        if run.driver.shards and any(map(is_sharded, held)):
            self._clip_shards(run, [one.grad for one in held if one.grad is not None])
        elif self.max_norm is not None:
            self._note(run, clip_grad_norm_(held, self.max_norm, self.norm_type))
        elif self.max_value is not None:
            if self.log is not None:
                self._note(run, get_total_norm([one.grad for one in held if one.grad is not None], self.norm_type))
            clip_grad_value_(held, self.max_value)

    def _clip_shards(self, run: Run, gradients: list[Tensor]) -> None:
        """Do the same to parts of gradients by the norm of the whole ones, as each rank has another part."""
        parts = locals_of(gradients)
        if self.max_norm is not None or self.log is not None:
            self._note(run, total_norm(gradients, self.norm_type))
        if self.max_norm is not None and self.norm is not None:
            torch._foreach_mul_(parts, torch.clamp(self.max_norm / (self.norm + 1e-6), max=1.0))  # torch's formula
        elif self.max_value is not None:
            torch._foreach_clamp_min_(parts, -self.max_value)
            torch._foreach_clamp_max_(parts, self.max_value)

    def _note(self, run: Run, norm: Tensor) -> None:
        self.norm, self._step = norm, run.progress.step + 1

    def _log(self, run: Run) -> None:
        # A step may have had no gradients, if all of its batches were skipped.
        if self.log is not None and self.norm is not None and self._step == run.progress.step:
            run.log(self.log, self.norm)


def _names(chosen: Chosen, named: dict[str, nn.Parameter]) -> list[str]:
    """Return the names that are chosen.

    Raises:
        ValueError: None is, or a pattern fits none.
    """
    if callable(chosen):
        names = [name for name, parameter in named.items() if chosen(name, parameter)]
        if not names:
            raise ValueError(f"ClipGradients(parameters=...): the function chose none of the parameters {_few(named)}")
        return names
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(
                f"ClipGradients(parameters=...): no parameter's name fits {pattern!r}.{nearest(pattern, named)} There are "
                f"{_few(named)}"
            )
    return [name for name in named if any(fnmatchcase(name, pattern) for pattern in chosen)]


def _few(names: Sequence[str] | dict[str, nn.Parameter]) -> str:
    first = ", ".join(list(names)[:8])
    return f"{first}, ..." if len(names) > 8 else first

"""Clip gradients by norm or by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from cadenza.drivers.name_patterns import Choice, check_choice, named_matches
from cadenza.drivers.sharding import is_sharded, locals_of
from cadenza.engine.weight_update import updated_parameters
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import check_real
from cadenza.hooks.order import Phase
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic
from cadenza.optim.settings import Compared
from cadenza.text.hints import answered, renamed

if TYPE_CHECKING:
    from cadenza.run import Run


class Clip(NamedTuple):
    """How a callback clips gradients by their norm, within a compiled step."""

    function: Callable[[list[Tensor], Tensor, float], tuple[Tensor, Tensor]]
    """Returns the norm of gradients, and what they are multiplied by, each of shape ()."""
    max_norm: float
    """An input of the function, so a schedule compiles nothing."""
    norm_type: float
    chosen: frozenset[int] | None
    """The ids of the parameters; None for all."""
    note: Callable[[Any, Tensor], None]
    """Called with the run and the norm."""


class ClipGradients(Callback, Compared):
    """Clip the gradients of the parameters that the step updates, by their total norm or by value.

    A list may have several `ClipGradients` for different parameters.

    With multiple ranks: gradients are already reduced, so each rank scales by the same norm; it does not communicate.

    Args:
        max_norm: Scale all gradients down together so that their total norm is at most this (Pascanu et al. 2013).
        max_value: Clamp each element of the gradients to ``[-max_value, max_value]``.
        norm_type: The order of the norm: 2.0 is the Euclidean norm, ``math.inf`` the largest magnitude.
        parameters: The parameters of the model to clip: a pattern for names such as ``"encoder.*"``, several patterns, or a
            function ``(name, parameter) -> bool``. None takes all parameters that the step updates.
        log: Log the total norm before clipping under this name, such as ``"train/grad_norm"``. This does not wait.
        log_every: The interval of logging: ``50`` (steps), ``"1 epoch"``.

    Raises:
        ValueError: Both bounds or none are given, a number is not greater than 0, or `parameters` matches none.
        ScheduleError: `log_every` cannot be parsed.

    >>> from cadenza.testing import tiny_run
    >>> clip = ClipGradients(max_norm=0.1, parameters=["weight"], log="train/grad_norm", log_every=1)
    >>> run = tiny_run(callbacks=[clip], steps=2)
    >>> [step for step, norm in run.history["train/grad_norm"] if norm > 0.1]  # before it was clipped
    [1, 2]
    """

    phase: Phase | None = Phase.CLIP

    @renamed(every="log_every")
    @answered("clip")
    def __init__(
        self,
        max_norm: float | None = None,
        *,
        max_value: float | None = None,
        norm_type: float = 2.0,
        parameters: Choice[nn.Parameter] | None = None,
        log: str | None = None,
        log_every: Interval = "50 steps",
    ) -> None:
        if (max_norm is None) == (max_value is None):
            raise ValueError(f"expected max_norm or max_value, not both; got max_norm={max_norm!r}, max_value={max_value!r}")
        for name, bound in (("max_norm", max_norm), ("max_value", max_value), ("norm_type", norm_type)):
            if bound is not None:
                check_real(name, bound)
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be greater than 0; got {bound!r}")
        if parameters is not None:
            check_choice(parameters, "ClipGradients(parameters=...)")
        self.max_norm: float | None = max_norm
        self.max_value: float | None = max_value
        self.norm_type: float = norm_type
        self.parameters: Choice[nn.Parameter] | None = parameters
        self.log: str | None = log
        self.log_every: Schedule = Schedule.parse(log_every)
        self.norm: Tensor | None = None
        """The total norm before the last clipping by norm, shape (), on the device; None before the first."""
        self._step = 0  # the step of `norm`
        self._chosen: set[int] | None = None

    def listeners(self) -> list[Listener]:
        logs = [] if self.log is None else [periodic(self.log_every, self._log, "logs")]
        own = super().listeners()
        for listener in own:
            listener.splits = self.max_norm is None or type(self) is not ClipGradients
        return [*silent(own), *logs]

    def in_graph(self) -> Clip:
        """Return how a compiled step clips. Then no gradients are left for ``on_before_optimizer_step``."""
        chosen = None if self._chosen is None else frozenset(self._chosen)
        return Clip(norm_and_factor, self.max_norm or math.inf, self.norm_type, chosen, self._note)

    def on_setup(self, run: Run) -> None:
        self.norm = None

    def on_fit_start(self, run: Run) -> None:
        # Not in on_setup, where another callback may replace parts of the model.
        self._chosen = None
        if self.parameters is not None:
            named = dict(run.model.named_parameters())
            chosen = named_matches(self.parameters, named, argument="ClipGradients(parameters=...)", kind="parameter")
            self._chosen = set(map(id, chosen.values()))

    def on_before_optimizer_step(self, run: Run) -> None:
        chosen = self._chosen
        held, gradients = [], []
        for parameter in self._clipped(run):
            if (gradient := parameter.grad) is not None and (chosen is None or id(parameter) in chosen):
                held.append(parameter)
                gradients.append(gradient)
        if not held:
            return
        if run.driver.shards and any(map(is_sharded, held)):
            self._clip_shards(run, gradients)
        elif self.max_norm is not None and _are_alike(gradients):
            self._note(run, clip_alike(gradients, self.max_norm, self.norm_type))
        elif self.max_norm is not None:
            self._note(run, clip_grad_norm_(held, self.max_norm, self.norm_type))
        elif self.max_value is not None:
            if self.log is not None:
                self._note(run, get_total_norm(gradients, self.norm_type))
            clip_grad_value_(held, self.max_value)

    def _clipped(self, run: Run) -> Iterable[Tensor]:
        """Return the parameters of which `parameters` chooses."""
        return updated_parameters(run)

    def _clip_shards(self, run: Run, gradients: list[Tensor]) -> None:
        """Clip the shards of this rank by the norm of the whole gradients."""
        parts = locals_of(gradients)
        if self.max_norm is not None or self.log is not None:
            self._note(run, run.driver.total_norm(gradients, self.norm_type))
        if self.max_norm is not None and self.norm is not None:
            factor = _factor(self.norm, self.max_norm)
            for device in {part.device for part in parts}:  # the host, for parameters that FSDP keeps there
                torch._foreach_mul_([part for part in parts if part.device == device], factor.to(device))
        elif self.max_value is not None:
            torch._foreach_clamp_min_(parts, -self.max_value)
            torch._foreach_clamp_max_(parts, self.max_value)

    def _note(self, run: Run, norm: Tensor) -> None:
        self.norm, self._step = norm, run.progress.step + 1

    def _log(self, run: Run) -> None:
        # A step has no gradients if all of its batches were skipped.
        if self.log is not None and self.norm is not None and self._step == run.progress.step:
            run.log(self.log, self.norm)


def _are_alike(gradients: list[Tensor]) -> bool:
    """Return whether `clip_alike` can clip: no gradient is of a subclass, and all have one dtype and one device."""
    if {*map(type, gradients)} != {Tensor} or len({*map(_KIND, gradients)}) != 1:  # in C, as a loop takes twice the time
        return False
    return gradients[0].is_cpu or gradients[0].is_cuda


_KIND = attrgetter("dtype", "device")


@torch.no_grad()
def clip_alike(gradients: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Do what ``torch.nn.utils.clip_grad_norm_`` does, to the same bits, at half of its cost on a small model.

    The function of torch sorts the gradients by dtype and device, twice. Here all have the same.
    """
    norm, factor = norm_and_factor(gradients, max_norm, norm_type)
    torch._foreach_mul_(gradients, factor)
    return norm


def norm_and_factor(gradients: list[Tensor], max_norm: float | Tensor, norm_type: float) -> tuple[Tensor, Tensor]:
    """Return the total norm of gradients, and what clipping multiplies them by. Each has the shape ()."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, norm_type)), norm_type)
    return norm, _factor(norm, max_norm)


def _factor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return what gradients of this total norm are multiplied by: torch's formula."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

"""See how weights and gradients are spread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cadenza.drivers.matching import Choice, check_choice, matches, named_matches
from cadenza.drivers.sharding import whole
from cadenza.engine.session import session_of
from cadenza.errors import CadenceError
from cadenza.hooks.cadence import Cadence, Interval
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Every, FunctionTimer, Schedule, Timer
from cadenza.hooks.subscription import periodic
from cadenza.optim.parameters import parameters_of
from cadenza.records.record import Histogram

if TYPE_CHECKING:
    from cadenza.run import Run


class Histograms(Callback):
    """Log the distribution of parameters, and of their gradients, at a cadence. In all other steps only the cadence is asked.

    The parameters are those after the step, logged as ``parameters/{name}``. The gradients are those of the same step, as the
    optimizer is about to get them, logged as ``gradients/{name}``: clipped, if what clips them stands before in the list. They
    are gone when the step is over, so that a cadence for them counts steps. Every value travels to the host: of a big model
    choose few parameters.

    Args:
        every: A cadence. For gradients one in steps, such as ``"500 steps"``.
        parameters: Which: a pattern such as ``"encoder.*.weight"`` (``*`` and ``?`` as in file names; ``*`` spans dots too),
            several of them, or a function ``(name, parameter) -> bool``. None takes all that require a gradient.
        weights: Log the parameters themselves.
        gradients: Log their gradients.

    Raises:
        CadenceError: `every` cannot be read, or gradients are asked for at a cadence that does not count steps.
        ValueError: Nothing is to be logged; or, when a run starts, a pattern fits no parameter.

    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_log)
    ... def show(run, record):
    ...     print(record.step, sorted(record.media))
    >>> run = tiny_run(callbacks=[Histograms("2 steps", parameters="weight", gradients=True), show], steps=3)
    2 ['gradients/weight', 'parameters/weight']
    """

    def __init__(
        self,
        every: Interval = "1 epoch",
        *,
        parameters: Choice[nn.Parameter] | None = None,
        weights: bool = True,
        gradients: bool = False,
    ) -> None:
        if not weights and not gradients:
            raise ValueError("Histograms has nothing to log: set weights=True, gradients=True or both")
        self.every = Cadence.parse(every)
        self.weights, self.gradients = weights, _in_steps(self.every) if gradients else None
        if parameters is not None:
            check_choice(parameters, "Histograms(parameters=...)")
        self.parameters = parameters

    def listeners(self) -> list[Listener]:
        listeners = super().listeners()
        if self.weights:
            listeners.append(periodic(self.every, self._log_weights))
        if self.gradients is not None:
            listeners.append(Listener(Callback.on_before_optimizer_step, self._log_gradients, self.gradients))
        return listeners

    def on_fit_start(self, run: Run) -> None:
        if self.parameters is not None:
            named = dict(run.model.named_parameters())
            named_matches(self.parameters, named, argument="Histograms(parameters=...)", kind="parameter")

    def _log_weights(self, run: Run) -> None:
        for name, parameter in self._on_main(run, self._chosen(run)):
            run.log(f"parameters/{name}", Histogram(parameter))

    def _log_gradients(self, run: Run) -> None:
        # Of those that are updated now: others may have some that are left over, or half of theirs.
        updated = {id(parameter) for parameter in parameters_of(session_of(run).step.updating)}
        held = ((name, one.grad) for name, one in self._chosen(run) if one.grad is not None and id(one) in updated)
        for name, gradient in self._on_main(run, held):
            run.log(f"gradients/{name}", Histogram(gradient))

    def _on_main(self, run: Run, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors on the main process, each whole; where they are in shards all ranks take part, one tensor at a time."""
        for name, tensor in named if run.is_main or run.driver.shards else ():
            values = whole(tensor)
            if run.is_main:
                yield name, values

    def _chosen(self, run: Run) -> Iterator[tuple[str, nn.Parameter]]:
        wanted = self.parameters
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad if wanted is None else matches(wanted, name, parameter):
                yield name, parameter


@dataclass(frozen=True, slots=True)
class _EachUpdate(Every):
    """Every update in every n-th step: a ``step_fn`` may do several in one."""

    def timer(self) -> Timer:
        return FunctionTimer(lambda run: not (run.progress.step + 1) % self.count)


def _in_steps(every: Schedule) -> _EachUpdate:
    if not isinstance(every, Cadence) or every.unit != "step":
        raise CadenceError(
            f"gradients are there before the update only, so Histograms(gradients=True) needs a cadence in steps, such as "
            f'"500 steps"; got {str(every)!r}. For parameters at another cadence use a second Histograms.'
        )
    return _EachUpdate(int(every.interval), "step", under_way=True)

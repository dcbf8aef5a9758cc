"""Log the distributions of weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cadenza.drivers.name_patterns import Choice, check_choice, matches, named_matches
from cadenza.drivers.sharding import whole
from cadenza.hooks.counters import STEP_END, Counting, Reading
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule, Steady
from cadenza.hooks.subscription import in_steps, periodic
from cadenza.records.record import Histogram

if TYPE_CHECKING:
    from cadenza.run import Run
    from cadenza.status.progress import Progress


class Histograms(Callback):
    """Log the distribution of parameters, and of their gradients, at an interval.

    ``parameters/{name}`` has the values after the step. ``gradients/{name}`` has the gradients of the same step, right before
    the update: `ClipGradients` before this callback in the list has clipped them. Gradients exist only within a step, so their
    interval must count steps. All values are copied to the host: choose few parameters of a large model.

    With multiple ranks: the main process logs its own weights and gradients, which are equal on all ranks; it does not
    communicate.

    Args:
        every: The interval. With ``gradients=True`` it counts steps, such as ``"500 steps"``.
        parameters: The parameters to log: a pattern such as ``"encoder.*.weight"`` (``*`` and ``?`` as in file names; ``*``
            matches dots too), several patterns, or a function ``(name, parameter) -> bool``. None takes all that require a
            gradient.
        weights: Log the values of the parameters.
        gradients: Log the gradients of the parameters.

    Raises:
        ScheduleError: `every` cannot be parsed, or it does not count steps and `gradients` is True.
        ValueError: Both `weights` and `gradients` are False; or, at the start of a run, a pattern matches no parameter.

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
            raise ValueError("Histograms has nothing to log: got weights=False and gradients=False. Set one of them to True.")
        self.every: Schedule = Schedule.parse(every)
        self.weights: bool = weights
        self.gradients: _EachUpdate | None = None
        if gradients:
            why, remedy = (
                "gradients exist only before the update",
                "For parameters at another interval, use a second Histograms.",
            )
            self.gradients = _EachUpdate(in_steps(self.every, "Histograms(gradients=True)", why, remedy))
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
        # Only of parameters that this step updates: the gradients of others may be old or incomplete.
        updated = set(map(id, run.window.parameters))
        held = (
            (name, parameter.grad)
            for name, parameter in self._chosen(run)
            if parameter.grad is not None and id(parameter) in updated
        )
        for name, gradient in self._on_main(run, held):
            run.log(f"gradients/{name}", Histogram(gradient))

    def _on_main(self, run: Run, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the main process. For sharded tensors, every rank must call this: it gathers one at a time."""
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
class _EachUpdate(Schedule):
    """Every update in the steps of a schedule: one step of a ``step_fn`` may have several updates."""

    steps: Schedule

    def due(self, now: Reading, before: Reading) -> bool:
        return self.steps.due(now, now._replace(counts={**now.counts, "step": now.counts["step"] - 1}))

    def steady(self, now: Reading) -> Steady:
        answer, bounds = self.steps.steady(now)  # in other steps; the first answer holds for other updates of this step
        return answer if answer == self.due(now, now) else None, bounds

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        return self.steps.never(limits, accumulate, on)

    def check(self, limits: Progress) -> None:
        self.steps.check(limits)

    def __str__(self) -> str:
        return str(self.steps)

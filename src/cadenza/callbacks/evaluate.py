"""Evaluate the model during the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.engine.evaluation import evaluate, rehearse
from cadenza.engine.monitor import Mode, Monitor, Watched, is_pair
from cadenza.engine.session import session_of
from cadenza.engine.step_state import Deferred
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Interval, Schedule, brief_setting
from cadenza.hooks.subscription import periodic
from cadenza.loading.evaluation import Evaluation, Metrics
from cadenza.loading.loaders import check_loader
from cadenza.optim.averaging import Averaging
from cadenza.optim.held_weights import holders_in, no_such_weights
from cadenza.status.formats import counted
from cadenza.status.reprs import as_call
from cadenza.text.hints import answered

if TYPE_CHECKING:
    from cadenza.run import Run


class Evaluate(Callback):
    """Evaluate on a loader at an interval, and log the results. A list may have several, each with its own name.

    With multiple ranks: each rank evaluates its own shard, and all get the results of one process. It communicates, so every
    rank must call ``evaluate``.

    Args:
        loader: Any iterable of batches that can be read again.
        every: The interval: ``500`` or ``"500 steps"``, ``"1 epoch"``, ``"10 min"``. A number counts steps.
        metrics: By name, objects with ``update(predictions, targets)``, ``compute()`` and ``reset()``, such as those of
            torchmetrics; or a list, a ``MetricCollection`` or a single metric, named by class in snake case.
            ``(metric, "logits_a", "labels_a")`` updates a metric with these outputs instead.
        name: The prefix of the results, as in ``eval/loss`` and ``eval/acc``.
        compute: ``compute(model, batch)`` returns the loss, or a mapping with ``loss``, ``predictions`` and ``targets``. The
            weighted mean of each other number in it is reported too; see `Evaluation`. None takes the ``compute_loss`` of the
            trainer.
        limit: The largest number of batches in one evaluation. None: no limit.
        sanity_batches: The number of batches to try before the first epoch, so that an error shows early. The results are
            dropped.
        when_better: A pair such as ``("eval/acc", "max")``. When an evaluation is due, it runs only if this result of another
            evaluation improved since the last time.
        weights: The name of averaged weights, such as ``"ema"``, to evaluate instead of the model's own. The model holds
            them during the evaluation, so that callbacks with ``on_eval_end``, such as `BestWeights`, see them. Afterwards the
            model gets its own weights back.

    Raises:
        ValueError, TypeError, ScheduleError: An argument is wrong, or no callback provides `weights`.

    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> run = tiny_run(callbacks=[Evaluate(tiny_loader(), every="2 steps")], steps=4)
    >>> [step for step, _ in run.history["eval/loss"]]
    [2, 4]
    """

    phase: Phase | None = Phase.EVALUATE
    decides: tuple[str, ...] = ("evaluated",)

    @answered("evaluate")
    def __init__(
        self,
        loader: Iterable[Any],
        every: Interval = "1 epoch",
        *,
        metrics: Metrics | None = None,
        name: str = "eval",
        compute: Callable[[nn.Module, Any], Any] | None = None,
        limit: int | None = None,
        sanity_batches: int = 0,
        when_better: tuple[Watched, Mode] | None = None,
        weights: str | None = None,
    ) -> None:
        check_loader(loader, f"the loader of {name!r}", again=True)
        self.evaluation: Evaluation = Evaluation(loader, metrics=metrics, name=name, compute=compute, limit=limit)
        self.every: Schedule = Schedule.parse(every)
        self.sanity_batches: int = at_least(0, "sanity_batches", sanity_batches)
        self.name: str = "Evaluate" if name == "eval" else f"Evaluate({name})"
        self.monitor: Monitor | None = (
            None if when_better is None else Monitor(*_pair(when_better), owner=f"{self.name}, when_better,")
        )
        self._better = True
        self.weights = self.evaluation.weights = weights
        if weights is not None:
            self.after: Relation = (Averaging,)  # so that the average has the weights of this step

    def __repr__(self) -> str:
        held, monitor = self.evaluation, self.monitor
        pair = None if monitor is None else (monitor.name, monitor.mode)
        settings = {"name": held.name, "metrics": [*held.metrics], "compute": held.compute, "limit": held.limit}
        return as_call(self, brief_setting, when_better=pair, **settings)

    def listeners(self) -> list[Listener]:
        notes = [counted(self.evaluation.limit, "batch")] if self.evaluation.limit else []
        notes += [] if self.weights is None else [f"weights {self.weights!r}"]
        watching = [] if self.monitor is None else [Listener(Callback.on_eval_end, self._watch)]
        return [*super().listeners(), *watching, periodic(self.every, Deferred(self.evaluate), ", ".join(notes))]

    def waits_for(self) -> list[str]:
        waiting = self.monitor is not None and not self._better
        return [f"{self.monitor.name!r} has not improved since the last evaluation"] if waiting and self.monitor else []

    def on_setup(self, run: Run) -> None:
        if self.monitor is not None:
            self.monitor.reset()
        self._better = self.monitor is None
        name = self.evaluation.name
        if run.evaluations.setdefault(name, self.evaluation) is not self.evaluation:
            raise ValueError(
                f"two evaluations have the name {name!r}, and would report the same results. Give another Evaluate(name=...)."
            )

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None:
            others = {name: evaluation for name, evaluation in run.evaluations.items() if evaluation is not self.evaluation}
            self.monitor.check_reported_by(others)
        held = holders_in(hooks_of(run))
        if self.weights is not None and self.weights not in held:
            raise ValueError(no_such_weights(self.weights, held, f"Evaluate(weights={self.weights!r})"))
        if self.sanity_batches and not run.progress.step:
            Deferred(self._rehearse)(run)

    def evaluate(self, run: Run) -> None:
        """Evaluate now, and log the results. Every rank must call this."""
        if self.monitor is None or self._better:
            with self._weights_in_place(run):
                results = evaluate(session_of(run), self.evaluation)
            self._better = False  # not after an error: the evaluation is then repeated
            run.log(dict(results))

    def _rehearse(self, run: Run) -> None:
        with self._weights_in_place(run):
            rehearse(session_of(run), self.evaluation, self.sanity_batches)

    def _weights_in_place(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else holders_in(hooks_of(run))[self.weights].lend(run)

    def _watch(self, run: Run, evaluation: Evaluation) -> None:
        if self.monitor is not None and evaluation is not self.evaluation:
            value = self.monitor.value_of(run, evaluation)
            self._better |= value is not None and self.monitor.update(run, value)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else {"better": self._better, **self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.monitor is not None:
            self._better = state["better"]
            self.monitor.load_state_dict(state)


def _pair(when_better: object) -> tuple[Watched, Mode]:
    if is_pair(when_better):
        return when_better
    raise TypeError(f'when_better must be a pair such as ("eval/acc", "max"); got {when_better!r}')

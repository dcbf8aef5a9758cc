"""Runs with evaluations of given results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cadenza.engine.evaluation import record_evaluated
from cadenza.engine.session import session_of
from cadenza.engine.step_state import Deferred
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.loading.evaluation import Evaluation
from cadenza.loops.foreign import AnyCallback
from cadenza.run import Run
from cadenza.status.formats import counted
from cadenza.testing.tiny import tiny_run


def simulate(
    callbacks: Iterable[AnyCallback],
    *,
    metrics: Mapping[str, Sequence[float]],
    epochs: int | None = None,
    steps_per_epoch: int = 2,
) -> Run:
    """Run callbacks with given results: at the end of each epoch an evaluation reports the next value of each metric.

    Args:
        callbacks: The callbacks to test.
        metrics: By full name, such as ``"eval/loss"``, a value for each epoch.
        epochs: The number of epochs; None: the number of values.
        steps_per_epoch: Steps in each epoch.

    Raises:
        ValueError: There are fewer values than epochs.

    >>> from cadenza import on
    >>> @on(Callback.on_eval_end)
    ... def show(run, evaluation):
    ...     print(run.progress.epoch, evaluation.results)
    >>> run = simulate([show], metrics={"eval/loss": [3.0, 2.0]})
    1 {'eval/loss': 3.0}
    2 {'eval/loss': 2.0}
    """
    epochs = min(map(len, metrics.values())) if epochs is None else epochs
    for name, values in metrics.items():
        if len(values) < epochs:
            raise ValueError(
                f"metrics[{name!r}] has {counted(len(values), 'value')} for {counted(epochs, 'epoch')}; give one for each"
            )
    script = _Script(metrics)
    return tiny_run(callbacks=[script, *callbacks], epochs=epochs, batches=steps_per_epoch)


class _Script(Callback):
    """Reports the values of a script."""

    def __init__(self, metrics: Mapping[str, Sequence[float]]) -> None:
        self.metrics = metrics
        names = dict.fromkeys(key.rpartition("/")[0] for key in metrics)
        self.evaluations = {name: Evaluation([], name=name) for name in names}

    def on_setup(self, run: Run) -> None:
        run.evaluations.update(self.evaluations)

    def on_epoch_end(self, run: Run) -> None:
        Deferred(self._evaluate)(run)

    def _evaluate(self, run: Run) -> None:
        for prefix, evaluation in self.evaluations.items():
            hooks_of(run).on_eval_start(run, evaluation)
            own = {name: values for name, values in self.metrics.items() if name.rpartition("/")[0] == prefix}
            evaluation.results = {name: values[run.progress.epoch - 1] for name, values in own.items()}
            record_evaluated(session_of(run), evaluation)
            hooks_of(run).on_eval_end(run, evaluation)
            run.log(dict(evaluation.results))

"""The table that maps the events of Keras to native moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from cadenza.compat.adapter.event import Event
from cadenza.compat.keras.shared import plain_results
from cadenza.compat.keras.variables import to_numpy
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.outputs import Outputs

Hook = Callable[..., Any]


class HasRun(Protocol):
    """The part of an adapter used by events."""

    keras: Any
    """The state shared by the callbacks of the current run."""

    def repeat(self, event: Hook, *arguments: Any) -> None:
        """Repeat an event that preceded the checkpoint."""


def _given(adapter: HasRun, hook: Hook) -> Callable[[Run], None]:
    """Return a function that does nothing, because the adapter sets ``model`` and ``params`` on every callback."""
    return lambda run: None


def _train_begin(adapter: HasRun, hook: Hook) -> Callable[[Run], None]:
    return lambda run: hook({})


def _epoch_begin(adapter: HasRun, hook: Hook) -> Callable[[Run], None]:
    def call(run: Run) -> None:
        epoch = adapter.keras.epoch = run.progress.epoch
        if run.progress.resumed_in_epoch:
            adapter.repeat(hook, epoch, {})
        else:
            hook(epoch, {})

    return call


def _batch_begin(adapter: HasRun, hook: Hook) -> Callable[[Run, Any], None]:
    return lambda run, batch: hook(adapter.keras.seen, logs={})


def _batch_end(adapter: HasRun, hook: Hook) -> Callable[..., None]:
    """Call the event at ``on_batch_end`` inside an accumulation window, and at ``on_step_end`` for the last batch of one."""

    def call(run: Run, *of_batch: Any) -> None:
        keras = adapter.keras
        if keras.inside is bool(of_batch) and keras.scene.unwinding is None:
            hook(keras.seen - 1, logs=keras.logs)

    return call


def _epoch_end(adapter: HasRun, hook: Hook) -> Callable[[Run], None]:
    def call(run: Run) -> None:
        keras = adapter.keras
        if keras.closes() and not keras.cut:
            hook(keras.epoch, keras.epoch_logs)

    return call


def _train_end(adapter: HasRun, hook: Hook) -> Callable[[Run], None]:
    def call(run: Run) -> None:
        keras = adapter.keras
        if keras.closes():
            hook(logs=keras.epoch_logs)

    return call


def _test_begin(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation], None]:
    return lambda run, evaluation: hook({}) if adapter.keras.tests else None


def _test_end(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation], None]:
    def call(run: Run, evaluation: Evaluation) -> None:
        if adapter.keras.tests and evaluation.complete and adapter.keras.scene.unwinding is None:
            hook(plain_results(evaluation))

    return call


def _test_batch_begin(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation, Any], None]:
    return lambda run, evaluation, batch: hook(evaluation.batch, logs={}) if adapter.keras.tests else None


def _test_batch_end(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation, Any, Outputs], None]:
    def call(run: Run, evaluation: Evaluation, batch: Any, outputs: Outputs) -> None:
        keras = adapter.keras
        if keras.tests and keras.scene.unwinding is None:
            keras.add_test_batch(evaluation, batch, outputs)
            hook(evaluation.batch - 1, logs=keras.test_logs)

    return call


def _predict_begin(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation], None]:
    return lambda run, evaluation: None if adapter.keras.tests else hook({})


def _predict_end(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation], None]:
    def call(run: Run, evaluation: Evaluation) -> None:
        if not adapter.keras.tests and evaluation.complete and adapter.keras.scene.unwinding is None:
            hook({})

    return call


def _predict_batch_begin(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation, Any], None]:
    return lambda run, evaluation, batch: None if adapter.keras.tests else hook(evaluation.batch, logs={})


def _predict_batch_end(adapter: HasRun, hook: Hook) -> Callable[[Run, Evaluation, Any, Outputs], None]:
    def call(run: Run, evaluation: Evaluation, batch: Any, outputs: Outputs) -> None:
        if not adapter.keras.tests and adapter.keras.scene.unwinding is None:
            hook(evaluation.batch - 1, logs={"outputs": _arrays(outputs["predictions"])})

    return call


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_arrays, value))
    return to_numpy(value) if hasattr(value, "detach") else value


EVENTS: Mapping[str, Event] = {
    "set_model": Event(Callback.on_setup, _given, "model is a view of the run"),
    "set_params": Event(Callback.on_setup, _given, "epochs, steps (batches of an epoch) and verbose"),
    "on_train_begin": Event(Callback.on_fit_start, _train_begin, "in a resumed run, weights, rates and state are kept"),
    "on_epoch_begin": Event(
        Callback.on_epoch_start, _epoch_begin, "again in a resumed epoch: weights, rates and state are kept"
    ),
    "on_train_batch_begin": Event(Callback.on_batch_start, _batch_begin),
    "on_batch_begin": Event(Callback.on_batch_start, _batch_begin, "the older name of on_train_batch_begin"),
    "on_train_batch_end": Event(
        Callback.on_step_end, _batch_end, "after the update; inside an accumulation window at on_batch_end"
    ),
    "on_batch_end": Event(Callback.on_step_end, _batch_end, "the older name of on_train_batch_end"),
    "on_test_begin": Event(Callback.on_eval_start, _test_begin, "of each Evaluate, and of trainer.evaluate"),
    "on_test_batch_begin": Event(Callback.on_eval_batch_start, _test_batch_begin),
    "on_test_batch_end": Event(Callback.on_eval_batch_end, _test_batch_end, "means of the loss and other outputs, not metrics"),
    "on_test_end": Event(Callback.on_eval_end, _test_end),
    "on_epoch_end": Event(
        Callback.on_epoch_end,
        _epoch_end,
        "after the evaluation of the epoch",
    ),
    "on_train_end": Event(Callback.on_fit_end, _train_end, "not after an error or a signal"),
    "on_predict_begin": Event(Callback.on_eval_start, _predict_begin, "of trainer.predict"),
    "on_predict_batch_begin": Event(Callback.on_eval_batch_start, _predict_batch_begin),
    "on_predict_batch_end": Event(Callback.on_eval_batch_end, _predict_batch_end),
    "on_predict_end": Event(Callback.on_eval_end, _predict_end),
}
"""The events by name, in the order of a run."""

ALIASES: Mapping[str, str] = {"on_batch_begin": "on_train_batch_begin", "on_batch_end": "on_train_batch_end"}
"""Older names. If a class overrides both, the newer method decides whether the older one is called, as in Keras."""

BATCH_ENDS: frozenset[str] = frozenset({"on_train_batch_end", "on_batch_end"})
"""Events at the end of a batch."""

TRACKED: frozenset[str] = frozenset(
    {
        *("on_train_batch_begin", "on_batch_begin", "on_train_batch_end", "on_batch_end", "on_epoch_begin", "on_epoch_end"),
        *("on_train_begin", "on_train_end"),
    }
)
"""Events with training metrics."""

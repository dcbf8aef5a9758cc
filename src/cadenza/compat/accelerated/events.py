"""The table that maps the events of pytorch-accelerated to native moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.engine.objective import predictions_in
from cadenza.engine.session import session_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment
from cadenza.loading.batches import size_of
from cadenza.loading.evaluation import Evaluation, Metrics

if TYPE_CHECKING:
    from cadenza.run import Run


KEY = "accelerated"
"""The key of this adapter in ``Session.adapters``."""


class StopTrainingError(Exception):
    """Raised in a callback or in a hook of the trainer to stop the training."""


class CallbackMethodNotImplementedError(AttributeError):
    """A callback has no method or attribute with this name. `CallbackHandler.call_event` skips such a callback."""


class Events(Callback, declares=True):
    """The two events at the end of an epoch. The evaluation of the epoch runs between them."""

    def on_train_epoch_end(self, run: Run, /) -> None:
        """Called after the last step of an epoch, before its evaluation."""

    def on_training_run_epoch_end(self, run: Run, /) -> None:
        """Called after the evaluation of an epoch."""


class EpochStart(Listener):
    """Delivers ``on_train_epoch_start``.

    The adapter's trainer calls it later than the native hook, inside ``_run_train_epoch``.
    """

    __slots__ = ()


class AcceleratedCallback(BaseCallback):
    """The base class of all callbacks of this adapter."""

    def reads_history(self) -> bool:
        """Return whether it overrides an event that can read metrics, so that a native run must keep them."""
        return False


class EvaluationStopped(Exception):  # noqa: N818  # not an error: it leaves an evaluation
    """Raised to leave an evaluation in which the training was stopped."""


Keywords = Callable[..., dict[str, Any]]


def _nothing(run: Run, *_: Any) -> dict[str, Any]:
    return {}


def train_step(run: Run, outputs: Any, *, ended: bool = False) -> dict[str, Any]:
    """Return the keywords of ``on_train_step_end``. `ended` says whether the batch is already counted."""
    batch, number = run.batch, run.progress.batch_in_epoch - ended
    adapted: Any = session_of(run).adapters.get(KEY)
    own = adapted is not None and adapted.facade
    return {"batch": batch, "batch_output": outputs if own else as_batch_output(outputs, batch), "step": number}


def _eval_step(run: Run, evaluation: Any, batch: Any, outputs: Any) -> dict[str, Any]:
    adapted: Any = session_of(run).adapters.get(KEY)
    own = adapted is not None and adapted.facade and isinstance(evaluation, EvalEpoch)
    return {"batch": batch, "batch_output": adapted.output if own else as_batch_output(outputs, batch)}


def _eval_epoch(run: Run, evaluation: Any) -> dict[str, Any]:
    return {"is_intermediate": is_intermediate(run, evaluation)}


@dataclass(frozen=True, slots=True)
class Event:
    """An event: its native hook, if any, and the keyword arguments passed to callbacks along with the trainer."""

    moment: Moment | None
    keywords: Keywords = _nothing
    stops: bool = True
    """Whether a `StopTrainingError` in it stops the training. Otherwise it propagates as an error."""
    after_stop: bool = False
    """Whether it is also called after a stop."""


EVENTS: Mapping[str, Event] = {
    "on_init_end": Event(Callback.on_setup, stops=False),
    "on_training_run_start": Event(Callback.on_fit_start, stops=False),
    "on_train_epoch_start": Event(Callback.on_epoch_start),
    "on_train_step_start": Event(Callback.on_batch_start),
    "on_train_step_end": Event(Callback.on_before_backward, train_step),
    "on_train_epoch_end": Event(Events.on_train_epoch_end),
    "on_eval_epoch_start": Event(Callback.on_eval_start, _eval_epoch),
    "on_eval_step_start": Event(Callback.on_eval_batch_start),
    "on_eval_step_end": Event(Callback.on_eval_batch_end, _eval_step),
    "on_eval_epoch_end": Event(Callback.on_eval_end, _eval_epoch),
    "on_training_run_epoch_end": Event(Events.on_training_run_epoch_end),
    "on_training_run_end": Event(Callback.on_fit_end, stops=False, after_stop=True),
    "on_evaluation_run_start": Event(None, stops=False),
    "on_evaluation_run_end": Event(None, stops=False, after_stop=True),
    "on_stop_training_error": Event(Callback.on_stop, stops=False, after_stop=True),
}
"""The 15 events by name, in the order of a run."""


def as_batch_output(outputs: Any, batch: Any) -> Any:
    """Return the outputs of a native run, with ``model_outputs`` and ``batch_size`` added if missing."""
    return outputs if "model_outputs" in outputs and "batch_size" in outputs else BatchOutput(outputs, batch)


class BatchOutput(MutableMapping[str, Any]):
    """A view of the outputs of a native run. Writes change those outputs.

    ``model_outputs`` is their entry ``predictions`` or ``logits``; ``batch_size`` is the first dimension of the batch.

    >>> output = BatchOutput({"loss": 1.0, "predictions": "cat"}, batch=None)
    >>> output["model_outputs"], output["batch_size"], len(output)
    ('cat', 1, 4)
    """

    def __init__(self, outputs: Any, batch: Any) -> None:
        self._outputs = outputs
        self._also: Mapping[str, Callable[[], Any]] = {
            name: value
            for name, value in (("model_outputs", lambda: predictions_in(outputs)), ("batch_size", lambda: size_of(batch)))
            if name not in outputs
        }

    def __getitem__(self, name: str) -> Any:
        return self._also[name]() if name in self._also and name not in self._outputs else self._outputs[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._outputs[name] = value

    def __delitem__(self, name: str) -> None:
        del self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._outputs, *self._also))

    def __len__(self) -> int:
        return len({*self._outputs, *self._also})

    def __contains__(self, name: object) -> bool:  # does not compute the entry
        return name in self._outputs or name in self._also


class EvalEpoch(Evaluation):
    """An evaluation epoch of pytorch-accelerated."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        compute: Callable[[nn.Module, Any], Any] | None,
        metric: str = "eval_loss_epoch",
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(loader, name=name, compute=compute, metrics=metrics)
        self.metric = metric
        """The name of its loss in the run history, without a prefix."""

    @property
    def is_intermediate(self) -> bool:
        """Whether it runs inside a training epoch."""
        return self.metric == "intermediate_eval_loss"


def is_intermediate(run: Run, evaluation: Evaluation) -> bool:
    """Return whether an evaluation runs inside a training epoch."""
    return evaluation.is_intermediate if isinstance(evaluation, EvalEpoch) else session_of(run).cursor.in_epoch

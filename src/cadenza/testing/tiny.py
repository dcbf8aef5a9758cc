"""Complete runs of a model with two weights in milliseconds, evaluations of given results, and a record of moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.engine.evaluation import record_evaluated
from cadenza.engine.plan import indented
from cadenza.engine.session import session_of
from cadenza.engine.step_state import Deferred
from cadenza.engine.training_log import EpochMeans
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment, moments_of
from cadenza.loading.evaluation import Evaluation
from cadenza.loops.foreign_callbacks import AnyCallback
from cadenza.run import Run
from cadenza.status.formats import counted
from cadenza.status.progress import Counters
from cadenza.trainer import Trainer

Batch = tuple[Tensor, Tensor]


def tiny_model() -> nn.Linear:
    """Return a model of two weights, which always have the same values."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    return model


def tiny_loader(batches: int = 5, batch_size: int = 2) -> list[Batch]:
    """Return batches ``(inputs, targets)`` of ``y = 2x + 1``: shapes (batch_size, 1), float32.

    Args:
        batches: The number of batches.
        batch_size: The number of samples in each.

    >>> [(inputs.tolist(), targets.tolist()) for inputs, targets in tiny_loader(batches=2, batch_size=1)]
    [([[-1.0]], [[-1.0]]), ([[1.0]], [[3.0]])]
    """
    inputs = torch.linspace(-1, 1, batches * batch_size).unsqueeze(1)
    return list(zip(inputs.split(batch_size), (2 * inputs + 1).split(batch_size), strict=True))


def tiny_trainer(
    *,
    callbacks: Iterable[AnyCallback] = (),
    epochs: int | None = None,
    steps: int | None = None,
    batches: int = 5,
    losses: Sequence[float] | None = None,
    loader: Iterable[Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a trainer of a two-weight model on the CPU.

    Args:
        callbacks: The callbacks to test.
        epochs: ``max_epochs``; 1 if neither `steps` nor ``max_tokens`` is given.
        steps: ``max_steps``.
        batches: Batches in an epoch.
        losses: The loss of each batch, instead of a computed one; their number replaces `batches`.
        loader: A loader to use instead of `tiny_loader`.
        arguments: Further arguments of `Trainer`. Nothing is shown unless you pass ``progress=True``, and no mean of each epoch
            is logged, so that records have what the callbacks log.

    >>> trainer = tiny_trainer(losses=[3.0, 2.0, 1.0])
    >>> trainer.fit().progress.step
    3
    """
    script = iter(losses or ())

    def scripted(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0]).sum() * 0.0 + next(script)
        return loss

    def squared_error(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    if "step_fn" not in arguments:
        arguments.setdefault("compute_loss", scripted if losses else squared_error)
    trainer = Trainer(
        tiny_model() if (model := arguments.pop("model", None)) is None else model,  # a module may be false: it has a length
        arguments.pop("optimizer", _sgd),
        tiny_loader(len(losses) if losses else batches) if loader is None else loader,
        max_epochs=1 if epochs is None and steps is None and "max_tokens" not in arguments else epochs,
        max_steps=steps,
        callbacks=callbacks,
        **{"progress": False, **({} if "driver" in arguments else {"driver": "single", "device": "cpu"}), **arguments},
    )
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, EpochMeans)]
    return trainer


def tiny_run(**arguments: Any) -> Run:
    """Do a complete run of a two-weight model in milliseconds; the arguments are those of `tiny_trainer`.

    >>> run = tiny_run(epochs=2, accumulate=2)
    >>> run.progress.now()
    Counters(epoch=2, step=6, batch=10, batch_in_epoch=0, samples=20, tokens=0)
    """
    return tiny_trainer(**arguments).fit()


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True, slots=True)
class Seen:
    """One firing of a moment, and the counters then: an element of `Recorder.seen`.

    >>> from cadenza.testing import tiny_run
    >>> recorder = Recorder(Callback.on_step_end)
    >>> run = tiny_run(callbacks=[recorder], batches=2)
    >>> [(seen.moment, seen.at.step) for seen in recorder.seen]
    [('on_step_end', 1), ('on_step_end', 2)]
    """

    moment: str
    """The name of the moment."""
    at: Counters
    """The counters when it fired."""


class Recorder(Callback):
    """Records the moments that it receives.

    Args:
        only: The moments to record, such as ``Callback.on_step_end``; all moments if there is none.

    >>> from cadenza.testing import tiny_run
    >>> recorder = Recorder(Callback.on_step_end, Callback.on_epoch_end)
    >>> run = tiny_run(callbacks=[recorder], batches=2)
    >>> recorder.names
    ['on_step_end', 'on_step_end', 'on_epoch_end']
    """

    def __init__(self, *only: Moment) -> None:
        self.seen: list[Seen] = []
        self._only = only or tuple(moments_of(type(self)).values())

    def listeners(self) -> list[Listener]:
        return [Listener(moment, self._recording(moment)) for moment in self._only]

    def _recording(self, moment: Moment) -> Callable[..., None]:
        def record(run: Run, *_: Any) -> None:
            self.seen.append(Seen(moment.__name__, run.progress.now()))

        return record

    @property
    def names(self) -> list[str]:
        """The recorded moments, in order."""
        return [seen.moment for seen in self.seen]

    def diagram(self) -> str:
        """Return the tree of the recorded moments: each where it came first, with its count."""
        return "\n".join(f"{line:<36}{times:>3}" for line, times in indented(Counter(self.names)))


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

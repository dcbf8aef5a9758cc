"""For tests of callbacks: complete runs in milliseconds, a scripted stream of moments, and a contract that all should keep."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.callbacks.evaluate import Evaluate
from cadenza.engine.evaluation import record_evaluated
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import Hooks, on
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment, moments_of
from cadenza.loading.evaluation import Evaluation
from cadenza.run import Run
from cadenza.status.plain import decode, encode, first_difference
from cadenza.status.progress import Counters
from cadenza.testing.launching import launch
from cadenza.testing.proof import prove_resume
from cadenza.trainer import Trainer

__all__ = [
    "Recorder",
    "Seen",
    "check_callback",
    "launch",
    "prove_resume",
    "simulate",
    "tiny_loader",
    "tiny_model",
    "tiny_run",
    "tiny_trainer",
]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Seen:
    """One firing of a moment, and the counters then."""

    moment: str
    at: Counters


class Recorder(Callback):
    """Keeps the moments it sees.

    Args:
        only: The moments to hear, such as ``Callback.on_step_end``; none hears all.

    >>> recorder = Recorder(Callback.on_step_end, Callback.on_epoch_end)
    >>> run = tiny_run(callbacks=[recorder], batches=2)
    >>> recorder.names
    ['on_step_end', 'on_step_end', 'on_epoch_end']
    """

    def __init__(self, *only: Moment) -> None:
        self.seen: list[Seen] = []
        self._only = only or tuple(moments_of(type(self)).values())

    def listeners(self) -> list[Listener]:
        return [Listener(moment, self._hearing(moment)) for moment in self._only]

    def _hearing(self, moment: Moment) -> Callable[..., None]:
        def hear(run: Run, *_: Any) -> None:
            self.seen.append(Seen(moment.__name__, run.progress.now()))

        return hear

    @property
    def names(self) -> list[str]:
        """The moments seen, in order."""
        return [seen.moment for seen in self.seen]

    def diagram(self) -> str:
        """Return the tree of what was seen: each moment where it came first, and how often it came."""
        lines: dict[str, str] = {}
        depth = 0
        for name in self.names:
            depth -= name.endswith("_end")
            lines.setdefault(name, "  " * depth + name)
            depth += name.endswith("_start")
        times = Counter(self.names)
        return "\n".join(f"{line:<36}{times[name]:>3}" for name, line in lines.items())


def tiny_model() -> nn.Linear:
    """Return a model of two weights, always the same."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    return model


def tiny_loader(batches: int = 5, batch_size: int = 2) -> list[Batch]:
    """Return batches ``(inputs, targets)`` of ``y = 2x + 1``: shapes (batch_size, 1), float32."""
    inputs = torch.linspace(-1, 1, batches * batch_size).unsqueeze(1)
    return list(zip(inputs.split(batch_size), (2 * inputs + 1).split(batch_size), strict=True))


def tiny_trainer(
    *,
    callbacks: Iterable[BaseCallback] = (),
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
        epochs: ``max_epochs``; 1 if `steps` is not given either.
        steps: ``max_steps``.
        batches: Batches in an epoch.
        losses: What the loss of each batch shall be, instead of a real one; `batches` is their number.
        loader: Another loader than `tiny_loader`.
        arguments: Any other arguments of `Trainer`.
    """
    script = iter(losses or ())

    def scripted(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0]).sum() * 0.0 + next(script)
        return loss

    def squared_error(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    if "step_fn" not in arguments:
        arguments.setdefault("compute_loss", scripted if losses else squared_error)
    return Trainer(
        tiny_model() if (model := arguments.pop("model", None)) is None else model,  # a module may be false: it has a length
        arguments.pop("optimizer", _sgd),
        tiny_loader(len(losses) if losses else batches) if loader is None else loader,
        max_epochs=1 if epochs is None and steps is None else epochs,
        max_steps=steps,
        callbacks=callbacks,
        driver=arguments.pop("driver", "cpu"),
        **arguments,
    )


def tiny_run(**arguments: Any) -> Run:
    """Do a complete run of a two-weight model in milliseconds; the arguments are those of `tiny_trainer`.

    >>> run = tiny_run(epochs=2, accumulate=2)
    >>> run.progress.now()
    Counters(epoch=2, step=6, batch=10, batch_in_epoch=0, samples=20)
    """
    return tiny_trainer(**arguments).fit()


def simulate(
    callbacks: Iterable[BaseCallback],
    *,
    metrics: Mapping[str, Sequence[float]],
    epochs: int | None = None,
    steps_per_epoch: int = 2,
) -> Run:
    """Play a script to callbacks: at the end of each epoch an evaluation reports the next value of each metric.

    Args:
        callbacks: The callbacks to test.
        metrics: By full name, such as ``"eval/loss"``, a value for each epoch.
        epochs: How many; None: as many as there are values.
        steps_per_epoch: Steps in each epoch.

    Raises:
        ValueError: There are fewer values than epochs.

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
            raise ValueError(f"metrics[{name!r}] has {len(values)} values for {epochs} epochs; give one for each")
    script = _Script(metrics)
    return tiny_run(callbacks=[script, *callbacks], epochs=epochs, batches=steps_per_epoch)


class _Script(Callback):
    """Reports what is written."""

    def __init__(self, metrics: Mapping[str, Sequence[float]]) -> None:
        self.metrics = metrics
        self.evaluations = {
            name: Evaluation([], name=name) for name in dict.fromkeys(key.rpartition("/")[0] for key in metrics)
        }

    def on_setup(self, run: Run) -> None:
        run.evaluations.update(self.evaluations)

    def on_epoch_end(self, run: Run) -> None:
        for prefix, evaluation in self.evaluations.items():
            run.hooks.on_eval_start(run, evaluation)
            evaluation.results = {
                name: values[run.progress.epoch - 1]
                for name, values in self.metrics.items()
                if name.rpartition("/")[0] == prefix
            }
            record_evaluated(run, evaluation)
            run.hooks.on_eval_end(run, evaluation)
            run.log(dict(evaluation.results))


def check_callback(factory: Callable[[], BaseCallback]) -> None:
    """Check what every callback should keep: pass a function that makes one. Each run evaluates as ``eval/loss``.

    Two of it live in one list, under names of their own, or a `CallbackError` names both; one instance serves several runs; it
    works in the first place of the list and in the last; its state can be saved, and comes back the same from a fresh one; when
    a run fails, it adds no error of its own; and the same instance twice in one list is refused.

    Raises:
        AssertionError: It does not; the message says what.
        Exception: Whatever the callback raises in one of the runs.

    >>> from cadenza.callbacks import EarlyStopping
    >>> check_callback(lambda: EarlyStopping("eval/loss", mode="min", patience=3))
    """
    with tempfile.TemporaryDirectory() as folder:
        run_in = _Rooms(Path(folder))
        first, second = factory(), factory()
        names = list(Hooks([first, second]).callbacks)
        assert len(set(names)) == 2, f"two instances share the name {names[0]!r}"
        try:
            run_in.new([first, second])
        except CallbackError as refusal:
            if not all(name in str(refusal) for name in names):
                raise
        run_in.new([first])
        run_in.new([factory()], evaluate_first=False)
        _check_state(first, factory(), run_in)
        _check_failing_run(factory(), run_in)
        _check_refused_twice(first)


class _Rooms:
    """Runs, each in a new directory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def new(self, callbacks: Sequence[BaseCallback], *, evaluate_first: bool = True) -> Run:
        self._count += 1
        evaluate = Evaluate(tiny_loader(2))
        ordered = [evaluate, *callbacks] if evaluate_first else [*callbacks, evaluate]
        return tiny_run(callbacks=ordered, epochs=2, directory=self._folder / str(self._count))


def _check_state(used: BaseCallback, fresh: BaseCallback, run_in: _Rooms) -> None:
    state = used.state_dict()
    plain, tensors = encode({f"{type(used).__name__}.state_dict()": state})
    (state,) = decode(plain, tensors).values()  # as a checkpoint gives it back

    def restore(run: Run) -> None:
        fresh.load_state_dict(state)
        again = fresh.state_dict()
        difference = first_difference(again, state)
        assert difference is None, f"after load_state_dict, state_dict gives something else: {difference}"

    run_in.new([fresh, on(Callback.on_setup)(restore)])  # when a resume does it: the parts are built


def _check_failing_run(callback: BaseCallback, run_in: _Rooms) -> None:
    def fail(run: Run) -> None:
        if run.progress.step == 2:
            raise RuntimeError("a failure on purpose")

    failing = on(Callback.on_step_end)(fail)
    try:
        run_in.new([callback, failing])
    except RuntimeError as error:
        then = [note for note in getattr(error, "__notes__", ()) if "failed as well" in note]
        assert not then, f"when a run failed, the callback failed in turn: {then}"


def _check_refused_twice(callback: BaseCallback) -> None:
    try:
        Hooks([callback, callback])
    except CallbackError:
        return
    raise AssertionError("the same instance was taken twice")


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)

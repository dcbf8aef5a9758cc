"""Find what a callback depends on: state that no checkpoint has, reads of the device, the order of the list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.log_training import LogTraining
from cadenza.callbacks.profile import Profile
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.subscription import on
from cadenza.loops.foreign import AdaptedCallback
from cadenza.run import Run
from cadenza.status.plain import first_difference
from cadenza.testing.results import results_of, without_clocks
from cadenza.testing.tiny import tiny_loader, tiny_trainer

Factory = Callable[[], BaseCallback]
_RUN: dict[str, Any] = {"batches": 8, "epochs": 2, "accumulate": {0: 2, "1 epoch": 1}}
"""The steps of the first epoch have two batches, those of the second one."""
_CUT = 3  # inside an epoch, and before the evaluation at its end


class _Cut(BaseException):
    """Ends a run as a kill does."""


def check_resumed(factory: Factory, folder: Path, ignore: Sequence[str]) -> None:
    """Compare a run with one that is cut and continued with a new instance.

    Raises:
        AssertionError: They differ. The message names the attributes with other values.
    """
    whole, again = (_whole(factory(), folder / f"whole{number}", ignore) for number in (1, 2))
    if first_difference(whole.results, again.results, "runs") is not None:
        return  # two equal runs differ: nothing can be said about a third one
    resumed = _resumed(factory, folder / "cut", ignore)
    changed = {
        name: (value, resumed.attributes.get(name))
        for name, value in whole.attributes.items()
        if again.attributes.get(name) == value  # else it depends on the clock
        and whole.at_start.get(name) != value  # else it says how this process began
        and resumed.attributes.get(name) != value
    }
    difference = first_difference(whole.results, resumed.results, "the run")
    if difference is None and not changed:
        return
    names = [f"{name} ({value!r} in a whole run, {other!r} here)" for name, (value, other) in changed.items()]
    where = f" in {difference}" if difference else ""
    attributes = f"Attributes with another value: {', '.join(names)}. " if names else ""
    raise AssertionError(
        f"{whole.name} has state that no checkpoint has: a run that is cut after step {_CUT} and continued with a new instance "
        f"differs{where}. {attributes}Return these values from state_dict and restore them in load_state_dict, or compute them "
        "from run.progress."
    )


def check_reads(callback: BaseCallback, folder: Path) -> None:
    """Raise `AssertionError` if a hook reads a tensor on the host in every step."""
    if isinstance(callback, Profile):
        return
    with redirect_stdout(StringIO()):  # the table of the profile
        run = tiny_trainer(callbacks=[evaluated(), callback, Profile()], directory=folder, seed=0, epochs=2).fit()
    name = hooks_of(run).name_of(callback)
    reads = run.profile.host_reads if run.profile is not None else ()
    found = [one for one in reads if one.callback == name and one.steps >= one.sampled]
    assert not found, (
        f"{name} reads the device in each step, and on a GPU each read waits for all work before it: {found[0].moment} did "
        f"{found[0].often}. Log the tensor with run.log, which does not wait; read it on a schedule, such as "
        "@on(..., every=100); or pass reads=True."
    )


def check_order(factory: Factory, folder: Path, ignore: Sequence[str]) -> None:
    """Compare runs in which independent callbacks stand before and after the callback.

    Raises:
        AssertionError: They differ.
    """
    found: list[dict[str, Any]] = []
    name = type(factory()).__name__
    for number in range(2):
        callback = factory()
        others: list[BaseCallback] = [
            evaluated(),
            LogTraining("1 step", throughput=False),
            on(Callback.on_step_end)(_log_probe),
        ]
        first = [one for one in others if type(one) is type(callback)]  # one may watch the results of the other
        others = [one for one in others if one not in first]
        callbacks = [*first, *others, callback] if number == 0 else [*first, callback, *reversed(others)]
        trainer = tiny_trainer(callbacks=callbacks, directory=folder / str(number), seed=0, epochs=2)
        results = without_clocks(results_of(trainer, trainer.fit()), ignore)
        del results["states"]["callbacks"]  # in the order of the list
        results["history"] = dict(sorted(results["history"].items()))
        results["records"] = [dict(sorted(one.items())) for one in results["records"]]
        found.append(results)
    difference = first_difference(found[0], found[1], "the run")
    assert difference is None, (
        f"{name} gives other results at the start of the list than at its end, beside Evaluate, LogTraining and a hook that "
        f"logs a number: {difference}. Declare after = (...) or before = (...) with the classes or phases that it depends on, "
        "or do not read what other callbacks change."
    )


def _log_probe(run: Run) -> None:
    run.log("probe", run.progress.step)


def evaluated() -> Evaluate:
    """Return an evaluation of two batches."""
    return Evaluate(tiny_loader(2))


class _Ended:
    """The results of a run, and the attributes of the callback before the first step and after the last."""

    def __init__(self, name: str, results: dict[str, Any], callback: BaseCallback, at_start: dict[str, Any]) -> None:
        self.name, self.results, self.attributes, self.at_start = name, results, attributes_of(callback), at_start


def attributes_of(callback: BaseCallback) -> dict[str, Any]:
    """Return the attributes of an instance that are numbers, texts or small tensors, as plain values."""
    holder = callback.callback if isinstance(callback, AdaptedCallback) else callback
    values = {name: _plain(value) for name, value in getattr(holder, "__dict__", {}).items()}
    return {name: value for name, value in values.items() if value is not _OTHER}


_OTHER: Any = object()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist() if value.numel() <= 16 else _OTHER
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


def _trainer(callback: BaseCallback, folder: Path, *more: BaseCallback) -> Any:
    saving = Checkpoint(lambda run: False, background=False, on_signal=False)
    callbacks = [evaluated(), callback, *more] if isinstance(callback, Checkpoint) else [evaluated(), callback, *more, saving]
    return tiny_trainer(callbacks=callbacks, directory=folder, seed=0, **_RUN)


def _whole(callback: BaseCallback, folder: Path, ignore: Sequence[str]) -> _Ended:
    at_start: dict[str, Any] = {}

    def note(run: Run) -> None:
        at_start.update(attributes_of(callback) if not run.progress.step else {})

    trainer = _trainer(callback, folder, on(Callback.on_epoch_start)(note))
    run = trainer.fit()
    return _Ended(hooks_of(run).name_of(callback), _results(trainer, run, ignore), callback, at_start)


def _resumed(factory: Factory, folder: Path, ignore: Sequence[str]) -> _Ended:
    def stop(run: Run) -> None:
        run.save("the run is cut here")
        run.after_step(cut)

    def cut() -> None:
        raise _Cut

    with suppress(_Cut):
        _trainer(factory(), folder, on(Callback.on_step_end, at=_CUT)(stop)).fit()
    callback = factory()
    trainer = _trainer(callback, folder)
    run = trainer.fit(resume="auto")
    return _Ended(hooks_of(run).name_of(callback), _results(trainer, run, ignore), callback, {})


def _results(trainer: Any, run: Run, ignore: Sequence[str]) -> dict[str, Any]:
    found = without_clocks(results_of(trainer, run, (Checkpoint,)), ignore)
    callbacks = found["states"]["callbacks"]
    found["states"]["callbacks"] = {name: state for name, state in callbacks.items() if state}
    return {**found, "outcome": run.outcome and run.outcome.kind}

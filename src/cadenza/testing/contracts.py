"""The requirements on every callback."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cadenza.errors import CallbackError, DirectoryError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.subscription import on
from cadenza.loops.foreign import AnyCallback, adapt, base_of
from cadenza.run import Run
from cadenza.status.plain import decode, encode, first_difference
from cadenza.testing.differing import attributes_of, check_order, check_reads, check_resumed, evaluated
from cadenza.testing.results import CLOCKS, results_of, without_clocks
from cadenza.testing.tiny import tiny_model, tiny_trainer
from cadenza.trainer import Trainer


def check_callback(factory: Callable[[], AnyCallback], *, ignore: Sequence[str] = CLOCKS, reads: bool = False) -> None:
    """Check the requirements on every callback, in runs that evaluate as ``eval/loss``.

    - Two instances work in one list, under different names, or a `CallbackError` names both. Two sinks with the same files may
      raise a `DirectoryError`.
    - One instance serves several runs. Nothing of an earlier run, which may have failed, changes the result of a later one.
    - It works at the start and at the end of the list.
    - Its state can be saved, and a new instance restores it without a change.
    - A run that is cut and continued with a new instance has the results of a whole run, and the instance has the same
      numbers and texts in its attributes. Steps of this run have two batches, then one.
    - It does not read the device in every step.
    - Callbacks that do not concern it may stand before or after it in the list.
    - It adds no error of its own to the error of a run.
    - One instance cannot stand in a list twice.

    Args:
        factory: Returns a new instance, of Cadenza or of another system.
        ignore: Patterns of names in records that differ from run to run, such as times.
        reads: Whether it may read the device in every step.

    Raises:
        AssertionError: A requirement is not met. The message names the callback, the attribute or hook, and what to change.
        Exception: An error that the callback raises in a run.

    >>> from cadenza.callbacks import EarlyStopping
    >>> check_callback(lambda: EarlyStopping("eval/loss", mode="min", patience=3))
    """

    def new() -> BaseCallback:
        made = factory()
        callback = made if base_of(made) is None else adapt(made)
        assert isinstance(callback, BaseCallback), f"expected a callback; got {callback!r}"
        return callback

    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder))
        _check_two(new(), new(), runs)
        used = new()
        _check_reuse(used, new, runs, ignore)
        _check_state(used, new(), runs)
        _check_refused_twice(used)
        unused = new()
        another = partial(_copied, unused, new)
        check_resumed(another, Path(folder, "resumed"), ignore)
        check_order(another, Path(folder, "order"), ignore)
        if not reads:
            check_reads(unused, Path(folder, "reads"))


class _Runs:
    """Makes trainers, each with a new directory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def trainer(self, callbacks: Sequence[BaseCallback], **arguments: Any) -> Trainer:
        self._count += 1
        directory = self._folder / str(self._count)
        return tiny_trainer(callbacks=callbacks, directory=directory, seed=0, **{"epochs": 2, **arguments})

    def usual(self, *callbacks: BaseCallback) -> Trainer:
        return self.trainer([evaluated(), *callbacks])

    def short(self, *callbacks: BaseCallback) -> Trainer:
        """Return a trainer of a run that ends before an evaluation."""
        return self.trainer([*callbacks, evaluated()], epochs=None, steps=1)

    def different(self, *callbacks: BaseCallback) -> Trainer:
        """Return a trainer of a longer run, in which the result of the evaluations is first worse and then better."""
        model = tiny_model()
        torch.nn.init.constant_(model.weight, 30.0)

        def fast(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.5)

        return self.trainer([*callbacks, evaluated()], model=model, optimizer=fast, epochs=4)


def _check_two(first: BaseCallback, second: BaseCallback, runs: _Runs) -> None:
    names = list(Hooks([first, second]).callbacks)
    assert len(set(names)) == 2, f"two instances share the name {names[0]!r}"
    try:
        runs.usual(first, second).fit()
    except DirectoryError:
        return
    except CallbackError as refusal:
        if not all(name in str(refusal) for name in names):
            raise


def _check_reuse(used: BaseCallback, factory: Callable[[], BaseCallback], runs: _Runs, ignore: Sequence[str]) -> None:
    new = [_copied(used, factory) for _ in range(2)]
    expected = [_results_or_error(runs.short(new[0]), ignore), _results(runs.usual(new[1]), ignore)]
    runs.different(used).fit()
    _check_failing_run(used, runs)
    found = [_results_or_error(runs.short(used), ignore), _results(runs.usual(used), ignore)]
    difference = first_difference(expected, found, "runs")
    if difference is not None:
        fresh, own = attributes_of(new[1]), attributes_of(used)
        left = [
            f"{name} ({value!r}, {fresh[name]!r} in a new one)"
            for name, value in own.items()
            if fresh.get(name, value) != value
        ]
        named = f" Attributes with another value: {', '.join(left)}." if left else ""
        raise AssertionError(
            f"an instance of {used.name or type(used).__name__} that has served other runs gives another result than a new "
            f"one: {difference}.{named} Reset in on_setup each attribute that a run changes."
        )


def _copied(unused: BaseCallback, factory: Callable[[], BaseCallback]) -> BaseCallback:
    """Return an equal instance: a copy, since the factory may choose another name, or else a new one."""
    try:
        return deepcopy(unused)
    except TypeError:  # it holds a lock or a file
        return factory()


def _results_or_error(trainer: Trainer, ignore: Sequence[str]) -> dict[str, Any]:
    try:
        return _results(trainer, ignore)
    except ValueError as error:  # a callback may need the result of an evaluation
        return {"error": str(error)}


def _results(trainer: Trainer, ignore: Sequence[str]) -> dict[str, Any]:
    run = trainer.fit()
    # Whether a save waits for the last one, and when it is complete and old ones are pruned, depends on the speed of the disk.
    late = ("waited", "saved", "pruned", "not pruned")
    decisions: list[Any] = [(one.what, one.who, one.when.step) for one in run.decisions if one.what not in late]
    decisions += [(one.what, one.who, one.data.get("step")) for one in run.decisions if one.what == "saved"]
    outcome = run.outcome and run.outcome.kind
    return {**without_clocks(results_of(trainer, run), ignore), "decisions": decisions, "outcome": outcome}


def _check_failing_run(callback: BaseCallback, runs: _Runs) -> None:
    def fail(run: Run) -> None:
        if run.progress.step == 2:
            raise RuntimeError("a failure on purpose")

    try:
        runs.usual(callback, on(Callback.on_step_end)(fail)).fit()
    except RuntimeError as error:
        notes = [note for note in getattr(error, "__notes__", ()) if "failed as well" in note]
        assert not notes, f"the callback failed in a run that failed: {notes}"


def _check_state(used: BaseCallback, fresh: BaseCallback, runs: _Runs) -> None:
    state = used.state_dict()
    plain, tensors = encode({f"{type(used).__name__}.state_dict()": state})
    (state,) = decode(plain, tensors).values()  # as a checkpoint returns it

    def restore(run: Run) -> None:
        fresh.load_state_dict(state)
        again = fresh.state_dict()
        difference = first_difference(again, state)
        assert difference is None, f"after load_state_dict, state_dict returns something else: {difference}"

    runs.usual(fresh, on(Callback.on_setup)(restore)).fit()  # a resume restores states at this moment


def _check_refused_twice(callback: BaseCallback) -> None:
    try:
        Hooks([callback, callback])
    except CallbackError:
        return
    raise AssertionError("one instance stands in a list twice, and no error says so")

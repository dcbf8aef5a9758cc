"""The requirements on every callback, and on an adapter of callbacks of another system."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.log_training import LogTraining
from cadenza.callbacks.profile import Profile
from cadenza.errors import CallbackError, DirectoryError
from cadenza.hooks.dispatch import Hooks, hooks_of
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.subscription import on
from cadenza.loops.foreign_callbacks import AdaptedCallback, AnyCallback, adapt, base_of, title_of
from cadenza.run import Run
from cadenza.status.encoding import decode, encode, first_difference
from cadenza.testing.proof import CLOCKS, Cut, Cutter, results_of, without_clocks
from cadenza.testing.tiny import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
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
    try:
        runs.usual(first, second).fit()
    except DirectoryError:
        return
    except CallbackError as refusal:
        if not all(name in str(refusal) for name in Hooks([first, second]).callbacks):
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
    decisions: list[Any] = [
        (decision.what, decision.who, decision.when.step) for decision in run.decisions if decision.what not in late
    ]
    decisions += [
        (decision.what, decision.who, decision.data.get("step")) for decision in run.decisions if decision.what == "saved"
    ]
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


Factory = Callable[[], BaseCallback]
_RUN: dict[str, Any] = {"batches": 8, "epochs": 2, "accumulate": {0: 2, "1 epoch": 1}}
"""The steps of the first epoch have two batches, those of the second one."""
_CUT = 3  # inside an epoch, and before the evaluation at its end


def check_resumed(factory: Factory, folder: Path, ignore: Sequence[str]) -> None:
    """Compare a run with one that is cut and continued with a new instance.

    Raises:
        AssertionError: They differ. The message names the attributes with other values.
    """
    whole, again = (_ended(factory(), folder / f"whole{number}", ignore) for number in (1, 2))
    if first_difference(whole.results, again.results, "runs") is not None:
        return  # two equal runs differ: nothing can be said about a third one
    with suppress(Cut):
        _trainer(factory(), folder / "cut", Cutter(_CUT)).fit()
    resumed = _ended(factory(), folder / "cut", ignore, resume=True)
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
    found = [read for read in reads if read.callback == name and read.steps >= read.sampled]
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
        first = [other for other in others if type(other) is type(callback)]  # one may watch the results of the other
        others = [other for other in others if other not in first]
        callbacks = [*first, *others, callback] if number == 0 else [*first, callback, *reversed(others)]
        trainer = tiny_trainer(callbacks=callbacks, directory=folder / str(number), seed=0, epochs=2)
        results = without_clocks(results_of(trainer, trainer.fit()), ignore)
        del results["states"]["callbacks"]  # in the order of the list
        results["history"] = dict(sorted(results["history"].items()))
        results["records"] = [dict(sorted(result.items())) for result in results["records"]]
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


class _Ended(NamedTuple):
    """The results of a run, and the attributes of the callback before the first step and after the last."""

    name: str
    results: dict[str, Any]
    at_start: dict[str, Any]
    attributes: dict[str, Any]


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


def _ended(callback: BaseCallback, folder: Path, ignore: Sequence[str], *, resume: bool = False) -> _Ended:
    """Run to the end: from the beginning, or from the step at which an earlier run in the folder was cut."""
    at_start: dict[str, Any] = {}

    def note(run: Run) -> None:
        at_start.update(attributes_of(callback) if not run.progress.step else {})

    trainer = _trainer(callback, folder, on(Callback.on_epoch_start)(note))
    run = trainer.fit(resume="auto" if resume else False)
    return _Ended(hooks_of(run).name_of(callback), _compared(trainer, run, ignore), at_start, attributes_of(callback))


def _compared(trainer: Any, run: Run, ignore: Sequence[str]) -> dict[str, Any]:
    found = without_clocks(results_of(trainer, run, (Checkpoint,)), ignore)
    callbacks = found["states"]["callbacks"]
    found["states"]["callbacks"] = {name: state for name, state in callbacks.items() if state}
    return {**found, "outcome": run.outcome and run.outcome.kind}


def check_adapter(factory: Callable[[], Any], *, ignore: Sequence[str] = CLOCKS, reads: bool = False) -> None:
    """Check the requirements on the adapter of a callback of another system.

    - The base class of the callback is recognized: an entry point of the group ``cadenza.adapters`` names its adapter.
    - The adapter names the system, and equals its callback.
    - A callback that overrides no event has no listeners.
    - Each event with a moment is called in a run in which the moment fires.
    - An error in an event names the callback and the event.
    - The requirements of `check_callback`.

    Args:
        factory: Returns a new callback of the other system.
        ignore: As in `check_callback`.
        reads: As in `check_callback`.

    Raises:
        AssertionError: A requirement is not met. The message says which.
        Exception: An error that the callback raises in a run.

    >>> import transformers
    >>> class Watch(transformers.TrainerCallback):
    ...     def on_step_end(self, args, state, control, **objects):
    ...         control.should_training_stop = state.global_step == 7
    >>> check_adapter(Watch)
    """
    callback = factory()
    base = base_of(callback)
    assert base is not None, (
        f"{type(callback).__name__} has no base class with an adapter. Expected an entry point of the group cadenza.adapters "
        f"with the name of a base class, such as {title_of(type(callback).__mro__[-2])!r}"
    )
    adapter = adapt(callback)
    kind = type(adapter)
    assert getattr(kind, "system", ""), f"{kind.__name__}.system is the name of the other system; it is missing"
    assert kind.system in repr(adapter), f"repr() of the adapter names its system {kind.system!r}; it is {adapter!r}"
    assert adapter == callback, "an adapter equals its callback"
    assert callback in [adapter], "an adapter equals its callback"
    events = getattr(kind, "events", {})
    assert Hooks([_adapter_of(kind, base, callback, {})]).by_moment == {}, "a callback without events has no listeners"
    _check_called(kind, base, factory, [name for name, event in events.items() if event.moment is not None and event.make])
    check_callback(factory, ignore=ignore, reads=reads)


def _adapter_of(kind: type[AdaptedCallback], base: type[Any], callback: Any, methods: dict[str, Any]) -> AdaptedCallback:
    """Return the adapter of a callback with the attributes of another one, and with these methods alone."""
    made: Any = object.__new__(type("Overriding", (base,), methods))
    vars(made).update(vars(callback))
    return kind(made, base)


def _check_called(kind: type[AdaptedCallback], base: type[Any], factory: Callable[[], Any], names: Sequence[str]) -> None:
    called: list[str] = []

    def recording(name: str) -> Callable[..., None]:
        return lambda *values, **named: called.append(name)

    def breaking(*values: Any, **named: Any) -> None:
        raise RuntimeError("broken on purpose")

    events, recorder = getattr(kind, "events", {}), Recorder()
    adapter = _adapter_of(kind, base, factory(), {name: recording(name) for name in names})
    tiny_run(callbacks=[evaluated(), *kind.companions([adapter]), recorder], epochs=2, accumulate=2)
    fired = {seen.moment for seen in recorder.seen}
    missing = [name for name in names if events[name].moment.__name__ in fired and name not in called]
    assert not missing, f"events that a run never called, though their moments fired: {', '.join(missing)}"
    if not called:
        return
    broken = _adapter_of(kind, base, factory(), {called[0]: breaking})
    try:
        tiny_run(callbacks=[evaluated(), *kind.companions([broken])], epochs=2, accumulate=2)
    except RuntimeError as error:
        notes = " ".join(getattr(error, "__notes__", []))
        assert f"Overriding.{called[0]}" in notes, f"an error names the callback and the event; its notes are {notes!r}"
    else:
        raise AssertionError(f"an error in {called[0]} did not end the run")

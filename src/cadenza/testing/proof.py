"""Prove that the runs of a trainer resume bit-identically: compare a whole run with a run that is cut and resumed twice."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.attaching import Loop
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.drivers.sharding import checksum, checksum_of_all
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, moments_of
from cadenza.loading.batches import tensors_in
from cadenza.loading.rng import RNGState
from cadenza.run import Run
from cadenza.status.encoding import first_difference, host_copy
from cadenza.status.formats import counted
from cadenza.testing.launcher import FreshProcesses
from cadenza.trainer import Trainer

Make = Callable[[Path], Trainer | Loop]
CLOCKS = ("*_per_s", "*_per_second", "*_runtime", "*/mfu", "time/*")
"""Patterns of the names in records and in states of callbacks that depend on the clock."""


def prove_resume(
    make_trainer: Make,
    at: Sequence[int],
    *,
    ignore: Sequence[str] = CLOCKS,
    replay: bool = False,
    in_process: bool = False,
    loop: Callable[[Any], object] | None = None,
) -> None:
    """Compare a whole run with runs that are cut right after a step, continued, cut again and continued to the end.

    The comparison is bit for bit. It covers final weights, optimizers, states of callbacks, RNG states, history and records,
    and after the cut the moments and the content of every batch.

    Each part of a run has a fresh process, as after a kill: values in module variables (a cache, a counter) are lost, and
    ``PYTHONHASHSEED`` differs, so that the order of a set of strings changes. This takes the time of one import of torch.

    Args:
        make_trainer: A function of a directory that returns a new trainer with a seed, and always equal models, loaders and
            callbacks. If the trainer has no `Checkpoint`, one is added. A fresh process must be able to import the function:
            define it at the top level of a module.
        at: Steps, counted from 1, after which to cut for the first time. The second cut is halfway to the end.
        ignore: Patterns of names in records that depend on the clock.
        replay: See `Trainer.fit`.
        loop: A loop of your own instead of `Trainer.fit`: a function of what ``trainer.steps(...)`` returns; or, if
            `make_trainer` returns what `attach` does, a function of that, which enters it.
        in_process: Run all parts in this process. This is faster, and `make_trainer` may be any function, but a dependence on
            module variables is not found. On a system that cannot fork, it is always so.

    Raises:
        AssertionError: The runs differ. The message has the first difference, the step of the cut, the first value that
            changed, and the hooks that ran again.
        TypeError: A fresh process cannot import `make_trainer`.
        ValueError: The trainer has no seed, or a step is beyond the end of the run.

    >>> from cadenza.testing import tiny_trainer
    >>> prove_resume(lambda directory: tiny_trainer(directory=directory, epochs=2, seed=1), at=[1, 7], in_process=True)
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh = None if in_process or not hasattr(os, "fork") else FreshProcesses(make_trainer, Path(folder))
        with fresh or nullcontext():

            def take(number: int, directory: str, cut: int | None = None, *, resume: bool = False) -> _Taken:
                arguments = (Path(folder, directory), cut, resume, replay, loop)
                taken = _take(make_trainer, *arguments) if fresh is None else fresh.call(number, _take, *arguments)
                assert isinstance(taken, _Taken)
                return taken

            whole = take(0, "whole")
            for step in at:
                if not (first := take(0, f"cut-{step}", step)).cut:
                    ended = first.values["states"]["progress"]
                    raise ValueError(f"the run cannot be cut after step {step}: it ended at {ended}")
                again = (step + whole.steps + 1) // 2
                parts = [take(1, f"cut-{step}", again, resume=True)] if step < again < whole.steps else []
                parts.append(take(0 if parts else 1, f"cut-{step}", resume=True))
                _compare(whole, parts, step, ignore)


def _compare(whole: _Taken, parts: Sequence[_Taken], step: int, ignore: Sequence[str]) -> None:
    last, steps = parts[-1], [step, *(part.steps for part in parts[:-1])]
    batches = {number: crc for part in parts for number, crc in part.batches.items()}
    moments = [moment for part, begin in zip(parts, steps, strict=True) for moment in part.since(begin)]
    values, others = without_clocks(whole.values, ignore), without_clocks(last.values, ignore)
    pairs = {
        "batches": ({number: crc for number, crc in whole.batches.items() if number in batches}, batches),
        **{name: (values[name], others[name]) for name in values},
        "moments": (whole.since(step), moments),
    }
    for name, (mine, theirs) in pairs.items():
        if difference := first_difference(mine, theirs, name):
            second = [f"It was cut again after step {at}" for at in steps[1:]]
            told = "".join(f". {line}" for line in (*second, *_story(whole, parts, step)))
            raise AssertionError(f"the run that was cut after step {step} differs from the whole one in {difference}{told}")


def _story(whole: _Taken, parts: Sequence[_Taken], step: int) -> Iterator[str]:
    """Yield the first value that changed, and the hooks that ran twice."""
    trace = {at: values for part in parts for at, values in part.trace.items()}
    for at in sorted(trace.keys() & whole.trace.keys()):
        expected, found = whole.trace[at], trace[at]
        name = next((key for key in expected if expected[key] != found.get(key)), None)
        if at > step and name is not None:
            shown = f" ({expected[name]} in the whole run, {found.get(name, 'nothing')} in the other)"
            yield f"The first value that moved is {name}, at step {at}{'' if expected[name].startswith('crc') else shown}"
            break
    mine, theirs = whole.since(step), [moment for part in parts for moment in part.moments]
    more = [moment for moment in dict.fromkeys(theirs) if theirs.count(moment) > max(1, mine.count(moment))]
    if more:
        at, name = more[0]
        yield f"{name} ran {counted(theirs.count(more[0]), 'time')} at step {at}"
    again = dict.fromkeys(hook for part in parts for hook in part.again)
    if again:
        yield f"Hooks that ran again when the run continued: {', '.join(again)}"


# -- one part of a run, in its process ---------------------------------------------------------------------


_BOUNDARY = "the end of the step"


@dataclass
class _Taken:
    """The results of one part of a run."""

    cut: bool
    steps: int
    values: dict[str, Any]
    moments: list[tuple[int, str]]
    batches: dict[int, int]
    trace: dict[int, dict[str, str]]
    again: list[str] = field(default_factory=list)

    def since(self, step: int) -> list[tuple[int, str]]:
        """Return the moments after the end of a step. Of a run that continues there, the start of its epoch is left out."""
        moments = self.moments
        if self.cut:  # after the cut come the moments of an error
            moments = moments[: moments.index((self.steps, _BOUNDARY)) + 1]
        if (step, _BOUNDARY) in moments:
            return moments[moments.index((step, _BOUNDARY)) + 1 :]
        return moments[1:] if moments[:1] == [(step, "on_epoch_start")] else moments


def _take(
    make: Make, directory: Path, cut_after: int | None, resume: bool, replay: bool, loop: Callable[[Any], object] | None
) -> _Taken:
    """Run one part."""
    made, witness = make(directory), _Witness()
    trainer = made.trainer if isinstance(made, Loop) else made
    if trainer.seed is None:
        raise ValueError("runs can only be compared with equal random numbers: expected Trainer(seed=...); got none")
    if not any(isinstance(callback, Checkpoint) for callback in trainer.callbacks):
        trainer.callbacks.append(Checkpoint(lambda run: False))
    trainer.callbacks.append(witness)
    if cut_after is not None:
        trainer.callbacks.append(Cutter(cut_after))
    try:
        run = _run(made, loop, "auto" if resume else False, replay)
    except Cut:
        assert cut_after is not None
        return _Taken(True, cut_after, {}, witness.moments, witness.batches, witness.trace, witness.again if resume else [])
    values = results_of(trainer, run, _OWN)
    steps = run.progress.step
    return _Taken(False, steps, values, witness.moments, witness.batches, witness.trace, witness.again if resume else [])


def _run(made: Trainer | Loop, loop: Callable[[Any], object] | None, resume: bool | str, replay: bool) -> Run:
    if isinstance(made, Loop):
        if loop is None:
            raise TypeError("make_trainer returned a loop of attach(...), so prove_resume needs loop=, a function that runs it")
        loop(made.resuming(resume))
        return made.run
    if loop is None:
        return made.fit(resume=resume, replay=replay)
    loop(made.steps(resume=resume, replay=replay))
    return made.run


class Cut(BaseException):
    """Ends a run like a kill: nothing that the run does after it counts."""


class _Witness(Callback):
    """Records the moments, a checksum of every batch, and each value at the end of each step."""

    def __init__(self) -> None:
        self.moments: list[tuple[int, str]] = []
        self.batches: dict[int, int] = {}
        self.trace: dict[int, dict[str, str]] = {}
        self.again: list[str] = []

    def listeners(self) -> list[Listener]:
        # Records come when their numbers arrive on the host; they are compared separately.
        once = {"on_setup", "on_fit_start", "on_load", "on_save", "on_log"}
        moments = {name: moment for name, moment in moments_of(Callback).items() if name not in once}
        start = Listener(Callback.on_fit_start, self._note_again)
        return [start, *(Listener(moment, partial(self._note, name)) for name, moment in moments.items())]

    def _note(self, name: str, run: Run, *arguments: Any) -> None:
        step = run.progress.step
        self.moments.append((step, name))
        if name == "on_batch_start":
            self.batches[run.progress.batch] = checksum_of_all(tensors_in(arguments[0]))
        elif name == "on_step_end":
            values = {
                "the last batch": f"crc {self.batches.get(run.progress.batch - 1)}",
                **states_of(run, _OWN),
            }
            values |= {"model": run.model.state_dict(), "random streams": RNGState.capture().to_plain()}
            self.trace[step] = dict(_leaves(values, ""))
            run.after_step(partial(self.moments.append, (step, _BOUNDARY)))  # after the evaluations that are due at the step

    def _note_again(self, run: Run) -> None:
        """Record the hooks of other callbacks that run again in each process."""
        moments = [Callback.on_setup, Callback.on_fit_start]
        moments += [Callback.on_epoch_start] if session_of(run).cursor.in_epoch and run.progress.batch_in_epoch else []
        apart = {name for name, callback in hooks_of(run).callbacks.items() if isinstance(callback, _OWN)}
        for moment in moments:
            owners = dict.fromkeys(hook.owner for hook in hooks_of(run).by_moment.get(moment, ()) if hook.owner not in apart)
            self.again += [f"{moment.__name__} of {owner}" for owner in owners]


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value in a tree: a number, or the checksum of a tensor."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple) and len(tree) < 100:
        for index, part in enumerate(tree):
            yield from _leaves(part, f"{path}[{index}]")
    elif isinstance(tree, Tensor):
        yield path, repr(tree.item()) if tree.numel() == 1 else f"crc {checksum(tree)}"
    else:
        text = repr(tree)
        yield path, text if len(text) < 80 else f"crc {zlib.crc32(text.encode())}"


class Cutter(Callback):
    """Saves a checkpoint after a step, and cuts the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step:
            run.save("the run is cut here")
            run.after_step(self._cut)

    def _cut(self) -> None:
        raise Cut


_OWN = (Checkpoint, _Witness, Cutter)


def results_of(trainer: Trainer, run: Run, leave_out: tuple[type[BaseCallback], ...] = ()) -> dict[str, Any]:
    """Return copies of the results of a complete run, on the host. They can be pickled.

    Args:
        trainer: The trainer of the run.
        run: The run.
        leave_out: Classes of callbacks without results.
    """
    return {
        "model": on_host(dict(trainer.model.state_dict())),
        "states": on_host(states_of(run, leave_out)),
        "random streams": RNGState.capture().to_plain(),
        "history": {name: run.history[name] for name in run.history.names},
        "records": _records(trainer),
    }


def states_of(run: Run, leave_out: tuple[type[BaseCallback], ...] = ()) -> dict[str, Any]:
    """Return all states of a run but those of the model and the random generators."""
    callbacks = {
        name: callback.state_dict() for name, callback in hooks_of(run).callbacks.items() if not isinstance(callback, leave_out)
    }
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    own = {
        "progress": str(run.progress.now()),
        "run.state": dict(run.state),
        "precision": session_of(run).precision.state_dict(),
    }
    return {**own, "optimizers": optimizers, "callbacks": callbacks}


def without_clocks(results: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Return the results without the values with names that fit a pattern of `ignore`, and without the times of records."""

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: part(value) for name, value in values.items() if not _fits(name, ignore)}

    def part(value: Any) -> Any:
        if type(value) is dict:
            return kept(value)
        return [*map(part, value)] if type(value) is list else value

    records = [kept({name: value for name, value in result.items() if name != "time"}) for result in results["records"]]
    states = {name: kept(state) for name, state in results["states"]["callbacks"].items()}
    return {
        **results,
        "records": records,
        "history": kept(results["history"]),
        "states": {**results["states"], "callbacks": states},
    }


def depends_on_clock(name: str) -> bool:
    """Return whether the value of this name depends on the clock."""
    return _fits(name, CLOCKS)


def _fits(name: object, patterns: Sequence[str]) -> bool:
    return isinstance(name, str) and any(fnmatch(name, pattern) for pattern in patterns)


def on_host(tree: Any) -> Any:
    """Return a nested value with a copy on the host of each tensor."""
    return pytree.tree_map_only(Tensor, host_copy, tree)


def _records(trainer: Trainer) -> list[dict[str, Any]]:
    path = Path(str(trainer.directory), "metrics.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]

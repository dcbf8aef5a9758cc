"""Checks and warnings when a run starts, and the listeners that were never called when it is over."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cadenza.drivers.base import Driver
from cadenza.drivers.consensus import by_main
from cadenza.engine.arguments import absolute_folder, check_changes, check_schedule, check_some_batch, useless_changes
from cadenza.engine.module_state import breaks_since
from cadenza.engine.objective import ModelsOwnLoss, no_loss
from cadenza.engine.plan import doubts, never, never_fired
from cadenza.engine.session import Loops, Session
from cadenza.errors import DistributedError
from cadenza.files.new_directory import NewDirectory, meant_instead
from cadenza.loading.loaders import is_read_once, length_of
from cadenza.loading.settings import loader_hints
from cadenza.optim.model_state import Walk
from cadenza.optim.optimizers import notes
from cadenza.status.formats import counted, duration, few, for_screen
from cadenza.status.progress import Progress


def check_schedules(session: Session) -> None:
    """Raise `ScheduleError` for a schedule that can never be due; warn of one that this run is too short for."""
    for listeners in session.hooks.by_moment.values():
        for listener in listeners:
            if listener.schedule is not None:
                check_schedule(listener.owner, listener.schedule, session.progress)
    check_changes("accumulate", session.accumulate, session.progress)
    for reason in useless_changes(session.accumulate, session.progress, session.hooks.callbacks.values()):
        session.warn(reason)
    for who, reason in never(session.hooks, session.progress, session.accumulate):
        logs = " It logs nothing, such as train/loss." if who.startswith("LogTraining") else ""
        cure = f".{logs} Give it a shorter interval, or an earlier point" if reason.startswith("the run ends") else ""
        session.warn(f"{who} never fires in this run: {reason}{cure}")
    if session.progress.max_tokens is not None:
        session.acts.after_step(partial(_warn_of_tokens, session))


def _warn_of_tokens(session: Session) -> None:
    """Warn, after the first step, of listeners that the run is too short for if all steps have as many tokens."""
    now, limits = session.progress, session.progress
    a_step = (now.tokens - now.origin.tokens) / max(1, now.step - now.origin.step)
    if not a_step or limits.max_tokens is None or not session.advises:
        return
    steps = now.step + max(0, math.ceil((limits.max_tokens - now.tokens) / a_step))
    ends = Progress(
        max_epochs=limits.max_epochs,
        max_steps=steps if limits.max_steps is None else min(steps, limits.max_steps),
        batches_per_epoch=limits.batches_per_whole_epoch,
        has_epochs=limits.has_epochs,
        accumulate=session.accumulate,
    )
    known = never(session.hooks, limits, session.accumulate)
    for who, reason in never(session.hooks, ends, session.accumulate):
        if who not in dict(known):
            session.warn(
                f"{who} is not expected to fire in this run: with max_tokens={limits.max_tokens}, if each step has {a_step:g} "
                f"tokens as the first, {reason}"
            )


def check_computes(session: Session) -> None:
    """Raise `ValueError` if an evaluation in an attached loop has no function that computes a batch."""
    if session.loop is not Loops.FIT and inspect.unwrap(session.compute) is no_loss:
        _check_each_computes(session, "a loop of cadenza.attach has no compute_loss")


def check_computes_batch(session: Session, batch: object) -> None:
    """Raise `ValueError` if an evaluation would call the model with a whole batch, and the model cannot take this one.

    In a loop over ``trainer.steps()`` the training does not show it.
    """
    compute = inspect.unwrap(session.compute)
    if isinstance(compute, ModelsOwnLoss) and not compute.takes(batch):
        without = "the trainer has no compute_loss: it would call the model with a whole batch, which this model cannot take"
        _check_each_computes(session, without)


def _check_each_computes(session: Session, otherwise: str) -> None:
    for name, evaluation in session.run.evaluations.items():
        if evaluation.compute is None:
            raise ValueError(
                f"the evaluation {name!r} does not say how to compute a batch, and {otherwise}. Give Evaluate(..., "
                "compute=function), with a function (model, batch) that returns the loss, or a mapping with 'loss', "
                "'predictions' and 'targets'."
            )


def warn_of_doubts(session: Session, walk: Walk, *, own_optimizer: bool) -> None:
    """Warn of parameters that no optimizer holds, of short accumulation windows, and of slow optimizers and loaders.

    Args:
        session: The session of the run.
        walk: A walk over its model.
        own_optimizer: Whether the user made the optimizers.
    """
    warn_of_new_doubts(session, walk)
    warn_of_notes(session, [*notes(session.optimizers, session.module, own=own_optimizer), *loader_hints(session.loader)])


def warn_of_new_doubts(session: Session, walk: Walk | None = None) -> None:
    """Warn of the same parameters and windows, and of trained modules in evaluation mode: each text once in a run."""
    for doubt in doubts(session, walk or Walk(session.module)):
        if doubt not in session.module_flags.doubted:
            session.module_flags.doubted.add(doubt)
            session.warn(doubt)


def warn_of_notes(session: Session, lines: Iterable[str]) -> None:
    """Warn of those lines of the plan that begin with ``"! "``, once in a process: a script with many runs says them once."""
    for line in lines:
        if session.driver.is_main and session.advises and line.startswith("! ") and line not in _WARNED_OF:
            _WARNED_OF.add(line)
            session.warn(line.removeprefix("! "))


_WARNED_OF: set[str] = set()


def tell(session: Session, text: str) -> None:
    """Write a line to ``console.log``; show it to a person who watches the run, if a callback shows the progress."""
    if not session.driver.is_main:
        return
    if session.files is not None:
        session.files.add_text(text)
    if any(getattr(callback, "shows_progress", False) for callback in session.hooks.callbacks.values()):
        print(for_screen(text, sys.stderr), file=sys.stderr)  # noqa: T201


def warn_of_trained_weights(session: Session, before: Progress | None) -> None:
    """Warn that a new run starts from trained weights. `before` counts the previous run of the same trainer."""
    if before is not None and (steps := before.step - before.origin.step) > 0:
        session.warn(
            f"this trainer has trained {counted(steps, 'step')} before: the weights are trained on, in a new run that "
            "counts from step 0. "
            "For fresh weights make the model, the optimizer and the trainer anew."
        )


def warn_of_no_checkpoint(session: Session, resume: object) -> None:
    """Warn that the run cannot be continued, as no callback writes checkpoints, or is new although another one may be meant."""
    if not session.driver.is_main or not session.advises:
        return
    files = session.files
    if resume and files is not None and files.previous is None and (meant := meant_instead(files.path)):
        session.warn(f"resume={resume!r} found no run in {str(files.path)!r}, and starts a new one.{meant}")
    if session.savers:
        return
    missing = "no callback writes checkpoints: a run that ends early cannot be continued. Add Checkpoint(...) to callbacks."
    if resume:
        session.warn(f"resume={resume!r} is given, and {missing}")
    elif session.directory is not None:  # this is often meant, so it is no warning of the run
        print(f"directory= is given, and {missing}", file=sys.stderr)  # noqa: T201


def warn_of_loader(session: Session) -> None:
    """Warn of a loader that can be read once, and of one that cannot continue inside an epoch although the run is saved."""
    progress, loader = session.progress, session.loader
    if not session.driver.is_main or not session.advises:
        return
    if is_read_once(loader) and progress.max_steps is None and progress.max_tokens is None and progress.max_epochs != 1:
        session.warn(
            f"the training loader is an iterator ({type(loader).__name__}), which can be read once, and the run has "
            f"{counted(progress.max_epochs or 0, 'epoch')}. Pass a list, a DataLoader, or another iterable that starts again "
            "at each iter()."
        )
    if session.savers and (obstacle := session.cursor.source.obstacle) is not None:
        session.warn(f"a checkpoint inside an epoch cannot be continued: {obstacle}")


def check_evaluation_loaders(session: Session) -> None:
    """Raise `DataError` for an evaluation with a loader that is known to be empty. A list may be filled later."""
    for name, evaluation in session.run.evaluations.items():
        if not isinstance(evaluation.loader, list):
            check_some_batch(evaluation.loader, f"the loader of {name!r}")


def tell_of_compilation(session: Session, before: int, began: float) -> None:
    """Say how long a compiled model took to its first update, and warn of each line at which its graph broke.

    Args:
        session: The session, after its first step.
        before: The number of breaks before this run.
        began: The ``perf_counter`` at its start.
    """
    session.print(f"compile: the first step took {duration(time.perf_counter() - began)}, with the compilation")
    for line in breaks_since(before):
        session.warn(f"compile: the graph of the model breaks at {line}: it runs as parts, with Python between them")
        session.decide("graph broken", line, who="torch.compile")


def note_never_fired(session: Session) -> None:
    """Record the listeners that were not called in a run that is over."""
    evaluated = any("evaluation" in decision.data for decision in session.run.decisions)
    for who, reason in never_fired(session.hooks, session.progress, evaluated):
        session.decide("never fired", reason, who=who)


# -- checks that ranks have equal arguments: every rank must call these functions ------------------


T = TypeVar("T")
_SHOWN = 20  # differences in a message
_VALUES = 3  # different values of each
_LENGTH = 300  # characters of a value


def main_only(driver: Driver, act: Callable[[], T]) -> T | None:
    """Call `act` on the main process, and return its result there. An error of it is an error on every rank."""
    results: list[T] = []
    by_main(
        driver.meeting,
        lambda: results.append(act()),
        lambda rank, problem: DistributedError(f"the main process cannot begin, so rank {driver.rank} cannot: {problem}"),
    )
    return results[0] if results else None


def run_directory(directory: str | PathLike[str] | NewDirectory | None, driver: Driver) -> Path | None:
    """Return the absolute path of the run directory. The main process names a new one; every rank must call this then."""
    if not isinstance(directory, NewDirectory):
        return absolute_folder(directory)
    return Path(driver.broadcast(main_only(driver, lambda: str(directory.make()))))


def check_alike(driver: Driver, facts: Mapping[str, Any]) -> None:
    """Raise `DistributedError` if ranks have different arguments. The message names the first 20 differences.

    Ranks with equal arguments exchange two integers, which are a digest of `facts`. Only if the digests differ, each rank gets
    the facts of the main process, and sends back the names and values of its first 20 differences.
    """
    digest = int.from_bytes(hashlib.blake2b(repr([*facts.items()]).encode(), digest_size=7).digest())
    least, most = driver.reduce(torch.tensor([-digest, digest]), "max").tolist()
    if -least == most:
        return
    first: Mapping[str, Any] = driver.broadcast(dict(facts) if driver.is_main else None)
    names = [name for name in {**first, **facts} if facts.get(name) != first.get(name)]
    everyone = driver.gather_on_main((len(names), {name: _cut(facts.get(name)) for name in names[:_SHOWN]}))
    if message := driver.broadcast(_told(first, everyone) if driver.is_main else None):
        raise DistributedError(message)


def _told(first: Mapping[str, Any], everyone: Sequence[tuple[int, Mapping[str, str]]]) -> str | None:
    """Return the message about the differences of all ranks; None if there are none."""
    ranks: dict[str, dict[str, list[int]]] = {}  # by name and value
    for rank, (_, differing) in enumerate(everyone):
        for name, value in differing.items():
            ranks.setdefault(name, {}).setdefault(value, []).append(rank)
    if not ranks:
        return None
    shown = []
    for name, values in [*ranks.items()][:_SHOWN]:
        texts = [f"{value} on rank{'s' * (len(own) > 1)} {few(map(str, own), 4)}" for value, own in [*values.items()][:_VALUES]]
        texts += [f"other values on {counted(more, 'rank')}"] if (more := sum(map(len, [*values.values()][_VALUES:]))) else []
        shown.append(f"{name} is {', '.join(texts)} and {_cut(first.get(name))} on rank 0")
    count = max(len(ranks), *(count for count, _ in everyone))
    shown += [f"and {count - len(shown)} more"] if count > len(shown) else []
    return (
        f"all ranks must have equal arguments; {count} differ: {'; '.join(shown)}. Run the same script with the same "
        "arguments on all ranks."
    )


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."


def facts_of(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Return the facts about a model and a loader that must be equal on all ranks, by name."""
    weights = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    seed_of = getattr(getattr(loader, "generator", None), "initial_seed", lambda: None)
    return {
        "the number of batches": length_of(loader),
        "the seed of the loader's generator": seed_of(),
        "the number of parameters that require a gradient": sum(learning.values()),
        **{f"whether {name} requires a gradient": value for name, value in learning.items()},
        **{f"the shape of {name}": tuple(value.shape) for name, value in weights},
        **{f"the type of {name}": str(value.dtype) for name, value in weights},
    }

"""Checks of the arguments of a `Trainer`, before anything is built from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from cadenza.engine.objective import supervised
from cadenza.errors import CallbackError, DataError, ScheduleError, nearest
from cadenza.files.paths import local_path
from cadenza.hooks.counters import Length, kept
from cadenza.hooks.moments import BaseCallback, Callback, check_settings, moments_of
from cadenza.hooks.numbers import whole_number
from cadenza.hooks.schedule import Schedule
from cadenza.loading.evaluation import Metric
from cadenza.loading.loaders import check_loader, length_of
from cadenza.loading.resumable_base import Composite
from cadenza.loading.rng import preserve_rng_state, seed_all
from cadenza.loading.shards import Shard, check_enough_batches
from cadenza.optim.precision import check_precision
from cadenza.optim.rates import is_counted
from cadenza.optim.settings import Settings
from cadenza.status.formats import counted
from cadenza.status.progress import Accumulation, Change, Progress
from cadenza.status.reprs import brief, signature_of
from cadenza.text.hints import hints, moment_meant


def absolute_folder(directory: str | os.PathLike[str] | None) -> Path | None:
    """Return a local folder as an absolute path, which stays valid if the script changes its working directory; None for None.

    Raises:
        ValueError: `directory` is a URL.
    """
    if directory is None:
        return None
    if "://" in os.fspath(directory):
        raise ValueError(
            f"directory must be a local folder; got the URL {os.fspath(directory)!r}. Give a local folder, and "
            f"Checkpoint(directory={os.fspath(directory)!r}) for the checkpoints."
        )
    return local_path(directory).absolute()


def made_model(given: object, seed: int | None) -> Any:
    """Return the model. One that a function makes is made under the seed, if there is one; the generators do not change."""
    if isinstance(given, nn.Module) or not callable(given):
        return given
    with preserve_rng_state() if seed is not None else nullcontext():
        if seed is not None:
            seed_all(seed)
        try:
            return given()
        except Exception as error:
            error.add_note(f"context: Trainer called model={brief(given)}, without arguments, to make the model")
            raise


def unseeded(given: object, seed: int | None) -> Iterator[str]:
    """Yield a line for the plan, and for the start of a new run, if the weights differ from start to start in spite of a seed.

    torch draws its first seed from 53 bits; one of a user is shorter. A weight that was drawn once and never written since has
    the version 1: those that were loaded have another.
    """
    if seed is None or not isinstance(given, nn.Module) or torch.initial_seed() < 2**32:
        return
    if any(parameter._version == 1 and parameter.ndim > 1 for parameter in given.parameters()):
        yield (
            f"! the weights were drawn before seed={seed} was set, so they differ from start to start: give Trainer a function "
            "that makes the model, or call torch.manual_seed before you make it"
        )


def check_parts(model: object, optimizer: object, loader: object, compute_loss: object, step_fn: object) -> None:
    """Raise `TypeError` or `ValueError` for an argument of the wrong kind."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, or a function without arguments that makes one; got {_models(model)}")
    for part in (model, *model.children()):  # cadenza.attach takes several
        if isinstance(part, DataParallel | DistributedDataParallel):
            raise TypeError(
                f"model is wrapped in {type(part).__name__}; expected the module in it. Remove the wrapper, and a "
                'DistributedSampler of the loader. Trainer(driver="ddp") wraps the model and shards the data.'
            )
    if isinstance(optimizer, str) or not (callable(optimizer) or isinstance(optimizer, Optimizer | Sequence)):
        raise TypeError(
            f"optimizer must be an optimizer, a list of them, or a function of the parameters; got {optimizer!r}. Give one of "
            "torch, such as torch.optim.AdamW(model.parameters(), lr=1e-3)."
        )
    check_loader(loader, "loader")
    if compute_loss is not None and not callable(compute_loss):
        meant = " For an evaluation, add Evaluate(loader) to callbacks." if isinstance(compute_loss, Iterable) else ""
        raise TypeError(f"compute_loss must be a function (model, batch) -> loss, or None; got {compute_loss!r}.{meant}")
    if isinstance(compute_loss, type) and issubclass(compute_loss, nn.Module | supervised):
        name = compute_loss.__name__
        raise TypeError(
            f"compute_loss must be a function (model, batch) -> loss; got the class {name}. Make it; for a loss of "
            "(predictions, targets) write supervised(CrossEntropyLoss())."
        )
    if isinstance(compute_loss, nn.modules.loss._Loss):
        name = type(compute_loss).__name__
        raise TypeError(
            f"compute_loss must be a function (model, batch) -> loss; got the loss module {name}, which takes predictions and "
            f"targets. Wrap it: supervised({name}())"
        )
    _check_takes_two("compute_loss", compute_loss, "(model, batch)")
    _check_takes_two("step_fn", step_fn, "(run, batch)")
    if step_fn is not None and compute_loss is not None:
        raise ValueError("expected compute_loss or step_fn; got both. A step_fn computes its losses itself.")
    if step_fn is not None and not callable(step_fn):
        raise TypeError(f"step_fn must be a function (run, batch) -> loss; got {step_fn!r}")


def _models(given: object) -> str:
    """Describe an argument that is no model; for several, say what to write."""
    parts = [*given.values()] if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        return repr(given)
    kind = "ModuleDict" if isinstance(given, Mapping) else "ModuleList"
    return (
        f"{counted(len(parts), 'module')}. Give nn.{kind}(...) of them, a list of optimizers and step_fn=, or write your own "
        "loop with cadenza.attach, which takes several models."
    )


def _check_takes_two(name: str, function: Any, taken: str) -> None:
    """Raise `TypeError` for a function that cannot be called with two arguments, as far as Python knows."""
    try:
        parameters = signature_of(function, follow_wrapped=False)  # a decorator may unpack the batch
    except (TypeError, ValueError):  # no function, or a builtin
        return
    try:
        parameters.bind(None, None)
    except TypeError:
        raise TypeError(
            f"{name} is called with {taken}, and takes {parameters}. Unpack the batch in it, as in `inputs, targets = batch`."
        ) from None


def checked_lengths(*, ends_itself: bool = False, **limits: int | None) -> dict[str, int | None]:
    """Return the lengths as plain integers; raise `TypeError` or `ValueError` for an invalid one, or if none is set.

    A run that `ends_itself`, which the user's own loop does, needs none.
    """
    if not ends_itself and all(limit is None for limit in limits.values()):
        raise ValueError("a run needs an end: expected max_epochs=, max_steps= or max_tokens=; got none of them")
    return {name: None if limit is None else checked_length(name, limit) for name, limit in limits.items()}


def checked_debugging(debug_ranks: object) -> float | None:
    """Return the seconds after which a rank that does not make a call is named; None if calls are not compared."""
    if debug_ranks is False:
        return None
    if debug_ranks is not True and (not isinstance(debug_ranks, int | float) or not debug_ranks > 0):
        raise ValueError(f"debug_ranks must be True, False or a number of seconds greater than 0; got {debug_ranks!r}")
    return 10.0 if debug_ranks is True else float(debug_ranks)


def checked_tokens(tokens: object) -> Any:
    """Return the function that counts tokens, or None; raise `TypeError` for anything else."""
    if tokens is None or callable(tokens):
        return tokens
    hint = " Set the length of the run with max_tokens=." if isinstance(tokens, int) else ""
    raise TypeError(f"tokens must be a function (batch) -> int that counts the tokens of a batch; got {tokens!r}.{hint}")


def checked_length(name: str, value: object) -> int:
    """Return a length as a plain integer; raise `TypeError` or `ValueError` for an invalid one."""
    if (number := whole_number(value)) is None:
        raise TypeError(f"{name} must be a whole number; got {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {value!r}")
    return number


def given_by(override: object, resume: object) -> Settings:
    """Return the settings that ``fit(override=...)`` names, and their values.

    Raises:
        TypeError: `override` is neither a list of names nor a mapping of names to values.
        ValueError: The run does not resume.
    """
    values = dict(override) if isinstance(override, Mapping) else {}
    listed = isinstance(override, Sequence | Mapping) and not isinstance(override, str)
    if not listed or not all(isinstance(name, str) for name in override):  # type: ignore[attr-defined]
        raise TypeError(
            'override must be a list of names of settings, such as ("lr",), or a mapping of names to values, such as '
            f'{{"lr": 1e-4}}; got {override!r}'
        )
    names: tuple[str, ...] = tuple(override)  # type: ignore[arg-type]
    if names and resume is False:
        raise ValueError(f"override={override!r} replaces settings of a checkpoint: expected resume=; got resume=False")
    if "batch_size" in values:
        values["batch_size"] = checked_length("override: batch_size", values["batch_size"])
    return Settings(names, values)


def check_recipe(precision: object, seed: object, device: object) -> None:
    """Raise `ValueError` or `TypeError` for an invalid training argument."""
    if device == "auto":
        raise ValueError(
            "device must be the name of a device; got 'auto'. Leave device= out: the default is the best there is."
        )
    check_precision(precision)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed must be a whole number or None; got {seed!r}")


def listed(callbacks: object, directory: object) -> list[BaseCallback]:
    """Return `callbacks` as a new list, and check each entry, also that it has the folder that it needs."""
    if isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise CallbackError(f"callbacks must be a list of callbacks; got {callbacks!r}. Write callbacks=[...]")
    given = list(callbacks)
    for index, callback in enumerate(given):
        if isinstance(callback, BaseCallback):
            check_settings(callback, f"callbacks[{index}]")
            _check_has_hook(callback, f"callbacks[{index}]")
            if directory is None and (lacks := getattr(callback, "_lacks", "")):
                raise ValueError(lacks)
        elif instead := _instead_of(callback):
            raise CallbackError(f"callbacks[{index}] is no callback: got {instead}")
    return given


def _check_has_hook(callback: BaseCallback, what: str) -> None:
    """Raise `CallbackError` for a callback that is never called: it has no hook, no listeners and no state."""
    if not isinstance(callback, Callback) or type(callback) is Callback:
        return
    kind = type(callback)
    try:
        if callback.listeners():
            return
    except AttributeError as error:
        if error.obj is not callback or "__init__" not in vars(kind):
            raise
        raise CallbackError(
            f"{what}, a {kind.__name__}, has no {error.name!r}, which {kind.__mro__[1].__name__} sets when it is made. Call "
            f"super().__init__(...) in {kind.__name__}.__init__."
        ) from error
    if (kind.listeners, kind.state_dict) != (Callback.listeners, BaseCallback.state_dict):
        return
    moments = moments_of(kind)
    methods = [name for base in kind.__mro__ if base not in Callback.__mro__ for name, it in vars(base).items() if callable(it)]
    meant = next((it for name in methods if (it := moment_meant(name, moments) or moment_meant(f"on_{name}", moments))), "")
    raise CallbackError(
        f"{what}, a {kind.__name__}, has no hook, so it is never called.{meant} Override a moment of Callback, such as "
        "on_step_end(self, run)."
    )


def _instead_of(thing: object) -> str:
    """Describe an object that is no callback, and say what to write; return an empty string if the object is unknown."""
    name = type(thing).__name__
    if isinstance(thing, LRScheduler) or is_counted(thing):
        return (
            f"the scheduler {name}. Write LearningRate(scheduler), or LearningRate(lambda optimizer: {name}(optimizer, ...))."
        )
    if isinstance(thing, Optimizer):
        return f"the optimizer {name}. Give it to the trainer: Trainer(model, optimizer, ...)."
    if isinstance(thing, Metric) and not isinstance(thing, type):
        return f"the metric {name}. Write Evaluate(loader, metrics={{'name': {name}(...)}})."
    if isinstance(thing, DataLoader):
        return "a DataLoader. Write Evaluate(loader)."
    known = hints("instead-of-objects")
    return next((f"a {name}. {known[kind.__name__]}" for kind in type(thing).__mro__ if kind.__name__ in known), "")


def check_resume(resume: object, *, new: bool = False) -> None:
    """Raise `TypeError` or `ValueError` unless `resume` is False, True, ``"auto"``, the name of a checkpoint, or a path.

    In a `new` directory there is no run to continue: only a path is possible.
    """
    if new and resume and "/" not in str(resume):
        raise ValueError(
            f"resume={resume!r} continues the run in the directory, and new_directory gives a new one at each start. Name the "
            'directory, such as directory="runs/baseline", or give resume= the path of a checkpoint.'
        )
    expected = 'resume must be False, "auto", "last", "best", a name such as "step-500", or the path of a checkpoint'
    if not isinstance(resume, bool | str | os.PathLike):
        hint = f" {hints('fit')['model']}" if isinstance(resume, nn.Module | Iterable) else ""
        hint = " Set the length in the trainer: Trainer(max_epochs=...)." if isinstance(resume, int) else hint
        raise TypeError(f"{expected}; got {resume!r}.{hint}")
    if (
        isinstance(resume, str)
        and resume.partition(":")[0] not in ("auto", "last", "best")
        and "/" not in resume
        and not Path(resume).exists()
    ):
        meant = (
            ' Did you mean "auto"?'
            if resume in ("latest", "newest", "true", "True")
            else nearest(resume, ["auto", "last", "best"])
        )
        if meant:
            raise ValueError(f"{expected}; got {resume!r}, which does not exist.{meant}")


def check_schedule(owner: str, schedule: Schedule, limits: Progress) -> None:
    """Raise `ScheduleError`, with the name of the callback, for a schedule that does not work with this loader."""
    try:
        schedule.check(limits)
    except ScheduleError as error:
        raise ScheduleError(f"{owner}: {error}") from None


def check_not_empty(loader: Any, shard: Shard, what: str = "the training loader") -> None:
    """Raise `DataError` if the training loader, or one in a mixture, is known to have no batch, or fewer batches than ranks."""
    if isinstance(loader, Composite):
        for name, value in loader.loaders.items():
            check_not_empty(value, shard, f"the loader {name!r}")
        return
    check_some_batch(loader, what)
    check_enough_batches(loader, length_of(loader), shard, what)


def check_some_batch(loader: Any, what: str) -> None:
    """Raise `DataError` if a loader is known to have no batch."""
    if length_of(loader) == 0:
        raise DataError(f"{what} is empty: expected at least one batch; got {_sizes(loader)}")


def _sizes(loader: Any) -> str:
    """Describe a loader that has no batch."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} of length 0"
    return (
        f"a DataLoader with {counted(length_of(loader.dataset) or 0, 'sample')}, batch_size={loader.batch_size} and "
        f"drop_last={loader.drop_last}. Lower the batch size or set drop_last=False."
    )


# -- batches in a step: ``accumulate=`` ------------------------------------------------------------


POINTS = '2000 (steps), "2000 steps", "3 epochs", "0.5 epoch", "500 batches", "50000 samples", "1e9 tokens", "50%"'
"""The forms of a point, for messages."""


Accumulate = int | Mapping[int | str, int]
"""Batches in a step: a number, or a mapping of points of the run to numbers, such as ``{0: 1, "2000 steps": 4}``."""


def checked_accumulate(accumulate: object, step_fn: object) -> int:
    """Return the number of batches in a step; an `Accumulation` if it changes during the run.

    Raises:
        TypeError: It is neither a whole number nor a mapping of points to whole numbers.
        ValueError: A number is below 1, points are not in order, or a ``step_fn`` accumulates itself.
        ScheduleError: A point cannot be read.

    >>> checked_accumulate({0: 1, "2000 steps": 4, "50%": 8}, None)
    {'0': 1, '2000 steps': 4, '50%': 8}
    """
    if isinstance(accumulate, Accumulation):
        checked: int = accumulate
    else:
        checked = checked_numbers("accumulate", accumulate)
    if step_fn is not None and checked != 1:
        raise ValueError(f"a step_fn does its own accumulation: expected accumulate=1; got {accumulate}")
    return checked


def checked_numbers(name: str, given: object) -> int:
    """Return a whole number, at least 1; an `Accumulation` if it changes at points of the run."""
    if not isinstance(given, Mapping):
        return checked_length(name, given)
    first, changes = 1, list[Change]()
    for point, value in given.items():
        batches = checked_length(f"{name}[{point!r}]", value)
        if point in (0, "0"):
            if changes:
                raise ValueError(f"{name} must have its points in order, 0 first; got {dict(given)}")
            first = batches
        else:
            changes.append(_change(point, batches))
    for earlier, later in pairwise(changes):
        if earlier.unit == later.unit and earlier.count >= later.count:
            raise ValueError(f"{name} must have its points in order; got {earlier.text!r} before {later.text!r}")
    return Accumulation(first, changes) if changes else first


def _change(point: object, batches: int) -> Change:
    """Read a point of the run."""
    length = Length.parse(point, POINTS).of("step")
    if not kept(length.unit):
        raise ScheduleError(f"{point!r} is no point of a run that is the same after a resume. Use one of: {POINTS}")
    return Change(length.count, length.unit, batches, str(length.text))  # type: ignore[arg-type]


def plain_accumulate(accumulate: Any) -> Any:
    """Return an `Accumulation` as plain data, numbers by the text of their point; anything else unchanged."""
    return accumulate.plain() if isinstance(accumulate, Accumulation) else accumulate


def units_of_changes(accumulate: int, limits: Progress) -> set[str]:
    """Return the units of the points at which the number of batches in a step changes."""
    units: set[str] = {change.unit for change in accumulate.changes} if isinstance(accumulate, Accumulation) else set()
    return units | {"token"} if "%" in units and limits.max_tokens is not None else units


def check_changes(name: str, accumulate: int, limits: Progress) -> None:
    """Raise `ValueError` for a point that needs a loader of known length."""
    for change in accumulate.changes if isinstance(accumulate, Accumulation) else ():
        if change.unit == "epoch" and change.count != int(change.count) and limits.batches_per_whole_epoch is None:
            raise ValueError(
                f"{name} changes at {change.text!r}, which needs a loader that knows its length (has __len__); this one "
                'does not. Use "steps", "batches" or "samples".'
            )


def useless_changes(accumulate: int, limits: Progress, callbacks: Iterable[BaseCallback]) -> Iterator[str]:
    """Yield a warning for each change of the windows, and each warm-up, that the run is too short for."""
    asked = (getattr(callback, "outlasts", lambda *_: None)(limits, accumulate) for callback in callbacks)
    yield from filter(None, asked)
    for change in accumulate.changes if isinstance(accumulate, Accumulation) else ():
        if change.unit in ("step", "batch", "epoch"):
            total = limits.total(change.unit, accumulate)
            if total is not None and change.count >= total:
                yield (
                    f"accumulate={change.batches} from {change.text} on never takes effect: the run ends after "
                    f"{counted(total, change.unit)}"
                )

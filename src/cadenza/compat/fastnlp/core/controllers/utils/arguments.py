"""Checks and conversions of the arguments of fastNLP's trainer and evaluator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cadenza.compat.fastnlp.api_of_0_5 import ARGUMENTS, refuse
from cadenza.compat.fastnlp.core.utils.utils import Mapped, check_mapping
from cadenza.errors import nearest
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.loaders import set_loader_epoch
from cadenza.loops.foreign_callbacks import adapted, base_of
from cadenza.status.reprs import signature_of

logger: logging.Logger = logging.getLogger("cadenza")


def of_the_driver(kwargs: Mapping[str, Any], fp16: bool, plain: bool) -> dict[str, Any]:
    """Return the arguments of the trainer that its driver keeps; `plain` is ``model_wo_auto_param_call``."""
    kept = {name: kwargs[name] for name in ("torch_kwargs", "output_from_new_proc") if name in kwargs}
    return {"fp16": fp16, "model_wo_auto_param_call": plain, **kept}


def check_arity(function: Callable[..., Any], count: int, form: str) -> None:
    """Raise `TypeError` unless a function accepts this many positional arguments."""
    if not callable(function):
        raise TypeError(f"expected a function {form}; got {function!r}")
    try:
        signature_of(function).bind(*range(count))
    except TypeError:
        raise TypeError(f"expected a function {form}; got one with {signature_of(function)}") from None
    except ValueError:  # some builtins have no signature
        return


def check_keywords(owner: type, given: Mapping[str, Any], known: Collection[str], idle: Collection[str] = ()) -> None:
    """Warn about ignored arguments: unknown ones, and those of fastNLP without an effect here."""
    for name in sorted(given.keys() - set(known)):
        if name in idle:
            logger.warning("%s ignores the argument %s=: %s", owner.__name__, name, _IDLE)
        else:
            now = ARGUMENTS.get(name, "").replace("`", "")
            others = [*known, *signature_of(owner).parameters]
            meant = f" In fastNLP 1.0 use {now}." if now else nearest(name, others)
            logger.warning("%s ignores the unknown argument %s=.%s", owner.__name__, name, meant)


_IDLE = "pass one of Cadenza's drivers as driver= to choose devices and processes"
IDLE = ("data_device", "use_dist_sampler", "evaluate_use_dist_sampler", "output_from_new_proc")
TRAINER = (
    *("progress_bar", "extra_show_keys", "check_dataloader_legality", "model_use_eval_mode", "separator", "torch_kwargs"),
    *("train_input_mapping", "evaluate_input_mapping", "train_output_mapping", "evaluate_output_mapping"),
)
FOR_THE_EVALUATOR = ("model_use_eval_mode", "separator")


def check_loader(loader: object, *, check_kind: bool) -> None:
    """Raise `ValueError` or `TypeError` unless this can be the training loader."""
    if loader is None:
        raise ValueError("train_dataloader must be a torch DataLoader; got None")
    if check_kind and not isinstance(loader, DataLoader):
        raise TypeError(
            f"train_dataloader must be a torch DataLoader; got {type(loader).__name__}. To allow it, pass "
            "check_dataloader_legality=False."
        )


def named_loaders(given: Any) -> dict[str, Any]:
    """Return the loaders of an evaluation by their names; the name of a single one is empty.

    Raises:
        ValueError, TypeError: A loader is missing, cannot be read, or is a list of loaders.
    """
    if given is None:
        raise ValueError("dataloaders must be a loader, or a dict of loaders; got None")
    loaders = dict(given) if isinstance(given, Mapping) else {"": given}
    for loader in loaders.values():
        several = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
        if several or isinstance(loader, str) or not isinstance(loader, Iterable):
            raise TypeError(f"dataloaders must be a loader, or a dict of loaders by name; got {given!r}")
    return loaders


def check_step(batch_step_fn: Any) -> None:
    """Raise `TypeError` unless this is None, or a function of the trainer and a batch."""
    if batch_step_fn is not None:
        check_arity(batch_step_fn, 2, "batch_step_fn(trainer, batch)")


def check_counts(n_epochs: object, accumulation_steps: object, n_batches: object, overfit_batches: object) -> None:
    """Raise `ValueError` unless these are valid numbers; `n_epochs` is checked only if it is used."""
    counts = [("accumulation_steps", accumulation_steps, 1), ("overfit_batches", overfit_batches, -1)]
    if n_batches == -1:
        counts.append(("n_epochs", n_epochs, 0))
    for name, value, least in counts:
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
    if not isinstance(n_batches, int) or (n_batches != -1 and n_batches < 1):
        raise ValueError(f"n_batches must be -1, or a whole number of at least 1; got {n_batches!r}")


def mappings(name: str, common: Mapped | None, kwargs: Mapping[str, Any]) -> tuple[Mapped | None, Mapped | None]:
    """Return a mapping for training and one for evaluation.

    Raises:
        ValueError: The common one and one of the others are given, or a value is not a mapping.
    """
    own = [kwargs.get(f"train_{name}"), kwargs.get(f"evaluate_{name}")]
    if common is not None and any(value is not None for value in own):
        raise ValueError(f"expected {name}=, or train_{name}= and evaluate_{name}=; got both")
    train, evaluate = [common if value is None else value for value in own]
    check_mapping(train, name)
    check_mapping(evaluate, name)
    return train, evaluate


def checked_optimizers(optimizers: object) -> list[Optimizer]:
    """Return a list of optimizers; raise `TypeError` for anything else."""
    several: list[Any] = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not several or not all(isinstance(optimizer, Optimizer) for optimizer in several):
        raise TypeError(f"optimizers must be a torch optimizer, or a list of them; got {optimizers!r}")
    return several


def listed(callbacks: object) -> list[BaseCallback]:
    """Return a list of callbacks.

    Raises:
        ValueError: `callbacks` is not a callback or a list.
        TypeError: An element is not a callback, or has hooks of fastNLP 0.5.
    """
    if base_of(callbacks) is not None:
        callbacks = [callbacks]
    callbacks = adapted(callbacks) if isinstance(callbacks, list | tuple) else callbacks
    if callbacks is None or isinstance(callbacks, BaseCallback):
        refuse(callbacks)
        return [] if callbacks is None else [callbacks]
    if not isinstance(callbacks, list | tuple):
        raise ValueError(f"callbacks must be a callback, or a list of them; got {callbacks!r}")
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, BaseCallback):
            raise TypeError(f"callbacks[{index}] must be an instance of Callback; got {callback!r}")
    refuse(callbacks)
    return list(callbacks)


def wants_evaluator(metrics: object, loaders: object, every: object) -> bool:
    """Return whether the trainer evaluates.

    Raises:
        ValueError: `metrics` without loaders, or a wrong ``evaluate_every``.
    """
    if metrics is None:
        if loaders is not None:
            logger.warning("evaluate_dataloaders= without metrics=: nothing is evaluated")
        return False
    if loaders is None:
        raise ValueError("metrics= needs evaluate_dataloaders=; got None")
    if callable(every):
        check_arity(every, 1, "evaluate_every(trainer)")
    elif not isinstance(every, int) or not every:
        raise ValueError(f"evaluate_every must be a whole number other than 0, or a function of the trainer; got {every!r}")
    return True


def first_batches(loader: Any, count: int) -> list[Any]:
    """Return the first batches of an epoch; all of them for -1."""
    set_loader_epoch(loader, 0)
    return list(islice(loader, None if count == -1 else count))

"""The arguments of a `Trainer`: each is checked when it is given, before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cadenza.batching import length_of
from cadenza.errors import CadenceError, CallbackError, DataError
from cadenza.loading.share import Share, check_enough
from cadenza.moments import BaseCallback
from cadenza.precision import PRECISIONS
from cadenza.progress import Progress


def absolute_folder(directory: str | os.PathLike[str] | None) -> Path | None:
    """Return a local folder as an absolute path, so that the script may change its working directory; None stays None.

    Raises:
        ValueError: It is a URL.
    """
    if directory is None:
        return None
    if "://" in os.fspath(directory):
        raise ValueError(
            f"directory must be a local folder; got the URL {os.fspath(directory)!r}. Give a local folder, and "
            f"Checkpoint(directory={os.fspath(directory)!r}) for the checkpoints."
        )
    return Path(directory).absolute()


def check_parts(model: object, optimizer: object, loader: object, compute_loss: object, step_fn: object) -> None:
    """Raise `TypeError` or `ValueError` for a part that is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {model!r}")
    if isinstance(optimizer, str) or not (callable(optimizer) or isinstance(optimizer, Optimizer | Sequence)):
        raise TypeError(f"optimizer must be an optimizer, a list of them, or a function of the parameters; got {optimizer!r}")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader must be an iterable of batches; got {loader!r}")
    if compute_loss is not None and not callable(compute_loss):
        raise TypeError(f"compute_loss must be a function (model, batch) -> loss, or None; got {compute_loss!r}")
    if isinstance(compute_loss, nn.modules.loss._Loss):
        name = type(compute_loss).__name__
        raise TypeError(
            f"compute_loss must be a function (model, batch) -> loss; got the loss module {name}, which takes predictions and "
            f"targets. Wrap it: supervised({name}())"
        )
    if step_fn is not None and compute_loss is not None:
        raise ValueError("expected compute_loss or step_fn; got both. A step_fn computes its losses itself.")
    if step_fn is not None and not callable(step_fn):
        raise TypeError(f"step_fn must be a function (run, batch) -> loss; got {step_fn!r}")


def check_lengths(max_epochs: int | None, max_steps: int | None, accumulate: int) -> None:
    """Raise `TypeError` or `ValueError` for a limit that cannot be met, or if there is none."""
    for name, value in (("max_epochs", max_epochs), ("max_steps", max_steps), ("accumulate", accumulate)):
        if value is None and name != "accumulate":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number; got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value!r}")
    if max_epochs is None and max_steps is None:
        raise ValueError("a run needs an end: expected max_epochs=, max_steps= or both; got neither")


def check_override(override: object, resume: object) -> None:
    """Raise `TypeError` for what is no list of names, and `ValueError` where there is no checkpoint to override."""
    if isinstance(override, str) or not isinstance(override, Sequence) or not all(isinstance(one, str) for one in override):
        raise TypeError(f'override must be a list of names of settings, such as ("lr",); got {override!r}')
    if override and resume is False:
        raise ValueError(f"override={tuple(override)!r} replaces settings of a checkpoint: expected resume=; got resume=False")


def check_recipe(accumulate: int, precision: object, seed: object, step_fn: object) -> None:
    """Raise `ValueError` or `TypeError` for an argument that says how to train."""
    if step_fn is not None and accumulate != 1:
        raise ValueError(f"a step_fn does its own accumulation: expected accumulate=1; got {accumulate}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed must be a whole number or None; got {seed!r}")


def listed(callbacks: object) -> list[BaseCallback]:
    """Return `callbacks` as a list of the trainer's own."""
    if isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise CallbackError(f"callbacks must be a list of callbacks; got {callbacks!r}. Write callbacks=[...]")
    return list(callbacks)


def check_filter(owner: str, filter: Any, limits: Progress) -> None:
    """Raise `CadenceError`, with the name of its callback, for a filter that this run cannot meet."""
    try:
        filter.check(limits)
    except CadenceError as error:
        raise CadenceError(f"{owner}: {error}") from None


def check_not_empty(loader: Any, share: Share) -> None:
    """Raise `DataError` if the training loader is known to have no batch, or too few for all ranks."""
    if length_of(loader) == 0:
        raise DataError(f"the training loader is empty: expected at least one batch; got {_sizes(loader)}")
    check_enough(loader, length_of(loader), share, "the training loader")


def _sizes(loader: Any) -> str:
    """Describe a loader that has no batch, as far as it is a torch DataLoader."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return f"a {type(loader).__name__} of length 0"
    return (
        f"a DataLoader with {length_of(loader.dataset)} samples, batch_size={loader.batch_size} and "
        f"drop_last={loader.drop_last}. Lower the batch size or set drop_last=False."
    )

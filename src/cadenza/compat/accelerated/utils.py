"""``pytorch_accelerated.utils``: process decorators, a limit on batches, averaged weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.drivers import driver_of
from cadenza.drivers.rendezvous import launched, rendezvous_of
from cadenza.hooks.numbers import at_least
from cadenza.optim.averaging import Average

P = ParamSpec("P")
Result = TypeVar("Result")

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"


def local_process_zero_only(func: Callable[P, Result]) -> Callable[P, Result | None]:
    """Run a function only on the first process of each machine; all processes wait for it. On the others it returns None."""
    return _only(func, _local_rank)


def world_process_zero_only(func: Callable[P, Result]) -> Callable[P, Result | None]:
    """Run a function only on rank 0; all processes wait for it. On the others it returns None."""
    return _only(func, _rank)


def local_process_zero_first(func: Callable[P, Result]) -> Callable[P, Result]:
    """Run a function on the first process of each machine, then on the others; for example, to download a file once."""

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
        if _local_rank():
            _wait()
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            _wait()  # even after an error, or the other processes would wait forever

    return wrapper


def _only(func: Callable[P, Result], number: Callable[[], int]) -> Callable[P, Result | None]:
    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result | None:
        try:
            return func(*args, **kwargs) if number() == 0 else None
        finally:
            _wait()

    return wrapper


def _distributed() -> bool:
    if not dist.is_available():
        return False
    if not dist.is_initialized() and launched():
        driver_of("auto")  # joins the process group before a trainer exists
    return dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _local_rank() -> int:
    if not _distributed():
        return 0
    own = rendezvous_of()
    return own.local_rank if own is not None else int(os.environ.get("LOCAL_RANK", _rank()))


def _wait() -> None:
    if _distributed():
        dist.barrier()


def worker_init_fn(worker_id: int) -> int:
    """Return the seed of a worker of a loader. It changes no generator: the native loader seeds each worker for its batches.

    >>> import torch
    >>> worker_init_fn(1) - worker_init_fn(0)
    1
    """
    return torch.initial_seed() + worker_id


class DataLoaderSlice:
    """The first batches of a loader.

    Args:
        dl: The loader.
        slice_size: The largest number of batches.

    >>> list(DataLoaderSlice(["a", "b", "c"], 2)), len(DataLoaderSlice(["a"], 2))
    (['a', 'b'], 1)
    """

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl: Any = dl
        self.slice_size: int = slice_size

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        return min(len(self.dl), self.slice_size)


def remove_padding(padded_tensor: Tensor, pad_value: float) -> Tensor:
    """Return the rows of `padded_tensor` that have an element other than `pad_value`.

    >>> import torch
    >>> remove_padding(torch.tensor([[1, 2], [0, 0], [0, 3]]), 0)
    tensor([[1, 2],
            [0, 3]])
    """
    padded = padded_tensor == pad_value
    return padded_tensor[~(padded.flatten(1).all(dim=1) if padded.ndim > 1 else padded)]


class LimitBatches:
    """A context in which every new `Trainer` uses only the first batches of each loader.

    >>> with LimitBatches(2):
    ...     os.environ[LIMIT_BATCHES_ENV_VAR]
    '2'
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches: int = at_least(1, "num_batches", num_batches)
        self._before: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._before.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        before = self._before.pop()
        if before is None:
            del os.environ[LIMIT_BATCHES_ENV_VAR]
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = before


def batches_limit() -> int | None:
    """Return the number of batches in the environment variable; None if there is none.

    Raises:
        ValueError: The variable is not a positive integer.
    """
    asked = os.environ.get(LIMIT_BATCHES_ENV_VAR, "None")
    if asked.lower() in ("none", ""):
        return None
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{LIMIT_BATCHES_ENV_VAR} must be a positive integer, or None; got {asked!r}")
    return int(asked)


class ModelEma(Average):
    """An exponential moving average of a model's weights: ``average = decay * average + (1 - decay) * weights``.

    It starts as a copy of the model. Buffers, such as the statistics of BatchNorm, are copied from the model.

    Args:
        model: The model, which is copied to ``module``.
        decay: The weight of the old average in each update.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, **_: Any) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1; got {decay!r}")
        super().__init__(model)
        self.decay = decay
        """The weight of the old average in the next update. A subclass may change it."""
        self.update_parameters(model)

    def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
        """Return the next average of a tensor. An override gets each tensor of the state dict."""
        return self.decay * ema_model_weights + (1.0 - self.decay) * updated_model_weights

    def update(self, model: nn.Module) -> None:
        """Add the current weights of `model` to the average."""
        if type(self).update_fn is ModelEma.update_fn:
            self.update_parameters(model, 1.0 - self.decay)
        else:
            self._update(model, self.update_fn)

    def set(self, model: nn.Module) -> None:
        """Replace the average with the current weights of `model`."""
        self._update(model, lambda average, current: current)

    @torch.no_grad()
    def _update(self, model: nn.Module, update_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        for average, current in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(update_fn(average, current))

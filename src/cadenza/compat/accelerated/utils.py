"""``pytorch_accelerated.utils``: process decorators, a limit on batches, averaged weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch import distributed as dist

from cadenza.compat.absent import advise
from cadenza.drivers import driver_of
from cadenza.drivers.joining import launched, rendezvous_of
from cadenza.optim.averaging import Average

advise(__name__)

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
            _wait()  # also after an error: the others would wait forever

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


def remove_padding(tensor: Tensor, padding_value: float) -> Tensor:
    """Return the rows of `tensor` that have an element other than `padding_value`.

    >>> import torch
    >>> remove_padding(torch.tensor([[1, 2], [0, 0], [0, 3]]), 0)
    tensor([[1, 2],
            [0, 3]])
    """
    padded = (tensor == padding_value).reshape(len(tensor), -1).all(dim=1)
    return tensor[~padded]


class LimitBatches:
    """A context in which every new `Trainer` uses only the first batches of each loader.

    >>> with LimitBatches(2):
    ...     os.environ[LIMIT_BATCHES_ENV_VAR]
    '2'
    """

    def __init__(self, num_batches: int) -> None:
        if not isinstance(num_batches, int) or num_batches < 1:
            raise ValueError(f"num_batches must be a whole number of at least 1; got {num_batches!r}")
        self.num_batches = num_batches
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
    if asked in ("None", ""):
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
        super().__init__(model, lambda _: 1 - decay)
        self.decay = decay
        self.update_parameters(model)

    def update(self, model: nn.Module) -> None:
        """Add the current weights of `model` to the average."""
        self.update_parameters(model)

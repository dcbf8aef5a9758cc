"""``fastNLP.envs.distributed``: the rank of this process, and functions for the main process only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from cadenza.compat.fastnlp.envs.env import FASTNLP_GLOBAL_RANK, FASTNLP_NO_SYNC

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

__all__ = [
    "all_rank_call_context",
    "fastnlp_no_sync_context",
    "get_global_rank",
    "is_cur_env_distributed",
    "rank_zero_call",
    "rank_zero_rm",
]


def is_cur_env_distributed() -> bool:
    """Return whether a launcher started this process, or a process group is initialized."""
    return FASTNLP_GLOBAL_RANK in os.environ or _has_group()


def get_global_rank() -> int:
    """Return the rank of this process among all, from 0."""
    known = os.environ.get(FASTNLP_GLOBAL_RANK)
    if known is not None:
        return int(known)
    return torch.distributed.get_rank() if _has_group() else 0


def rank_zero_call(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """Return a function that calls `fn` on the main process, and returns None on the others.

    Inside, metrics and drivers of fastNLP do not wait for other ranks or exchange objects with them, because those do not
    participate.

    >>> rank_zero_call(max)(1, 2)
    2
    """

    @wraps(fn)
    def on_main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        if get_global_rank() != 0:
            return None
        with fastnlp_no_sync_context():
            return fn(*args, **kwargs)

    return on_main


@contextmanager
def fastnlp_no_sync_context(level: int = 2) -> Iterator[None]:
    """Metrics and drivers of fastNLP do not wait for other ranks inside.

    Args:
        level: 2: and do not exchange objects with them; 1: but exchange objects; 0: no effect.
    """
    with _environment(FASTNLP_NO_SYNC, str(level)):
        yield


@contextmanager
def all_rank_call_context() -> Iterator[None]:
    """Functions of `rank_zero_call` run on each rank inside."""
    with _environment(FASTNLP_GLOBAL_RANK, "0"):
        yield


def rank_zero_rm(path: str | Path | None) -> None:
    """Remove a file or a folder, on the main process only. A missing path is ignored."""
    if path is None or get_global_rank() != 0:
        return
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def may_exchange() -> bool:
    """Return whether ranks may exchange objects now: there is a process group, and no `fastnlp_no_sync_context`."""
    return _has_group() and not is_alone(2)


def is_alone(level: int) -> bool:
    """Return whether a `fastnlp_no_sync_context` of at least this level is active."""
    return int(os.environ.get(FASTNLP_NO_SYNC, "0")) >= level


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old

"""Ranks that stand: a file calls its functions on them one after the other.

New processes take half a second until a first run on them has ended: they use torch and gloo for the first time. The next run
takes a twentieth of a second. `launch` is for functions that change, break or leave their process, and for what they print.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch

from tests.ports import free_port

T = TypeVar("T")
TIMEOUT_S, GRACE_S = 300.0, 20.0


class Standing(NamedTuple):
    process: ForkProcess
    pipe: Connection


_standing: dict[int, list[Standing]] = {}
"""By the number of ranks."""


def on_ranks(function: Callable[[], T], ranks: int = 2) -> list[T]:
    """Call a function on ranks that earlier calls in this file have started; return the results by rank.

    Each rank has a copy of the function and of what it uses. Errors of ranks are raised as `launch` does, and end the ranks.
    """
    if ranks not in _standing:
        _standing[ranks] = _started(ranks)
    waiting = {one.pipe: rank for rank, one in enumerate(_standing[ranks])}
    content = cloudpickle.dumps(function)
    for pipe in waiting:
        pipe.send_bytes(content)
    returned: dict[int, T] = {}
    errors: list[BaseException] = []
    while waiting and (ready := wait([*waiting], GRACE_S if errors else TIMEOUT_S)):
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]  # what is ready is one of them
            kind, value, text = _answer(pipe)  # type: ignore[arg-type]
            if kind == "returned":
                returned[rank] = value
            else:
                value.add_note(f"in rank {rank}:\n{text}")
                errors.append(value)
    if waiting:
        errors.append(TimeoutError(f"ranks {[*waiting.values()]} of {ranks} did not return"))
    if errors:
        _end(ranks)
        raise BaseExceptionGroup(f"{len(errors)} of {ranks} ranks failed", errors)
    return [returned[rank] for rank in range(ranks)]


def end_ranks() -> None:
    for ranks in [*_standing]:
        _end(ranks)


def _end(ranks: int) -> None:
    for process, pipe in _standing.pop(ranks):
        pipe.close()
        process.kill()
        process.join()


def _started(ranks: int) -> list[Standing]:
    context, port, started = multiprocessing.get_context("fork"), free_port(), list[Standing]()
    for rank in range(ranks):
        pipe, its_end = context.Pipe()
        process = context.Process(target=_serve, args=(its_end, rank, ranks, port))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about a fork beside threads
            process.start()
        its_end.close()
        started.append(Standing(process, pipe))
    return started


def _serve(pipe: Connection, rank: int, ranks: int, port: int) -> None:
    """Call what comes, until the process of the tests kills this one, or is gone itself."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before, parent = dict(os.environ), os.getppid()
    while True:
        while not pipe.poll(5):
            if os.getppid() != parent:
                os._exit(1)
        torch.manual_seed(0)
        pipe.send_bytes(_result_of(pipe.recv_bytes()))
        os.environ.clear()
        os.environ.update(before)


def _result_of(content: bytes) -> bytes:
    try:
        return pickle.dumps(("returned", cloudpickle.loads(content)(), ""))
    except BaseException as error:
        text = traceback.format_exc()
        answer = pickle.dumps(("raised", RuntimeError(repr(error)), text))
        try:
            pickle.loads(exact := pickle.dumps(("raised", error, text)))
        except Exception:
            return answer
        return exact


def _answer(pipe: Connection) -> tuple[str, Any, str]:
    try:
        answer: tuple[str, Any, str] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "raised", RuntimeError("the rank ended without a result"), ""
    return answer

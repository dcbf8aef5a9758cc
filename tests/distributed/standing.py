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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

from tests.ports import free_port

T = TypeVar("T")
TIMEOUT_S, GRACE_S = 300.0, 20.0

_standing: dict[int, list[tuple[ForkProcess, Connection]]] = {}
"""By the number of ranks, their processes and the pipes to them."""

_fixtures: list[str] = []
"""The files of which the fixture ends the ranks."""


def on_ranks(function: Callable[[], T], ranks: int = 2) -> list[T]:
    """Call a function on ranks that earlier calls in this file have started; return the results by rank.

    Each rank has a copy of the function and of what it uses. Errors of ranks are raised as `launch` does, and end the ranks.

    Raises:
        RuntimeError: The fixture `standing_ranks` is not in use. Ranks that nothing ends would keep this process from ending.
    """
    if not _fixtures:
        raise RuntimeError(
            "on_ranks needs the fixture that ends the ranks. In this file or its conftest.py, write "
            "`from tests.distributed.standing import standing_ranks as standing_ranks`; outside of pytest, use "
            "cadenza.testing.launch."
        )
    if ranks not in _standing:
        _standing[ranks] = _started(ranks)
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(_standing[ranks])}
    content = cloudpickle.dumps(function)
    for pipe in waiting:
        pipe.send_bytes(content)
    returned: dict[int, T] = {}
    errors: list[BaseException] = []
    while waiting and (ready := wait([*waiting], GRACE_S if errors else TIMEOUT_S)):
        for pipe in cast("list[Connection]", ready):
            rank = waiting.pop(pipe)
            try:
                value, error, text = pickle.loads(pipe.recv_bytes())
            except EOFError:
                value, error, text = None, RuntimeError("the rank ended without a result"), ""
            if error is None:
                returned[rank] = value
            else:
                error.add_note(f"in rank {rank}:\n{text}")
                errors.append(error)
    if waiting:
        errors.append(TimeoutError(f"ranks {[*waiting.values()]} of {ranks} did not return"))
    if errors:
        _end(ranks)
        raise BaseExceptionGroup(f"{len(errors)} of {ranks} ranks failed", errors)
    return [returned[rank] for rank in range(ranks)]


@pytest.fixture(scope="module", autouse=True)
def standing_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the ranks with the file that started them."""
    _fixtures.append(request.node.name)
    yield
    _fixtures.remove(request.node.name)
    for ranks in [*_standing]:
        _end(ranks)


def _end(ranks: int) -> None:
    for process, pipe in _standing.pop(ranks):
        pipe.close()
        process.kill()
        process.join()


def _started(ranks: int) -> list[tuple[ForkProcess, Connection]]:
    context, port, started = multiprocessing.get_context("fork"), free_port(), list[tuple[ForkProcess, Connection]]()
    for rank in range(ranks):
        pipe, its_end = context.Pipe()
        process = context.Process(target=_serve, args=(its_end, rank, ranks, port))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about a fork beside threads
            process.start()
        its_end.close()
        started.append((process, pipe))
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
    """Return what a function returns or raises, and the text of the error."""
    answer: tuple[Any, BaseException | None, str]
    try:
        answer = cloudpickle.loads(content)(), None, ""
    except BaseException as error:
        answer = None, error, traceback.format_exc()
    try:
        pickle.loads(exact := pickle.dumps(answer))
    except Exception:
        return pickle.dumps((None, RuntimeError(repr(answer[1] or answer[0])), answer[2]))
    return exact

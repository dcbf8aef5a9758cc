"""Run a function in several processes of this machine, for tests: what ``cadenza.testing.launch`` does."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # where torch documents it

T = TypeVar("T")


def launch(function: Callable[[], T], ranks: int = 2, *, timeout_s: float = 60) -> list[T]:
    """Call `function` in `ranks` new processes, with the variables that torchrun sets; return what they returned, by rank.

    The processes are forked: the function may use all that is there, in a closure too, and what it changes is seen by nobody
    else. What it returns goes through pickle.

    Args:
        function: In it ``Trainer(driver="auto")`` takes DDP.
        ranks: How many processes.
        timeout_s: Processes that are not done after this many seconds are killed.

    Raises:
        BaseExceptionGroup: What went wrong in the processes, the first error first, each with its rank and traceback as a note.
        TimeoutError: They did not end in time, and none had failed.
        RuntimeError: CUDA is in use in this process, and cannot be in forked ones.

    >>> launch(lambda: int(os.environ["RANK"]) * 10)
    [0, 10]
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("launch forks this process, and CUDA is in use here already; call it before, or start with torchrun")
    import_module("torch._dynamo")  # DDP does so, for seconds: once here, instead of in each process
    processes, results, ports = [], [], []
    context = multiprocessing.get_context("fork")
    for rank in range(ranks):
        result, its_end = context.Pipe(duplex=False)
        port, its_port = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(function, rank, ranks, timeout_s, port, its_end))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, such as those of a test runner
            process.start()
        its_end.close()
        processes.append(process)
        results.append(result)
        ports.append(its_port)
    # Kept here, as by torchrun, so that it outlives each of them; and after the forks, as it has a thread.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    for its_port in ports:
        its_port.send(store.port)
    try:
        return _collected(results, timeout_s)
    finally:
        del store  # its thread must end here: a copy of it in a process that is forked later could not
        for process in processes:
            process.join(1)
            process.kill()
            process.join()


def _work(function: Callable[[], Any], rank: int, ranks: int, timeout_s: float, port: Connection, result: Connection) -> None:
    faulthandler.dump_traceback_later(timeout_s * 0.9, file=2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.recv()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        answer: tuple[str, Any, str] = ("returned", function(), "")
    except BaseException as error:
        answer = ("raised", error, traceback.format_exc())
    try:
        content = pickle.dumps(answer)
        pickle.loads(content)
    except Exception:
        content = pickle.dumps(("raised", RuntimeError(repr(answer[1])), answer[2]))
    result.send_bytes(content)


def _collected(results: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    returned: dict[int, Any] = {}
    errors: list[BaseException] = []
    waiting = {id(result): (rank, result) for rank, result in enumerate(results)}
    while waiting and (ready := wait([result for _, result in waiting.values()], max(0.0, deadline - time.monotonic()))):
        for one in ready:
            rank, result = waiting.pop(id(one))
            try:
                kind, value, told = pickle.loads(result.recv_bytes())
            except EOFError:
                kind, value, told = "raised", RuntimeError(f"rank {rank} ended without a word"), ""
            if kind == "returned":
                returned[rank] = value
            else:
                value.add_note(f"in rank {rank}:\n{told}")
                errors.append(value)
    late = [rank for rank, _ in waiting.values()]
    if errors:
        more = f"; not done after {timeout_s:g} s: ranks {late}" if late else ""
        raise BaseExceptionGroup(f"{len(errors)} of {len(results)} ranks failed{more}", errors)
    if late:
        raise TimeoutError(f"ranks {late} of {len(results)} were not done after {timeout_s:g} s")
    return [returned[rank] for rank in range(len(results))]

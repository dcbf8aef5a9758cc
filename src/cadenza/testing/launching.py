"""Run a function in several processes of this machine, for tests."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # where torch documents it

T = TypeVar("T")
GRACE_S = 20.0
"""How long the other processes may take to end after one has failed."""


def launch(function: Callable[[], T], ranks: int = 2, *, timeout_s: float = 300) -> list[T]:
    """Call `function` in `ranks` new processes, with the variables that torchrun sets; return the results by rank.

    The processes are forked: the function may use all objects of this process, also from a closure, and its changes stay in its
    own process. Results must be picklable. If one process fails, the others have 20 seconds to end; then they are killed.

    Args:
        function: The function to call. In it, ``Trainer(driver="auto")`` uses DDP.
        ranks: The number of processes.
        timeout_s: Seconds after which running processes are killed.

    Raises:
        BaseExceptionGroup: The errors of the processes, the first error first, each with its rank and traceback as a note. The
            error of a process that ended without a result names its signal or exit code.
        TimeoutError: A process did not end in time, and none had failed.
        RuntimeError: This process has initialized CUDA, which forked processes could not use.

    >>> launch(lambda: int(os.environ["RANK"]) * 10)
    [0, 10]
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "launch forks this process, but CUDA is initialized. Call launch before CUDA is used, or start with torchrun."
        )
    import_module("torch._dynamo")  # DDP imports it, which takes seconds: import it once here instead of in each process
    processes, results = list[ForkProcess](), list[Connection]()
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listening, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork beside threads, such as those of a test runner
        port = listening.getsockname()[1]
        for rank in range(ranks):
            result, its_end = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(function, rank, ranks, timeout_s, listening, its_end, results))
            process.start()
            its_end.close()
            processes.append(process)
            results.append(result)
        # In this process, as with torchrun, so that it outlives the ranks; after the forks, because it has a thread.
        waits, server = timedelta(seconds=timeout_s), listening.detach()
        store = TCPStore("127.0.0.1", port, None, True, waits, wait_for_workers=False, master_listen_fd=server)
    try:
        return _collected(processes, results, timeout_s)
    finally:
        del store  # end its thread here: a copy in a process that is forked later could not end it
        for process in processes:
            process.join(1)
            process.kill()
            process.join()


def _work(
    function: Callable[[], Any],
    rank: int,
    ranks: int,
    timeout_s: float,
    listening: socket.socket,
    result: Connection,
    of_others: list[Connection],
) -> None:
    gc.freeze()  # garbage of the parent, such as a session of onnxruntime, may wait for threads that it alone has
    faulthandler.dump_traceback_later(timeout_s * 0.9, file=2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    listening.close()
    for inherited in of_others:  # each would count as an open file of this rank
        inherited.close()
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


def _collected(processes: list[ForkProcess], results: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    returned: dict[int, Any] = {}
    errors: list[BaseException] = []
    waiting = dict(enumerate(results))
    while waiting and (ready := _ready(waiting, processes, max(0.0, deadline - time.monotonic()))):
        for rank in ready:
            kind, value, text = _answer(rank, waiting.pop(rank), processes[rank])
            if kind == "returned":
                returned[rank] = value
            else:
                value.add_note(f"in rank {rank}:\n{text}")
                errors.append(value)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    late = [*waiting]
    if errors:
        more = f"; ranks {late} had not ended {min(GRACE_S, timeout_s):g} s later, and were killed" if late else ""
        raise BaseExceptionGroup(f"{len(errors)} of {len(results)} ranks failed{more}", errors)
    if late:
        raise TimeoutError(f"ranks {late} of {len(results)} were not done after {timeout_s:g} s")
    return [returned[rank] for rank in range(len(results))]


def _ready(waiting: dict[int, Connection], processes: list[ForkProcess], timeout_s: float) -> list[int]:
    """Return the ranks that have sent a result or ended. A pipe alone does not tell: a loader's workers keep it open."""
    ready = wait([*waiting.values(), *(processes[rank].sentinel for rank in waiting)], timeout_s)
    return [rank for rank, result in waiting.items() if result in ready or processes[rank].sentinel in ready]


def _answer(rank: int, result: Connection, process: ForkProcess) -> tuple[str, Any, str]:
    try:
        if result.poll():
            answer: tuple[str, Any, str] = pickle.loads(result.recv_bytes())
            return answer
    except EOFError:
        pass
    return "raised", RuntimeError(f"rank {rank} ended without a result: {_ended(process)}"), ""


def _ended(process: ForkProcess) -> str:
    process.join(10)
    code = process.exitcode
    return f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"

"""Call a function in several processes of this machine, or in fresh processes, which import all modules anew."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # where torch documents it

T = TypeVar("T")
_Outcome = tuple[Any, BaseException | None, str]
"""What a call in another process returned, or the error that it raised and its traceback."""
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


def _outcome(call: Callable[[], Any]) -> bytes:
    """Call a function; return its `_Outcome`, pickled."""
    try:
        outcome: _Outcome = (call(), None, "")
    except BaseException as error:
        outcome = (None, error, traceback.format_exc())
    try:
        content = pickle.dumps(outcome)
        pickle.loads(content)
    except Exception:
        value, failed, text = outcome
        content = pickle.dumps((None, RuntimeError(repr(value if failed is None else failed)), text))
    return content


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
    result.send_bytes(_outcome(function))


def _collected(processes: list[ForkProcess], results: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    returned: dict[int, Any] = {}
    errors: list[BaseException] = []
    waiting = dict(enumerate(results))
    while waiting and (ready := _ready(waiting, processes, max(0.0, deadline - time.monotonic()))):
        for rank in ready:
            value, error, text = _answer(rank, waiting.pop(rank), processes[rank])
            if error is None:
                returned[rank] = value
            else:
                error.add_note(f"in rank {rank}:\n{text}")
                errors.append(error)
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


def _answer(rank: int, result: Connection, process: ForkProcess) -> _Outcome:
    try:
        if result.poll():
            answer: _Outcome = pickle.loads(result.recv_bytes())
            return answer
    except EOFError:
        pass
    return None, RuntimeError(f"rank {rank} ended without a result: {_ended(process)}"), ""


def _ended(process: ForkProcess) -> str:
    process.join(10)
    code = process.exitcode
    return f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"


_HOW = "Define it with def at the top level of a module that can be imported, or pass in_process=True."


class FreshProcesses:
    """Two processes that import the modules and wait. Each call runs in a fork of one of them.

    The two have different values of ``PYTHONHASHSEED``, so the order of a set of strings differs between them.

    Args:
        function: The first argument of every call. It must be picklable.
        folder: The folder in which results are passed back.

    Raises:
        TypeError: `function` cannot be pickled.
    """

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function, self._folder = _pickled(function), folder
        self._started: dict[int, tuple[Any, Connection]] = {}

    def __enter__(self) -> FreshProcesses:
        for number in (0, 1):  # both at once, since importing torch takes a second or more
            self._start(number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process, connection in self._started.values():
            connection.close()
            process.join(5)
            process.kill()
            process.join()

    def call(self, number: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``call(function, *arguments)`` from process 0 or 1, or raise the error that it raised there."""
        process, connection = self._started[number]
        path = self._folder / "result"
        try:
            connection.send((call, arguments, path))
            connection.recv()
        except (EOFError, OSError):
            process.join()
            raise RuntimeError(
                f"the fresh process ended with exit status {process.exitcode} before it ran the function. In a script, start "
                "the work under if __name__ == '__main__':, as the process imports the script; or pass in_process=True."
            ) from None
        if not path.exists():
            raise RuntimeError(
                "the call ended its process, so it has no result. Remove calls such as os._exit from the function."
            )
        value, error, told = pickle.loads(path.read_bytes())
        path.unlink()
        if error is not None:
            error.add_note(f"in a fresh process:\n{told}")
            raise error
        return value

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        own, its = context.Pipe()
        process = context.Process(target=_serve, args=(its, self._function, torch.get_num_threads()), daemon=False)
        before = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = str(number + 1)
        try:
            process.start()
        finally:
            del os.environ["PYTHONHASHSEED"]
            if before is not None:
                os.environ["PYTHONHASHSEED"] = before
        its.close()
        self._started[number] = process, own


def _pickled(function: Callable[..., Any]) -> bytes:
    main = sys.modules["__main__"]
    module = getattr(getattr(function, "func", function), "__module__", None)
    if module == "__main__" and not hasattr(main, "__file__"):
        raise TypeError(f"a fresh process cannot import {function!r}, which was defined in a notebook or a console. {_HOW}")
    try:
        content = pickle.dumps(function)
        pickle.loads(content)
    except Exception as error:
        raise TypeError(
            f"a fresh process must import the function; {function!r} cannot be imported ({error}). {_HOW}"
        ) from None
    return content


def _serve(connection: Connection, function: bytes, threads: int) -> None:
    """Wait for calls; fork for each."""
    torch.set_num_threads(threads)
    import_module(
        "torch._dynamo"
    )  # the first optimizer imports it, in about a second: import it once here instead of in each call
    try:
        callee: Any = pickle.loads(function)
        failed = None
    except Exception as error:
        callee, failed = None, TypeError(f"a fresh process cannot import the function: {error!r}. {_HOW}")
    while True:
        try:
            call, arguments, path = connection.recv()
        except EOFError:
            return
        if child := os.fork():
            os.waitpid(child, 0)
            connection.send("done")
            continue
        content = _outcome(partial(call, callee, *arguments) if failed is None else partial(_raise, failed))
        sys.stdout.flush()
        sys.stderr.flush()
        path.write_bytes(content)
        os._exit(0)


def _raise(error: Exception) -> None:
    raise error

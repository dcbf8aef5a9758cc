"""Call a function in fresh processes: each call begins with freshly imported modules."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_HOW = "Define it with def at the top level of a module that can be imported, or pass in_process=True."


class FreshProcesses:
    """Two processes that import the modules and wait. Each call runs in a fork of one of them.

    The two have different values of ``PYTHONHASHSEED``, so the order of a set of strings differs between them. Without
    ``os.fork``, each call runs in a new process.

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
        process, connection = self._started.get(number) or self._start(number)
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
        if not hasattr(os, "fork"):
            del self._started[number]
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

    def _start(self, number: int) -> tuple[Any, Connection]:
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
        return self._started[number]


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
        child = os.fork() if hasattr(os, "fork") else 0
        if child:
            os.waitpid(child, 0)
            connection.send("done")
            continue
        _answer(path, call, callee, arguments, failed)
        if hasattr(os, "fork"):
            os._exit(0)
        connection.send("done")
        return


def _answer(path: Path, call: Callable[..., Any], callee: Any, arguments: tuple[Any, ...], failed: Exception | None) -> None:
    answer: tuple[Any, BaseException | None, str]
    try:
        if failed is not None:
            raise failed
        answer = (call(callee, *arguments), None, "")
    except BaseException as error:
        answer = (None, error, traceback.format_exc())
    try:
        content = pickle.dumps(answer)
        pickle.loads(content)
    except Exception:
        content = pickle.dumps((None, RuntimeError(repr(answer[1] or "a result that cannot be pickled")), answer[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    path.write_bytes(content)

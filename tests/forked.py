"""Run a function in a process that begins without the imports: a fork of a server that has made them.

A new interpreter would import torch anew, for three seconds. The server is that of `multiprocessing`; `tests/conftest.py` says
what it imports. The process begins with the environment and the signal handlers that the server had, not with those of a test.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.waiting import until


@dataclass(frozen=True)
class Forked:
    """A process, and the file that gets what it writes to stdout and stderr."""

    process: ForkServerProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.said() or self.process.exitcode is not None)
        assert words in self.said(), self.said()

    def ended(self) -> int:
        """Wait for the end; return the exit status, below 0: the signal that ended it."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")


def start(function: Callable[..., object], *arguments: Any, output: Path) -> Forked:
    """Start ``function(*arguments)`` in a session of its own."""
    output.touch()
    process = get_context("forkserver").Process(target=_work, args=(output, function, arguments))
    process.start()
    return Forked(process, output)


def _work(output: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)
    sys.stdout.flush()


def run(script: Path, *arguments: str | Path, folder: Path, **environment: str) -> str:
    """Run a script in a folder, as ``python -W error`` would; return what it printed. It must end well."""
    with tempfile.TemporaryDirectory() as its:
        output, errors = Path(its, "output"), Path(its, "errors")
        given = [str(script), *map(str, arguments)]
        process = start(_as_main, given, folder, {**os.environ, **environment}, errors, output=output)
        assert process.ended() == 0, errors.read_text(encoding="utf-8")
        return process.said()


def _as_main(arguments: list[str], folder: Path, environment: dict[str, str], errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    warnings.simplefilter("error")
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")

"""A process that has imported Cadenza, and forks for each script that it receives: an import takes seconds, a fork does not.

Run as ``python forking.py FD``, with a Unix socket. Each message is a JSON object with `script` and `environment`, and the file
descriptor that becomes stdin, stdout and stderr of the script. The answers are the process id, then the exit code.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import socket
import sys
import termios
import threading

import torch

import cadenza.callbacks
import cadenza.sinks  # noqa: F401  # the scripts need these imports
from cadenza.testing import tiny_run

torch.set_num_threads(1)
tiny_run(progress=False, steps=1)  # imports what a first step imports


def next_script(requests: socket.socket) -> str:
    """Fork for each request. Return its script in the new process; end this one when the socket is closed."""
    while True:
        message, terminals, _, _ = socket.recv_fds(requests, 1 << 18, 1)
        if not message:
            os._exit(0)
        request, [terminal] = json.loads(message), terminals
        child = os.fork()
        if child == 0:
            requests.close()
            _take(terminal, request["environment"])
            script: str = request["script"]
            return script
        os.close(terminal)
        requests.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _take(terminal: int, environment: dict[str, str]) -> None:
    os.setsid()
    if os.isatty(terminal):
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def run(script: str) -> int:
    """Run a script as Python would, and return its exit code."""
    try:
        exec(compile(script, "<script>", "exec"), vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.path[0] = ""
    gc.freeze()  # a fork copies no memory for a collection
    code = run(next_script(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(code)  # without the end of the interpreter, which takes a second after the imports of torch

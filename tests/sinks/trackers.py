"""A run with a tracker in a process of its own, without a network and with an empty home: what does it leave behind?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import argparse, builtins, json, multiprocessing, os, signal, socket, sys, threading

asked, connect = [], socket.socket.connect
def refuse(*arguments, **named):
    if getattr(arguments[0], "family", None) == getattr(socket, "AF_UNIX", ""):  # to a process of its own
        return connect(*arguments, **named)
    asked.append(repr(arguments))
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

def state():
    parser = argparse.ArgumentParser
    return {
        "exception hook": sys.excepthook, "exit": sys.exit, "stdout": sys.stdout, "stderr": sys.stderr,
        "import": builtins.__import__, "parse_args": parser.parse_args, "parse_known_args": parser.parse_known_args,
        "Process.run": multiprocessing.Process.run, "fork": os.fork, "save": torch.save, "backward": torch.Tensor.backward,
        "SIGINT": signal.getsignal(signal.SIGINT), "SIGTERM": signal.getsignal(signal.SIGTERM),
        "working directory": os.getcwd(),
        "environment": sorted(os.environ.items()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }

import torch
from cadenza.sinks import *
from cadenza.callbacks import LogTraining
from cadenza.testing import tiny_run
from tests.sinks.samples import MEDIA, logging

tiny_run()
before = state()
run = tiny_run(callbacks=[LogTraining("1 step"), logging(MEDIA), SINK], steps=3, directory=DIRECTORY)
after = state()
changed = {name: f"{before[name]} is now {after[name]}"[-2000:] for name in before if before[name] != after[name]}
print("\\n" + json.dumps([run.outcome.kind, [repr(fault.error) for fault in run.faults], asked, changed]))
"""


def in_own_process(sink: str, folder: Path, **environment: str) -> Any:
    """Return the outcome, the faults, the attempts to connect and what changed in the process. `folder`: ``home``, ``work``."""
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    hidden = ("COMET", "DVC", "WANDB", "SWANLAB", "MLFLOW", "TRACKIO", "PYTEST", "CI", "DO_NOT_TRACK")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    paths = os.pathsep.join([ROOT, *sys.path])
    variables |= {"HOME": str(folder / "home"), "MPLCONFIGDIR": str(folder / "mpl"), "PYTHONPATH": paths, **environment}
    script = SCRIPT.replace("SINK", sink).replace("DIRECTORY", repr(str(folder / "run")))
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=folder / "work", env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_left_as_it_was(sink: str, folder: Path, **environment: str) -> None:
    """Check that a run with a tracker connects nowhere, writes nothing to the home, and leaves the process as it was."""
    assert in_own_process(sink, folder, **environment) == ["finished", [], [], {}]
    assert sorted(path.relative_to(folder) for path in (folder / "home").rglob("*")) == []

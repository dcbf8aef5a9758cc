"""A run with a tracker in a process of its own, with an empty home: how does it end, and what does it leave behind?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.sinks.terminal import Terminal

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse, builtins, json, multiprocessing, os, signal, socket, sys, threading
import psutil, torch

for name in [name for name in os.environ if name.startswith(HIDDEN)]:
    del os.environ[name]
os.environ.update(VARIABLES)
os.chdir(WORK)
sys.path.insert(0, ROOT)

from cadenza import Callback, on
from cadenza.callbacks import LogTraining
from cadenza.sinks import *
from cadenza.testing import tiny_run
from tests.sinks.samples import MEDIA, logging

asked, connect = [], socket.socket.connect
def refuse(*arguments, **named):
    if getattr(arguments[0], "family", None) == getattr(socket, "AF_UNIX", ""):  # to a process of its own
        return connect(*arguments, **named)
    asked.append(repr(arguments))
    raise OSError("no network")

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

@on(Callback.on_step_end, at=2)
def act(run):
    ACT

if OFFLINE:
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
    MORE = [logging(MEDIA)]
else:
    MORE = []
tiny_run(progress=False)
before = state()
run = tiny_run(callbacks=[LogTraining("1 step"), *MORE, act, SINK], steps=STEPS, directory=DIRECTORY)
for thread in threading.enumerate():
    if thread.name == "cadenza-writer":  # a run tells it to end, and does not wait
        thread.join(100)
after = state()
changed = {name: f"{before[name]} is now {after[name]}"[-2000:] for name in before if before[name] != after[name]}
print("\\n" + json.dumps([run.outcome.kind, [repr(fault.error) for fault in run.faults], asked, changed]), flush=True)
END
"""
HIDDEN = ("COMET", "DVC", "WANDB", "SWANLAB", "MLFLOW", "TRACKIO", "PYTEST", "CI", "DO_NOT_TRACK")


@dataclass(frozen=True)
class Ended:
    """How a run ended in its process, and all that the process wrote."""

    outcome: str
    faults: list[str]
    asked: list[str]
    changed: dict[str, str]
    written: str


def in_own_process(
    sink: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    offline: bool = True,
    act: str = "pass",
    steps: int = 3,
    end: str = "",
) -> Ended:
    """Run in a terminal, with warnings as errors; `folder` gets ``home``, ``work`` and ``run``.

    Args:
        sink: The code that makes the sink.
        folder: An empty folder.
        variables: Environment variables.
        offline: Whether connections are refused and noted; then media are logged, too.
        act: Code at the end of step 2.
        steps: The length of the run.
        end: Code after the run.
    """
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    given = {"HOME": folder / "home", "NETRC": folder / "netrc", "MPLCONFIGDIR": folder / "mpl", **(variables or {})}
    values = {"HIDDEN": HIDDEN, "VARIABLES": {name: str(value) for name, value in given.items()}}
    values |= {"WORK": str(folder / "work"), "ROOT": str(ROOT), "DIRECTORY": str(folder / "run")}
    names = "\n".join(f"{name} = {value!r}" for name, value in {**values, "OFFLINE": offline, "STEPS": steps}.items())
    script = SCRIPT.replace("SINK", sink).replace("    ACT", f"    {act}").replace("END", end)
    with Terminal(f"{names}\n{script}", width=1000) as terminal:
        pass
    assert terminal.exit_code == 0, terminal.written
    [line] = [line for line in terminal.written.splitlines() if line.startswith('["')]
    outcome, faults, asked, changed = json.loads(line)
    return Ended(outcome, faults, asked, changed, terminal.written)

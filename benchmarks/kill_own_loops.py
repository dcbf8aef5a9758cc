"""Kill the scripts of ``examples/own_loop`` at random instants, start them again, and compare each with an uninterrupted one.

    python benchmarks/kill_own_loops.py [--kills 50] [--ranks 1] [--seed 0] [--only gpt gan policy]

Each script is killed with SIGKILL, several times in a row, at instants from its start to its end. With two ranks, half of the
kills end all processes at once, and half that of one rank first, the others later. Compared are the last checkpoint
(weights, optimizers, what the loop keeps, RNG states of all ranks, history) and ``metrics.jsonl``. Needs a system with fork.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from kill import difference, ended, exit_status

from cadenza.testing import launch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "own_loop"
SCRIPTS = ("gpt", "gan", "policy")


@dataclass(frozen=True)
class Killed:
    """A script that was killed, continued, and has ended."""

    kills: int
    difference: str | None
    """The first difference from the uninterrupted script; None if there is none."""


def start(script: str, folder: Path, ranks: int = 1) -> int:
    """Start a script in a separate process group in `folder`; return its process id."""
    with warnings.catch_warnings():
        # a warning about forks with threads, such as those of a test runner
        warnings.simplefilter("ignore", DeprecationWarning)
        if child := os.fork():
            os.setpgid(child, child)
            return child
    code = 1
    with Path(folder, "log").open("a", buffering=1) as log:
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            os.chdir(folder)
            if ranks == 1:
                run(script)
            else:
                launch(lambda: run(script), ranks)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def run(script: str) -> None:
    """Run a script in this process, and note which process that is."""
    Path(f"rank-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")


def left_alone(script: str, folder: Path, ranks: int = 1) -> float:
    """Run a script to its end; return the seconds that it took."""
    folder.mkdir()
    begin = time.monotonic()
    if status := exit_status(start(script, folder, ranks)):
        raise RuntimeError(f"{script} ended with status {status}:\n{(folder / 'log').read_text()}")
    return time.monotonic() - begin


def killed(script: str, whole: Path, folder: Path, seconds: float, kills: int, dice: random.Random, ranks: int = 1) -> Killed:
    """Kill a script up to `kills` times, each up to `seconds` after its start; continue it to the end, and compare."""
    folder.mkdir()
    done = 0
    for _ in range(kills):
        child = start(script, folder, ranks)
        time.sleep(dice.uniform(0, seconds))
        if ended(child):
            break
        victim = folder / f"rank-{dice.randrange(ranks)}"
        if ranks > 1 and dice.random() < 0.5 and victim.exists():
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(int(victim.read_text()), signal.SIGKILL)
            time.sleep(dice.uniform(0, 1))  # then the launcher ends the others, as torchrun does
        if not ended(child):
            os.killpg(child, signal.SIGKILL)
        done += exit_status(child) != 0
        victim.unlink(missing_ok=True)
    if status := exit_status(start(script, folder, ranks)):
        return Killed(done, f"it ended with status {status}:\n{(folder / 'log').read_text()[-3000:]}")
    return Killed(done, difference(whole / "runs" / script, folder / "runs" / script))


def warm_up() -> None:
    """Import the modules of the scripts, so that their processes start quickly."""
    for name in ("tensorboard.compat.proto.event_pb2", "cadenza.trainer", "cadenza.attaching", "torch._dynamo"):
        importlib.import_module(name)


def main() -> int:
    """Kill, compare, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of each script")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    dice, faults = random.Random(arguments.seed), 0
    for script in arguments.only:
        with tempfile.TemporaryDirectory() as place:
            whole, kills, runs = Path(place, "whole"), 0, 0
            seconds = left_alone(script, whole, arguments.ranks)
            while kills < arguments.kills:
                rest = min(5, arguments.kills - kills)
                result = killed(script, whole, Path(place, str(runs)), seconds, rest, dice, arguments.ranks)
                kills, runs = kills + result.kills, runs + 1
                if result.difference is not None:
                    faults += 1
                    print(f"FAULT: {script}: {result.difference}", flush=True)
        print(f"{script}, ranks {arguments.ranks}: kills {kills}, runs {runs}, a run left alone {seconds:.1f} s", flush=True)
    print(f"runs that ended otherwise: {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

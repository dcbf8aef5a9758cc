"""Kill trainings at random instants, start them again, and compare each with the same training left alone.

    python benchmarks/kill.py [--kills 500] [--seed 0]

The trainings are drawn at random; `kill_jobs.py` says from what. The signals are SIGKILL, SIGTERM and SIGINT, mixed. Half of
the kills come at a random moment, half while a checkpoint is being written. Only kills that land after training began count.
Compared are the last checkpoint (weights, optimizers, schedules, averages, RNG states, history), ``metrics.jsonl``, and the
weights with which the process ended. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kill_jobs import Job, began_of

from cadenza.checkpoint.store import Store
from cadenza.status.plain import first_difference

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
STARTUP_S, RUN_S = 60.0, 120.0
NOT_COMPARED = ("offsets", "environment")  # decisions say when the run was continued; threads are those of the process


@dataclass
class Tally:
    """What was seen."""

    kills: Counter[str] = field(default_factory=Counter)
    in_a_save: int = 0
    runs: int = 0
    exact: int = 0
    unreadable: int = 0
    failed: int = 0
    loaders: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def start(job: Job, directory: Path) -> int:
    """Start the training in a child; return its process id."""
    began_of(directory).unlink(missing_ok=True)
    if child := os.fork():
        return child
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    with directory.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        trainer, run = job.fit(directory)
        if run.progress.step > run.progress.origin.step:  # else the run was over, and there is nothing to do
            torch.save(dict(trainer.model.state_dict()), directory / "final.new")
            (directory / "final.new").replace(directory / "final")
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except KeyboardInterrupt:  # it came when the run was over: what is compared at the end is whether it lost anything
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> bool:
    """Return whether the child has ended; it can still be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_until_training(job: Job, directory: Path, child: int) -> bool:
    """Return when the child trains: True; or has ended without a step: False."""
    limit = time.monotonic() + STARTUP_S
    while not began_of(directory).exists():
        if ended(child):
            return began_of(directory).exists()
        if time.monotonic() > limit:
            raise TimeoutError(f"{job} did not begin in {STARTUP_S:g} s")
        time.sleep(0.001)
    return True


def wait_for_save(directory: Path, number: int, child: int) -> None:
    """Return when the hidden folder of the `number`-th save is there, or the child has ended."""
    seen: set[str] = set()
    while len(seen) < number and not ended(child):
        seen |= {path.name for path in (directory / "checkpoints").glob(".tmp-*")}


def exit_status(child: int, limit_s: float = RUN_S) -> int:
    """Wait for the child; return its exit status, negative if a signal ended it."""
    limit = time.monotonic() + limit_s
    while not ended(child):
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"the child did not end in {limit_s:g} s")
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(directory: Path, child: int, number: signal.Signals, dice: random.Random, tally: Tally) -> bool:
    """Send a signal to a child that trains; return False if it ended otherwise than the signal asks."""
    os.kill(child, number)
    tally.in_a_save += any((directory / "checkpoints").glob(".tmp-*"))
    if number != signal.SIGKILL and dice.random() < 0.3:  # the scheduler has no patience
        time.sleep(dice.uniform(0, 0.05))
        if not ended(child):
            os.kill(child, signal.SIGKILL)
    status = exit_status(child)
    if status == 0:  # it was done before the signal came
        return True
    tally.kills[number.name] += 1
    if status not in (128 + number, -number, -signal.SIGKILL):
        tally.faults.append(f"{number.name}: status {status}\n  {_last_lines(directory)}")
        tally.failed += 1
        return False
    _, skipped = Store(directory / "checkpoints").latest()
    tally.unreadable += sum("middle of a step" not in reason for reason in skipped)
    tally.faults += skipped
    return True


def one_run(job: Job, folder: Path, signals: list[str], dice: random.Random, tally: Tally, left: int) -> None:
    """Train once whole; train again, killed several times with one of `signals` each; compare."""
    whole, directory = folder / "whole", folder / "killed"
    child = start(job, whole)
    wait_until_training(job, whole, child)
    begin = time.monotonic()
    if exit_status(child) != 0:
        raise RuntimeError(f"{job} cannot be trained:\n  {_last_lines(whole)}")
    run_s = time.monotonic() - begin
    tally.runs += 1
    tally.loaders[job.data] += 1
    child = start(job, directory)
    for _ in range(min(left, dice.randint(2, 6))):
        if not wait_until_training(job, directory, child):
            break
        if dice.random() < 0.5:
            wait_for_save(directory, dice.randint(1, 4), child)
        else:
            time.sleep(dice.uniform(0, 0.7 * run_s))
        if ended(child):
            break
        if not kill(directory, child, signal.Signals[dice.choice(signals)], dice, tally):
            return
        child = start(job, directory)
    status = exit_status(child)
    if status != 0:
        tally.failed += 1
        tally.faults.append(f"{job}: status {status}\n  {_last_lines(directory)}")
        return
    found = difference(whole, directory)
    tally.exact += found is None
    tally.faults += [] if found is None else [f"{job}: {found}"]


def difference(whole: Path, killed: Path) -> str | None:
    """Return the first difference of two runs that ended; None if there is none."""
    for name, read in (("checkpoint", _last_checkpoint), ("metrics.jsonl", _records)):
        if found := first_difference(read(whole), read(killed), name):
            return found
    if (killed / "final").exists():
        return first_difference(torch.load(whole / "final"), torch.load(killed / "final"), "final weights")
    return None


def _last_checkpoint(directory: Path) -> dict[str, Any]:
    store = Store(directory / "checkpoints")
    newest, _ = store.latest()
    assert newest is not None, f"{directory} ended with a checkpoint"
    loaded = store.read(newest)
    state = {name: part for name, part in loaded.state.items() if name not in NOT_COMPARED}
    best = state["callbacks"].pop("Checkpoint", {})  # where it lies may have another number
    state["rows"].pop("times")
    state["history"] = _without_clocks(state["history"])
    if not state["progress"]["batch_in_epoch"]:
        for one in (state, *state.get("ranks", ())):
            one.pop("loader")  # the next epoch does not start from it; a run that had only its end left did not open the loader
    values = {name: entry["best"] for name, entry in best.get("best", {}).items()}
    return {"model": loaded.model, "state": state, "best": values}


def _records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [_without_clocks(json.loads(line)) for line in lines]


def _without_clocks(values: dict[str, Any]) -> dict[str, Any]:
    clocks = ("time", "time/*", "*_per_s")
    return {name: value for name, value in values.items() if not any(fnmatch.fnmatch(name, clock) for clock in clocks)}


def _last_lines(directory: Path) -> str:
    return "\n  ".join(directory.with_suffix(".log").read_text().splitlines()[-30:])


def main() -> int:
    """Kill, compare, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--job", type=int, help="only the job with this number, again and again")
    parser.add_argument("--keep", type=Path, help="a folder to which the directories of faults are copied")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dice, tally = random.Random(arguments.seed), Tally()
    with tempfile.TemporaryDirectory() as place:
        while (left := arguments.kills - tally.kills.total()) > 0:
            number = arguments.job if arguments.job is not None else dice.randrange(10**6)
            folder = Path(place, str(tally.runs))
            folder.mkdir()
            before = len(tally.faults)
            one_run(Job.draw(number), folder, arguments.signals, dice, tally, left)
            for fault in tally.faults[before:]:
                print("FAULT:", fault, flush=True)
            if arguments.keep is not None and len(tally.faults) > before:
                shutil.copytree(folder, arguments.keep / f"job-{number}-{tally.runs}")
            shutil.rmtree(folder, ignore_errors=True)
    signals = ", ".join(f"{count} {name}" for name, count in sorted(tally.kills.items()))
    print(f"kills after training began: {tally.kills.total()} ({signals}), {tally.in_a_save} of them inside a save")
    print(f"jobs: {tally.runs} ({', '.join(f'{count} {name}' for name, count in sorted(tally.loaders.items()))})")
    print(f"equal: {tally.exact}, unequal or not ended: {tally.runs - tally.exact}")
    print(f"newest checkpoint unreadable: {tally.unreadable}, failed to continue: {tally.failed}")
    return 0 if tally.exact == tally.runs and not tally.unreadable and not tally.failed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kill trainings at random instants, start them again, and compare each with the same training left alone.

    python benchmarks/kill.py [--jobs mixed] [--kills 500] [--seed 0]

The trainings are drawn at random; `kill_jobs.py` (mixed) and `kill_features.py` (features) say from what. The signals are
SIGKILL, SIGTERM and SIGINT, mixed. A quarter of the kills come at a random time of the training, a quarter while a checkpoint
is being written, and half at an instant of `kill_instants.py`: an operation on the files of the run at its start, in its
steps, in a prune or at its end, or inside a hook. Compared are the last checkpoint (weights, optimizers, schedules, averages,
RNG states, history), ``metrics.jsonl``, and the weights with which the process ended; after SIGKILL alone also the steps of
the checkpoints that were kept. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
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
from typing import Any, Protocol

import torch
from kill_instants import Instant, began_of, watch

from cadenza import Run
from cadenza.checkpoint.catalogue import Catalogue, first_usable
from cadenza.checkpoint.store import Entry, Store
from cadenza.status.encoding import first_difference

JOBS = {"mixed": ("kill_jobs", "Job"), "features": ("kill_features", "FeatureJob")}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
STARTUP_S, RUN_S = 60.0, 120.0
NOT_COMPARED = ("offsets", "environment")  # decisions say when the run was continued; threads are those of the process


class Job(Protocol):
    """A training."""

    @property
    def kind(self) -> str:
        """Its kind, which is counted."""

    def fit(self, directory: Path) -> Run:
        """Train, or continue the training, in this process."""


@dataclass
class Tally:
    """The results."""

    kills: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    exact: int = 0
    unreadable: int = 0
    failed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def start(job: Job, directory: Path, instant: Instant | None = None) -> int:
    """Start the training in a child, which is killed at the instant; return its process id."""
    began_of(directory).unlink(missing_ok=True)
    if child := os.fork():
        return child
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    with directory.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        watching = watch(directory, instant)
        run = job.fit(directory)
        watching.write(watching.counts)
        if run.progress.step > run.progress.origin.step:  # otherwise the run was complete, and there is nothing to do
            torch.save(dict(run.model.state_dict()), directory / "final.new")
            (directory / "final.new").replace(directory / "final")
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except KeyboardInterrupt:  # the run was already complete: the final comparison shows whether anything was lost
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


def kill(directory: Path, child: int, number: signal.Signals, dice: random.Random) -> None:
    """Send a signal to a child that trains, and in a third of the cases SIGKILL after it."""
    os.kill(child, number)
    if number != signal.SIGKILL and dice.random() < 0.3:  # like a scheduler after its grace period
        time.sleep(dice.uniform(0, 0.05))
        if not ended(child):
            os.kill(child, signal.SIGKILL)


def killed(job: Job, directory: Path, number: signal.Signals, run_s: float, dice: random.Random) -> tuple[int, str]:
    """Start the training, and kill it; return its exit status, and where it was killed."""
    place = dice.choice(("time", "save", "instant", "instant"))
    if place == "instant":
        instant = Instant.draw(directory, number, dice)
        return exit_status(start(job, directory, instant)), instant.place
    child = start(job, directory)
    if wait_until_training(job, directory, child):
        if place == "save":
            wait_for_save(directory, dice.randint(1, 4), child)
        else:
            time.sleep(dice.uniform(0, 0.4 * run_s))
        kill(directory, child, number, dice)
    return exit_status(child), place


def one_run(job: Job, folder: Path, signals: list[str], dice: random.Random, tally: Tally, left: int) -> None:
    """Train once whole; train again, killed several times with one of `signals` each; compare."""
    whole, directory = folder / "whole", folder / "killed"
    child = start(job, whole)
    wait_until_training(job, whole, child)
    begin = time.monotonic()
    if exit_status(child) != 0:
        raise RuntimeError(f"{job} cannot be trained:\n  {_last_lines(whole)}")
    run_s = time.monotonic() - begin
    shutil.copy(whole.with_suffix(".counts"), directory.with_suffix(".counts"))
    tally.runs += 1
    tally.kinds[job.kind] += 1
    sent = set[str]()
    for _ in range(min(left, dice.randint(4, 12))):
        number = signal.Signals[dice.choice(signals)]
        status, place = killed(job, directory, number, run_s, dice)
        if status == 0:  # it was complete before the signal arrived
            break
        tally.kills[number.name] += 1
        tally.places[place] += 1
        sent.add(number.name)
        if status not in (128 + number, -number, -signal.SIGKILL):
            tally.failed += 1
            tally.faults.append(f"{job}: {number.name} at {place}: status {status}\n  {_last_lines(directory)}")
            return
        _, skipped = _newest(directory)
        skipped = [reason for reason in skipped if "middle of a step" not in reason]
        tally.unreadable += len(skipped)
        tally.faults += skipped
    status = exit_status(start(job, directory))
    if status != 0:
        tally.failed += 1
        tally.faults.append(f"{job}: status {status}\n  {_last_lines(directory)}")
        return
    found = difference(whole, directory, names=sent == {"SIGKILL"})
    tally.exact += found is None
    tally.faults += [] if found is None else [f"{job}: {found}"]


def difference(whole: Path, killed: Path, *, names: bool = False) -> str | None:
    """Return the first difference of two runs that ended, with `names` also in the steps kept; None if there is none."""
    kept = (("steps kept", _steps_kept),) if names else ()
    parts = (("checkpoint", _last_checkpoint), ("metrics.jsonl", _records), ("outcome", _outcome), *kept)
    for name, read in parts:
        if found := first_difference(read(whole), read(killed), name):
            return found
    if (killed / "final").exists():
        return first_difference(torch.load(whole / "final"), torch.load(killed / "final"), "final weights")
    return None


def _newest(directory: Path) -> tuple[Entry | None, list[str]]:
    """Return the newest checkpoint at which the run can continue, and why newer ones were skipped."""
    return first_usable(Catalogue([Store(directory / "checkpoints")]).line(), Entry.problem)


def _last_checkpoint(directory: Path) -> dict[str, Any]:
    newest, _ = _newest(directory)
    if newest is None:  # stopped before the first one
        return {}
    loaded = newest.store.read(newest.saved)
    state = {name: part for name, part in loaded.state.items() if name not in NOT_COMPARED}
    saves = [state["callbacks"].pop(name) for name in sorted(state["callbacks"]) if name.startswith("Checkpoint")]
    state["callbacks"].get("Recover", {}).pop("plan", None)  # it may have rolled back to a checkpoint written by a signal
    state["rows"].pop("times")
    state["history"] = _without_clocks(state["history"])
    if not state["progress"]["batch_in_epoch"]:
        for rank_state in (state, *state.get("ranks", ())):
            # the next epoch does not start from it; a run that had only its end left did not open the loader
            rank_state.pop("loader")
    # Where the best checkpoint lies may have another number.
    values = [{name: entry["best"] for name, entry in save.get("best", {}).items()} for save in saves]
    return {"model": loaded.model, "state": state, "best": values}


def _outcome(directory: Path) -> str:
    kind: str = json.loads((directory / "run.json").read_text())["outcome"]["kind"]
    return kind


def _steps_kept(directory: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in Store(directory / "checkpoints").saved())


def _records(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []  # a run may stop before its first record
    return [_without_clocks(json.loads(line)) for line in lines]


def _without_clocks(values: dict[str, Any]) -> dict[str, Any]:
    clocks = ("time", "time/*", "*_per_s")
    return {name: value for name, value in values.items() if not any(fnmatch.fnmatch(name, clock) for clock in clocks)}


def _last_lines(directory: Path) -> str:
    return "\n  ".join(directory.with_suffix(".log").read_text().splitlines()[-30:])


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))


def main() -> int:
    """Kill, compare, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", choices=JOBS, default="mixed")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--job", type=int, help="only the job with this number, again and again")
    parser.add_argument("--keep", type=Path, help="a folder to which the directories of faults are copied")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    module, name = JOBS[arguments.jobs]
    draw = getattr(importlib.import_module(module), name).draw
    dice, tally = random.Random(arguments.seed), Tally()
    with tempfile.TemporaryDirectory() as place:
        while (left := arguments.kills - tally.kills.total()) > 0:
            number = arguments.job if arguments.job is not None else dice.randrange(10**6)
            folder = Path(place, str(tally.runs))
            folder.mkdir()
            before = len(tally.faults)
            one_run(draw(number), folder, arguments.signals, dice, tally, left)
            for fault in tally.faults[before:]:
                print("FAULT:", fault, flush=True)
            if arguments.keep is not None and len(tally.faults) > before:
                shutil.copytree(folder, arguments.keep / f"job-{number}-{tally.runs}")
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{tally.kills.total()} kills in {tally.runs} jobs, {tally.exact} equal", file=sys.stderr, flush=True)
    print(f"kills: {tally.kills.total()} ({_listed(tally.kills)}); at: {_listed(tally.places)}")
    print(f"jobs: {tally.runs} ({_listed(tally.kinds)})")
    print(f"equal: {tally.exact}, unequal or not ended: {tally.runs - tally.exact}")
    print(f"newest checkpoint unreadable: {tally.unreadable}, failed to continue: {tally.failed}")
    return 0 if tally.exact == tally.runs and not tally.unreadable and not tally.failed else 1


if __name__ == "__main__":
    sys.exit(main())

"""A framework and the hand-written loop in one process: ``benchmarks/peers.py`` starts it, once for each row.

Everything here is CPU time. The two take turns of 20 steps, so that other load of the machine affects both.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN = time.process_time()

import torch  # noqa: E402  # its import is what the others' are measured beside

TORCH_S = time.process_time() - BEGIN

from peers.job import WORKLOADS, Job, Peer, Workload  # noqa: E402
from peers.rows import HAND, HAND_FUSED, ROWS  # noqa: E402
from peers.turns import Turns  # noqa: E402

Cell = dict[str, Any]


def main() -> None:
    """Execute a request of ``peers.py``, a JSON object in the first argument; answer with lines of JSON in a file."""
    order = json.loads(sys.argv[1])
    row, answers = order["row"], Path(order["answers"])
    torch.set_num_threads(1)
    if "workloads" not in order:
        answer(answers, probe(row))
        return
    without = peer_of(row).without
    for key in order["workloads"]:
        if key not in without:
            cell = measured(row, WORKLOADS[key], order["rounds"], order["steps"])
            answer(answers, {"row": row, "workload": key, **facts(row), **cell})


def answer(file: Path, cell: Cell) -> None:
    """Add a line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(cell) + "\n")


def peer_of(row: str) -> Peer:
    """Import a framework."""
    module = "peers.with_hands" if row == HAND else ROWS[row].module
    peer: Peer = importlib.import_module(module).PEERS[row]
    return peer


def facts(row: str) -> Cell:
    """Return the versions."""
    installed = {"version": version(ROWS[row].package), "torch": torch.__version__, "python": platform.python_version()}
    return {**installed, "at": time.strftime("%Y-%m-%d %H:%M")}


def measured(row: str, workload: Workload, rounds: int, steps: int) -> Cell:
    """Return the figures of one cell: medians over the turns of all rounds, the first round left out as it warms up."""
    hand, peer = peer_of(HAND), peer_of(row)
    pairs: list[tuple[float, float]] = []
    starts: list[tuple[float, float]] = []
    furthest, reference = 0.0, torch.empty(())
    for number in range(rounds + 1):
        ours, base = both(peer, hand, workload, steps)
        if not (number or workload.typical or close(base.final, ours.final)):
            reference = alone(peer_of(HAND_FUSED), workload, steps).final  # the framework may have built the optimizer fused
        elif not number:
            reference = base.final
        furthest = max(furthest, distance(reference, ours.final))
        if not (workload.typical or close(reference, ours.final)):
            return {"refused": f"it ends elsewhere than the loop by hand: {furthest:.1e} apart"}
        if number:
            pairs += zip(ours.turns, base.turns, strict=True)
            starts.append((ours.start_s, base.start_s))
    return {
        "ratio": statistics.median(peer / other for peer, other in pairs),
        "more_us": statistics.median(peer - other for peer, other in pairs) * 1e6,
        "hand_us": statistics.median(other for _, other in pairs) * 1e6,
        "start_ms": statistics.median(start for start, _ in starts) * 1e3,
        "hand_start_ms": statistics.median(other for _, other in starts) * 1e3,
        "apart": None if workload.typical else furthest,
        "rounds": rounds,
        "steps": workload.count(steps),
    }


class Result:
    """Of one run: how it ended, the seconds from the call to the first forward pass, and those of one pass in each turn."""

    def __init__(self, job: Job, workload: Workload, steps: int, begin: float, end: float, returned: float | None) -> None:
        count, clock = workload.count(steps), job.model.clock
        if clock.passes < count:
            raise RuntimeError(f"there were {clock.passes} forward passes; expected {count}")
        self.start_s = clock.first_s - begin
        if workload.evaluates:  # work deferred to its end belongs to it
            self.turns = [(end - clock.first_s) / count]
            self.final = torch.tensor([returned])
        else:
            turns = list(zip(clock.at[1:], clock.begun, strict=False))  # the first turn begins before the first step
            self.turns = [(later - earlier) / workload.turn for later, earlier in turns]
            self.final = torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()])


def both(peer: Peer, hand: Peer, workload: Workload, steps: int) -> tuple[Result, Result]:
    """Run a framework and the hand-written loop in turns."""
    turns = Turns()
    with folder() as place, tempfile.TemporaryDirectory() as other:
        jobs = workload.job(steps, place), workload.job(steps, Path(other))
        jobs[0].model.clock.now, jobs[0].model.clock.turn_over = turns.here_s, turns.pass_from_here
        jobs[1].model.clock.now, jobs[1].model.clock.turn_over = time.thread_time, turns.pass_from_hand
        gc.collect()
        return turns.run(
            lambda: once(peer, jobs[0], workload, steps, turns.here_s),
            lambda: once(hand, jobs[1], workload, steps, time.thread_time),
        )


def alone(peer: Peer, workload: Workload, steps: int) -> Result:
    """Run one loop without the other."""
    with folder() as place:
        return once(peer, workload.job(steps, place), workload, steps, time.process_time)


def once(peer: Peer, job: Job, workload: Workload, steps: int, now: Callable[[], float]) -> Result:
    """Run once."""
    begin = now()
    returned = peer.evaluate(job) if workload.evaluates else peer.train(job)
    return Result(job, workload, steps, begin, now(), returned)


@contextmanager
def folder() -> Iterator[Path]:
    """Enter an empty folder: some frameworks write where they stand."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        os.chdir(place)
        try:
            yield Path(place)
        finally:
            os.chdir(before)


def distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two results; 0 if bit-identical."""
    return float((tensor - other).abs().max())


def close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results are equal up to rounding."""
    return bool(torch.allclose(tensor, other, rtol=1e-5, atol=1e-6))


def probe(row: str) -> Cell:
    """Return the time of the import and of a first short run in a fresh process."""
    gc.collect()  # a collection is nearly due after importing torch, and would be charged to the next import
    at_first, begin = memory_mib(), time.process_time()
    peer = peer_of(row)
    import_s, imported = time.process_time() - begin, memory_mib()
    alone(peer, WORKLOADS["sgd"], 50)
    return {
        "torch_ms": TORCH_S * 1e3,
        "import_ms": import_s * 1e3,
        "torch_mib": at_first,
        "import_mib": imported - at_first,
        "run_mib": memory_mib(),
    }


def memory_mib() -> float:
    """Return the memory in use, or the peak if the system does not report it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)


if __name__ == "__main__":
    main()

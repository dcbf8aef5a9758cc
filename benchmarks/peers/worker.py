"""One framework beside the loop by hand, in one process: ``benchmarks/peers.py`` starts it, once for each row.

Everything here is CPU time. Runs take turns, A B A B, so that whatever else the machine does falls on both.
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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN = time.process_time()

import torch  # noqa: E402  # its import is what the others' are measured beside

TORCH_S = time.process_time() - BEGIN

from peers.job import WORKLOADS, Job, Peer, Workload  # noqa: E402
from peers.rows import HAND, ROWS  # noqa: E402

Cell = dict[str, Any]


def main() -> None:
    """Do what ``peers.py`` asks for: a JSON object in the first argument; answer with lines of JSON in a file."""
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
    """Return what ran."""
    installed = {"version": version(ROWS[row].package), "torch": torch.__version__, "python": platform.python_version()}
    return {**installed, "at": time.strftime("%Y-%m-%d %H:%M")}


def measured(row: str, workload: Workload, rounds: int, steps: int) -> Cell:
    """Return the figures of one cell: medians over the rounds, the first left out as it warms up."""
    hand, peer = peer_of(HAND), peer_of(row)
    times: dict[str, list[Times]] = {"hand": [], "peer": []}
    furthest = 0.0
    for number in range(rounds + 1):
        by_hand, base = once(hand, workload, steps)
        by_peer, other = once(peer, workload, steps)
        furthest = max(furthest, distance(by_hand, by_peer))
        if not close(by_hand, by_peer):
            return {"refused": f"it ends elsewhere than the loop by hand: {furthest:.1e} apart"}
        if number:
            times["hand"].append(base)
            times["peer"].append(other)
    pairs = list(zip(times["peer"], times["hand"], strict=True))
    return {
        "ratio": statistics.median(one.step_s / other.step_s for one, other in pairs),
        "more_us": statistics.median(one.step_s - other.step_s for one, other in pairs) * 1e6,
        "hand_us": statistics.median(one.step_s for one in times["hand"]) * 1e6,
        "start_ms": statistics.median(one.start_s for one in times["peer"]) * 1e3,
        "hand_start_ms": statistics.median(one.start_s for one in times["hand"]) * 1e3,
        "apart": furthest,
        "rounds": rounds,
        "steps": workload.window(steps)[0],
    }


class Times:
    """Of one run: seconds from the call to the first forward pass, and of one step."""

    def __init__(self, job: Job, workload: Workload, steps: int, begin: float, end: float) -> None:
        count, first, last = workload.window(steps)
        at = job.model.clock.at
        if len(at) < 3:
            raise RuntimeError(f"there were {job.model.clock.passes} forward passes; expected {count}")
        self.start_s = at[1] - begin
        # What an evaluation leaves for its end belongs to it.
        self.step_s = (end - at[1]) / count if workload.evaluates else (at[last] - at[first]) / (last - first)


def once(peer: Peer, workload: Workload, steps: int) -> tuple[torch.Tensor, Times]:
    """Do one run; return what it ends with - weights, or a loss - and its times."""
    with folder() as place:
        job = workload.job(steps, place)
        gc.collect()
        begin = time.process_time()
        result = peer.evaluate(job) if workload.evaluates else peer.train(job)
        end = time.process_time()
    final = [torch.tensor([result])] if workload.evaluates else [p.detach().flatten() for p in job.model.parameters()]
    return torch.cat(final), Times(job, workload, steps, begin, end)


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


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far apart two ends are at most; 0 says that they are equal to the bit."""
    return float((one - other).abs().max())


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two ends are the same but for the rounding of a fused optimizer, which was seen to be 5e-8."""
    return bool(torch.allclose(one, other, rtol=1e-5, atol=1e-6))


def probe(row: str) -> Cell:
    """Return what importing and a first short run take, in a process that has done nothing else."""
    gc.collect()  # one is nearly due when torch is imported, and would fall to whoever imports a little more
    at_first, begin = memory_mib(), time.process_time()
    peer = peer_of(row)
    import_s, imported = time.process_time() - begin, memory_mib()
    once(peer, WORKLOADS["sgd"], steps=50)
    return {
        "torch_ms": TORCH_S * 1e3,
        "import_ms": import_s * 1e3,
        "torch_mib": at_first,
        "import_mib": imported - at_first,
        "run_mib": memory_mib(),
    }


def memory_mib() -> float:
    """Return the memory in use; where the system does not say, the most that was."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)


if __name__ == "__main__":
    main()

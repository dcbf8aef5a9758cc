"""Cost of Cadenza and others on multiple ranks relative to hand-written DDP: ratios of wall time in one interleaved run.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py [--ranks 2] [--rounds 11] [--sizes tiny middle] [--only NAME ...]

Each round runs the same training in each way, in the same processes, on the same batches; the order changes from round to
round. A step is timed from one forward pass to another, from the 51st to the last: in wall time, and in CPU time of the process
with all its threads. "End" is the time from the last forward
pass until the training returns, with its last step and, for the usual job, the checkpoint. The ratios are medians over the
rounds, of two times in the same round. "By hand, again" repeats the hand-written loop, which shows the noise of the machine.
All ways must end with the same weights. `distributed_ways.py` defines the two jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from distributed_ways import EVERY, PACKAGES, PLAIN, USUAL, Job, Mlp, Way

from cadenza.drivers import DdpDriver
from cadenza.testing import launch

SIZES = {"tiny": ((32, 64, 10), 16, 8 * EVERY), "middle": ((784, 512, 512, 10), 96, 4 * EVERY)}
"""The widths of the model, the samples in a batch, and the steps."""
DISTINCT = 50
HAND = "by hand"


class Times(NamedTuple):
    """The times of one training."""

    step_s: float
    cpu_s: float
    end_s: float


def ways() -> dict[tuple[str, str], Way]:
    """Return all ways, by job and name, that are installed."""
    missing = {name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    jobs = {"plain": PLAIN, "usual": USUAL}
    return {(job, name): way for job, known in jobs.items() for name, way in known.items() if name not in missing}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context that discards the output of the packages."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
        logging.disable(logging.NOTSET)


def measured(
    names: Sequence[tuple[str, str]], size: str, rounds: int, steps: int, place: Path
) -> dict[tuple[str, str], list[Times]]:
    """Return the times of each way in each round, on this rank.

    Raises:
        RuntimeError: A way ended with other weights than the loop by hand.
    """
    torch.set_num_threads(1)
    driver, known = DdpDriver("cpu"), ways()
    widths, count, _ = SIZES[size]
    torch.manual_seed(1)
    distinct = [(torch.randn(count, widths[0]), torch.randint(widths[-1], (count,))) for _ in range(DISTINCT)]
    batches = [distinct[index % DISTINCT] for index in range((steps + 1) * driver.world_size)]
    times: dict[tuple[str, str], list[Times]] = {name: [] for name in names}
    weights: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            folder = place / f"{number}-{'-'.join(name)}".replace(" ", "-")
            folder.mkdir(exist_ok=True)
            model, own = Mlp(*widths), batches[driver.rank :: driver.world_size]
            job = Job(model, own, batches, driver, folder, usual=name[0] == "usual")
            gc.collect()
            driver.barrier()
            with quiet():
                known[name](job)
            ended = time.perf_counter()
            end = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            if not torch.allclose(end, weights.setdefault(name[0], end), atol=1e-5):
                raise RuntimeError(f"{name} ended with other weights, in round {number} on rank {driver.rank}")
            first = min(EVERY, len(model.at) // 2)
            if number:  # the first is to warm up
                step, cpu = ((times[-1] - times[first]) / (len(times) - 1 - first) for times in (model.at, model.cpu_at))
                times[name].append(Times(step, cpu, ended - model.at[-1]))
            driver.barrier()
            shutil.rmtree(folder, ignore_errors=True)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios, round by round."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def rows(times: dict[tuple[str, str], list[Times]], size: str) -> Iterator[str]:
    """Return the lines of the table."""
    for (job, name), taken in times.items():
        step, cpu, end = zip(*taken, strict=True)
        hand_step, hand_cpu, _ = zip(*times[job, HAND], strict=True)
        shown = f"{statistics.median(step) * 1e3:.2f} | {ratio(step, hand_step):.3f} | {ratio(cpu, hand_cpu):.3f}"
        yield f"| {size} | {job} | {name} | {shown} | {statistics.median(end) * 1e3:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, help="in each training, in place of 400 tiny or 200 larger ones")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--jobs", nargs="+", choices=("plain", "usual"), default=["plain", "usual"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ways, beside the loop by hand")
    given = parser.parse_args()
    known = ways()
    for name, package in PACKAGES.items():
        if ("plain", name) not in known:
            print(f"{name} is left out, because {package} is not installed.")
        elif given.only is None or name in given.only:
            importlib.import_module(package)  # once, before the processes fork
    chosen = [(job, name) for job, name in known if job in given.jobs and (not given.only or name in (HAND, *given.only))]
    print("| step | job | way | ms per step | ratio | ratio of CPU time | end, ms |\n|---|---|---|---:|---:|---:|---:|")
    for size in given.sizes:
        steps = given.steps or SIZES[size][2]
        with tempfile.TemporaryDirectory() as place:

            def work(size: str = size, steps: int = steps, place: str = place) -> dict[tuple[str, str], list[Times]]:
                return measured(chosen, size, given.rounds, steps, Path(place))

            times = launch(work, ranks=given.ranks, timeout_s=1800)[0]
        print("\n".join(rows(times, size)), flush=True)
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()

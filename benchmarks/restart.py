"""Kill one of two processes with -9 under ``torchrun --max-restarts``, and compare the weights with an uninterrupted job.

    python benchmarks/restart.py [--jobs 20] [--seed 0]

Each job is started once and recovers automatically. It is killed one to three times, in turn while the processes start, at a
random moment of a step, and while a checkpoint is being written; the rank is random. Every fourth job has two agents, as on two
machines; every second one has workers that load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LearningRate, LogTraining
from cadenza.drivers import DdpDriver
from cadenza.status.encoding import first_difference

SAMPLES, STEPS = 96, 40
KINDS = ("start", "step", "save")


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Noisy points: every reading of a sample draws new noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((16,), index / SAMPLES) + 0.1 * torch.rand(16), torch.tensor(index % 3)


# -- one process of a job ------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Train, or go on with the training, and write this rank's final weights; kill this process as planned on the way."""
    note(folder, "start")
    plan = json.loads((folder / "plan.json").read_text())
    left = [kill for kill in plan["kills"] if not marked(folder, kill).exists()]
    kill = left[0] if left and left[0]["rank"] == int(os.environ["RANK"]) else None
    if kill and kill["kind"] == "start":
        threading.Timer(kill["delay_s"], die, (marked(folder, kill),)).start()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 3))
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(Points(), batch_size=4, shuffle=True, num_workers=plan["workers"]),
        supervised(nn.CrossEntropyLoss()),
        max_steps=STEPS,
        accumulate=2,
        seed=7,
        directory=folder / "run",
        driver=DdpDriver("cpu", timeout_s=60),
        progress=False,
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)),
            Ema(0.9),
            Evaluate(DataLoader(Points(), batch_size=16)),
            LogTraining("1 step", throughput=False),
            Checkpoint("2 steps"),
            on(Callback.on_step_end)(lambda run: note(folder, run.progress.step)),
            killer(folder, kill),
        ],
    )
    trainer.fit(resume="auto")
    # The statistics of BatchNorm are those of the main process; the others get them with the next batch.
    final = model.state_dict() if trainer.driver.is_main else dict(model.named_parameters())
    torch.save({name: value.detach() for name, value in final.items()}, folder / f"final-{trainer.driver.rank}")


def marked(folder: Path, kill: dict[str, Any]) -> Path:
    """Return the file that marks a kill as done."""
    return folder / f"killed-{kill['number']}"


def note(folder: Path, what: str | int) -> None:
    """Note the time at which the main process starts, or completes a step."""
    if os.environ["RANK"] == "0":
        with (folder / "times").open("a") as times:
            times.write(json.dumps([what, time.time()]) + "\n")


def die(mark: Path) -> None:
    """Kill this process, once."""
    mark.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def killer(folder: Path, kill: dict[str, Any] | None) -> Any:
    """Return a callback that waits for the step and then the moment of this rank's kill."""
    waiting: list[threading.Thread] = []

    @on(Callback.on_step_start)
    def begin(run: Run) -> None:
        if kill and kill["kind"] != "start" and run.progress.step >= kill["step"] and not waiting:
            waiting.append(threading.Thread(target=wait, args=(kill,), daemon=True))
            waiting[0].start()

    def wait(kill: dict[str, Any]) -> None:
        time.sleep(kill["delay_s"])
        while kill["kind"] == "save" and not any((folder / "run" / "checkpoints").glob(".tmp-*")):
            pass
        die(marked(folder, kill))

    return begin


# -- what a restart costs --------------------------------------------------------------------------------


@dataclass
class Lost:
    """The seconds from a kill until the job is again where it was."""

    restart_s: float
    """Until the new main process runs the script: torchrun notices, ends the other rank, starts both; Python imports torch."""
    resume_s: float
    """From then until the first step is complete: the ranks meet, and read the checkpoint."""
    again_s: float
    """From then until the step of the kill is complete again."""


def lost_in(folder: Path, kills: list[dict[str, Any]]) -> list[Lost]:
    """Return what each kill of a job cost; a kill before the first step, or after the last, is left out."""
    times = [json.loads(line) for line in (folder / "times").read_text().splitlines()]
    lost = []
    for killed in sorted(float(marked(folder, kill).read_text()) for kill in kills):
        reached = max((what for what, at in times if at <= killed and what != "start"), default=0)
        later = iter([(what, at) for what, at in times if at > killed])
        began = next((at for what, at in later if what == "start"), None)
        steps = [(what, at) for what, at in later]
        back = next((at for what, at in steps if what != "start" and what >= reached), None)
        if reached and began is not None and back is not None and steps[0][0] != "start":
            lost.append(Lost(began - killed, steps[0][1] - began, back - steps[0][1]))
    return lost


# -- jobs ----------------------------------------------------------------------------------------------


def run_job(folder: Path, nodes: int, kills: list[dict[str, Any]], workers: int, limit_s: float) -> str | None:
    """Run one job with two ranks; return what went wrong."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"kills": kills, "workers": workers}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    meeting = ["--standalone"] if nodes == 1 else ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", *meeting,
               f"--max-restarts={len(kills)}", __file__, "--train", str(folder)]  # fmt: skip
    with (folder / "log").open("w") as log:
        agents = [subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) for _ in range(nodes)]
        deadline = time.monotonic() + limit_s
        try:
            codes = [agent.wait(max(0.1, deadline - time.monotonic())) for agent in agents]
        except subprocess.TimeoutExpired:
            return f"hung for {limit_s:g} s:\n{tail(folder)}"
        finally:
            for agent in agents:
                if agent.poll() is None:
                    agent.terminate()  # it ends its processes
                    agent.wait()
    return f"ended with {codes}:\n{tail(folder)}" if any(codes) else None


def tail(folder: Path) -> str:
    """Return the end of what a job printed."""
    return "\n".join((folder / "log").read_text().splitlines()[-60:])


def planned(number: int, dice: random.Random) -> list[dict[str, Any]]:
    """Return the kills of a job, one for each of its starts but the last; they come later in the training, one by one."""
    count = (1, 1, 2, 1, 3)[number % 5]
    steps = sorted(dice.sample(range(1, STEPS - 8), count))
    return [
        {
            "number": i,
            "rank": dice.randrange(2),
            "kind": (kind := KINDS[(number + i) % len(KINDS)]),
            "step": steps[i],
            "delay_s": dice.uniform(0, 1.5 if kind == "start" else 0.02),
        }
        for i in range(count)
    ]


def main() -> int:
    """Kill, compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180, help="seconds after which a job counts as hung")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # how torchrun calls this file
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train is not None:
        train(arguments.train)
        return 0
    dice, same, done, times = random.Random(arguments.seed), 0, Counter[str](), []
    lost: list[Lost] = []
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        trouble = run_job(Path(place, "alone"), 1, [], 0, arguments.limit)
        if trouble is not None:
            raise SystemExit(f"the job that is left alone {trouble}")
        alone_s = time.monotonic() - begin
        expected = [torch.load(Path(place, "alone", f"final-{rank}")) for rank in range(2)]
        for number in range(arguments.jobs):
            folder, kills, begin = Path(place, str(number)), planned(number, dice), time.monotonic()
            nodes = 2 if number % 4 == 3 else 1
            trouble = run_job(folder, nodes, kills, number % 2, arguments.limit)
            times.append((time.monotonic() - begin) / (1 + len(kills)))
            happened = [kill for kill in kills if marked(folder, kill).exists()]
            done.update(f"{kill['kind']}, rank {kill['rank']}" for kill in happened)
            for rank in range(2 if trouble is None else 0):
                trouble = trouble or first_difference(expected[rank], torch.load(folder / f"final-{rank}"))
            same += trouble is None
            lost += lost_in(folder, happened)
            told = ", ".join(f"rank {kill['rank']} in a {kill['kind']}" for kill in happened)
            print(f"{number + 1}: {nodes} agents, killed {told or 'never'}: {trouble or 'the same bits'}", flush=True)
    print("\n| jobs | ended in the same bits | kills | seconds a start (left alone; median, most) |\n|---|---|---|---|")
    how = "; ".join(f"{what}: {count}" for what, count in sorted(done.items()))
    print(f"| {arguments.jobs} | {same} | {done.total()} ({how}) "
          f"| {alone_s:.1f}; {statistics.median(times):.1f}, {max(times):.1f} |")  # fmt: skip
    print("\n| seconds lost by a kill | median | most |\n|---|---:|---:|")
    parts = {part.name: [getattr(one, part.name) for one in lost] for part in fields(Lost)}
    for part, taken in {**parts, "in all": [sum(own) for own in zip(*parts.values(), strict=True)]}.items():
        print(f"| {part} | {statistics.median(taken):.1f} | {max(taken):.1f} |")
    return int(same < arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())

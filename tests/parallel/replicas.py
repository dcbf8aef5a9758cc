"""A job of replica groups: each a torchrun with its own agent, which starts its processes again after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, Evaluate
from cadenza.engine.session import session_of
from cadenza.parallel import ReplicaGroups
from tests.forked import Forked, start
from tests.waiting import until

SAMPLES = 120


class Recorded(Callback):
    """Appends what a group does to its file: the samples of each step before the vote, and then whether it was updated."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name_of_group = folder, name
        self.seen: list[int] = []

    def write(self, **facts: Any) -> None:
        with (self.folder / f"{self.name_of_group}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def on_fit_start(self, run: Run) -> None:
        (self.folder / f"{self.name_of_group}.pid").write_text(str(os.getpid()))
        self.write(began=os.getpid())

    def on_epoch_start(self, run: Run) -> None:
        if (last := self.folder / "last epoch").exists():
            run.progress.limit_epochs(int(last.read_text()))

    def on_before_backward(self, run: Run, outputs: Any) -> None:
        mark = self.folder / f"kill {self.name_of_group}"
        if mark.exists():  # its gradients are missing, and the others wait for them
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
        self.write(step=run.progress.step + 1, epoch=run.progress.epoch, samples=batch[1].flatten().int().tolist())

    def on_step_end(self, run: Run) -> None:
        self.write(step=run.progress.step, updated=session_of(run).step.updated)

    def on_eval_end(self, run: Run, evaluation: Any) -> None:
        self.write(step=run.progress.step, evaluated=float(evaluation.results["eval/loss"]))

    def on_exception(self, run: Run, error: BaseException) -> None:
        if run.driver.world_size == 1:  # else it may be that of a killed process of its group
            (self.folder / "failed").write_text(f"{self.name_of_group}: {error!r}")

    def on_fit_end(self, run: Run) -> None:
        weights = {name: tensor.flatten().tolist() for name, tensor in run.model.state_dict().items()}
        lost = [decision.data["step"] for decision in run.decisions if decision.what == "step lost"]
        caught = [decision.data["step"] for decision in run.decisions if decision.what == "caught up"]
        self.write(ended=run.progress.step, epoch=run.progress.epoch, weights=weights, lost=lost, caught=caught)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))


def data(*, shuffle: bool) -> DataLoader[Any]:
    numbers = torch.arange(float(SAMPLES)).reshape(-1, 1)
    return DataLoader(TensorDataset(numbers / SAMPLES, numbers), batch_size=4, shuffle=shuffle)


def train(folder: Path, name: str, lighthouse: str, epochs: int, accumulate: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # each start has other weights
    writes = name == "group0"
    rank = os.environ["RANK"]
    recorded = Recorded(folder, name if rank == "0" else f"{name}.rank{rank}")
    averaged = [Ema(0.9), Evaluate(data(shuffle=False), every="10 steps", name="eval"), ClipGradients(1.0)]
    Trainer(
        model(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data(shuffle=True),
        supervised(nn.MSELoss()),
        max_epochs=epochs,
        accumulate=accumulate,
        seed=1,
        device="cpu",
        driver="ddp",
        directory=folder / "run" if writes else None,
        callbacks=[ReplicaGroups(2, lighthouse=lighthouse, timeout_s=10, quorum_timeout_s=120), recorded, *averaged]
        + ([Checkpoint("10 steps", keep_last=2)] if writes else []),
    ).fit(resume="auto" if writes else False)


def agent(folder: Path, name: str, ranks: int, *arguments: Any) -> None:
    """Do what ``torchrun --standalone --nproc-per-node=RANKS --max-restarts=100`` does."""
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=100,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / f"{name}.logs")),
    )
    elastic_launch(config, train)(folder, name, *arguments)


@dataclass
class Job:
    """The groups of a job, and what they have recorded."""

    folder: Path
    lighthouse: str
    groups: dict[str, Forked] = field(default_factory=dict)

    def begin(self, *names: str, ranks: int = 1, epochs: int = 10_000, accumulate: int = 1) -> None:
        for name in names:
            arguments = (self.folder, name, ranks, self.lighthouse, epochs, accumulate)
            self.groups[name] = start(agent, *arguments, output=self.folder / f"{name}.log")

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self, name: str) -> int:
        """Return the last step that a group has completed since its last start; 0 before the first."""
        rows = self.rows(name)
        begun = max((index for index, row in enumerate(rows) if "began" in row), default=len(rows))
        return max((row["step"] for row in rows[begun:] if "updated" in row), default=0)

    def kill(self, name: str) -> None:
        """Kill a process of a group. torchrun starts its processes again."""
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def kill_inside_a_step(self, name: str) -> None:
        """Have a group be killed before its gradients are complete, and wait for it."""
        mark = self.folder / f"kill {name}"
        mark.touch()
        self._until(lambda: not mark.exists())

    def lost(self, name: str) -> int:
        """Return how many steps a group has lost."""
        return sum(row.get("updated") is False for row in self.rows(name))

    def until_all_train(self) -> None:
        """Wait until all groups have completed a step that none had completed before."""
        before = max(self.steps(name) for name in self.groups)
        self._until(lambda: min(self.steps(name) for name in self.groups) > before)

    def _until(self, holds: Callable[[], bool]) -> None:
        failed = self.folder / "failed"
        until(lambda: holds() or failed.exists())
        assert not failed.exists(), failed.read_text()

    def finish(self) -> list[dict[str, Any]]:
        """Have the job end in a few epochs; return what the groups recorded at their end."""
        epoch = max(row["epoch"] for name in self.groups for row in self.rows(name) if "samples" in row)
        partial = self.folder / "last epoch.new"
        partial.write_text(str(epoch + 3))
        partial.rename(self.folder / "last epoch")
        return [self.end_of(name) for name in self.groups]

    def end_of(self, name: str) -> dict[str, Any]:
        """Wait for the end of a group, and return what it has recorded there."""
        group = self.groups[name]
        assert group.ended() == 0, group.said()
        return self.rows(name)[-1]

    def uses(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        """Return, by epoch and sample, in how many updates it was, and how often its loss was computed."""
        everything = [row for path in self.folder.glob("*.jsonl") for row in self.rows(path.stem)]
        updated = {row["step"] for row in everything if row.get("updated")}
        applied: Counter[tuple[int, int]] = Counter()
        computed: Counter[tuple[int, int]] = Counter()
        for row in everything:
            if "samples" in row:
                keys = [(row["epoch"], sample) for sample in row["samples"]]
                computed.update(keys)
                applied.update(keys if row["step"] in updated else [])
        return applied, computed


def resumed_alone(folder: Path) -> dict[str, list[float]]:
    """Return the weights of a plain run that continues the job in one process: it is over."""
    one = Trainer(
        model(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data(shuffle=True),
        supervised(nn.MSELoss()),
        max_epochs=1,
        seed=1,
        device="cpu",
        directory=folder / "run",
        callbacks=[Checkpoint("10 steps", keep_last=2)],
    ).fit(resume="auto")
    return {name: tensor.flatten().tolist() for name, tensor in one.model.state_dict().items()}


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    """Start a lighthouse; at the end, end the groups that are left, and it."""
    with lighthouse() as address:
        made = Job(folder, address)
        try:
            yield made
        finally:
            for group in made.groups.values():
                if group.process.is_alive():
                    os.killpg(group.pid, signal.SIGTERM)
                    group.process.join()


@contextmanager
def lighthouse() -> Iterator[str]:
    """Start a lighthouse, and return its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=5000, quorum_tick_ms=20, heartbeat_timeout_ms=1000)
    try:
        yield server.address()
    finally:
        server.shutdown()

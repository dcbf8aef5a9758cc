"""The cost of each callback in a step of some hundred microseconds, and of the same work by hand.

    OMP_NUM_THREADS=1 python benchmarks/costs.py [--rounds 9] [--steps 1000] [--only Ema] [--write]

The model is an MLP 32-64-10, batches of 16, AdamW, fp32, one thread. The trainings with and without a callback take turns, in
one process. Times are CPU time of the thread that trains, for 50 steps; the first hundred steps of each training are left
out. Other processes only slow a step down, so a cost is the difference of the tenth percentiles. "Again" is a second training
without a callback: smaller costs than its own are noise. ``--write`` puts the table into ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, sinks
from cadenza import callbacks as library

Batch = tuple[Tensor, Tensor]
PAGE = Path(__file__).resolve().parents[1] / "docs/performance.md"
START, END = "<!-- costs -->", "<!-- end of costs -->"
FAR = "1000000 steps"


class NoMean(Callback):
    """Takes the role of the `LogTraining` that a trainer adds, and logs nothing."""

    logs_training = True
    prefix = "none"

    def on_fit_end(self, run: Run) -> None: ...


class ClippedByHand(Callback):
    """Clips with the calls that torch's function makes."""

    def on_fit_start(self, run: Run) -> None:
        self.weights = [*run.model.parameters()]

    @torch.no_grad()
    def on_before_optimizer_step(self, run: Run) -> None:
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(1.0 / (norm + 1e-6), max=1.0))


class AveragedByHand(Callback):
    """Averages with torch's function."""

    def on_fit_start(self, run: Run) -> None:
        self.weights = [*run.model.parameters()]
        self.average = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def on_step_end(self, run: Run) -> None:
        torch._foreach_lerp_(self.average, self.weights, 0.001)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that multiplies the rate in each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))


class Empty(Callback):
    """Listens to the end of each step and does nothing."""

    def on_step_end(self, run: Run) -> None: ...


LISTS: dict[str, Callable[[], list[Callback]]] = {
    "again": list,
    "an empty hook, `on_step_end`": lambda: [Empty()],
    "`LogTraining`, added to each run": lambda: [library.LogTraining("1 epoch")],
    '`LogTraining("1 step")`': lambda: [library.LogTraining("1 step")],
    '`LogTraining("50 steps")`': lambda: [library.LogTraining("50 steps")],
    "`ClipGradients`": lambda: [library.ClipGradients(1.0)],
    "`ClipGradients` by hand": lambda: [ClippedByHand()],
    "`Ema`": lambda: [library.Ema(0.999)],
    "`Ema` by hand": lambda: [AveragedByHand()],
    "`LearningRate`": lambda: [library.LearningRate(cosine)],
    "`Warmup`": lambda: [library.Warmup("100%")],
    "`ScheduleValue`": lambda: [
        library.ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "weight_decay", lambda step: 0.0)
    ],
    "`StopOnNonFinite`": lambda: [library.StopOnNonFinite()],
    "`Derive`": lambda: [library.Derive(largest=lambda run: run.outputs["loss"])],
    "`TimeLimit`": lambda: [library.TimeLimit("100 h")],
    "`Timer`": lambda: [library.Timer()],
    "`Profile`": lambda: [library.Profile(trace=None)],
    '`DeviceStats("50 steps")`': lambda: [library.DeviceStats("50 steps")],
    '`Histograms("50 steps")`': lambda: [library.Histograms("50 steps")],
    "`Console`, a record in each step": lambda: [library.LogTraining("1 step"), sinks.Console()],
    "`JsonLines`, the same": lambda: [library.LogTraining("1 step"), sinks.JsonLines()],
    "`Csv`, the same": lambda: [library.LogTraining("1 step"), sinks.Csv()],
    "`TensorBoard`, the same": lambda: [library.LogTraining("1 step"), sinks.TensorBoard()],
    "`Fingerprint` of each step": lambda: [library.Fingerprint("1 step")],
    "`ReplayCheck` of each 100th step": lambda: [library.ReplayCheck("100 steps")],
    "`Capsule`": lambda: [library.Capsule()],
    '`Checkpoint("50 steps")`': lambda: [library.Checkpoint("50 steps")],
}


def chunks(batches: list[Batch], callbacks: list[Callback]) -> list[float]:
    """Return the seconds of a step in each fifty steps of a training, without the first hundred."""
    marks: list[float] = []
    loss_fn = nn.CrossEntropyLoss()

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        marks.append(time.thread_time())
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    if not any(getattr(callback, "logs_training", False) for callback in callbacks):
        callbacks = [NoMean(), *callbacks]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            model, optimizer, batches, compute_loss, max_epochs=1, callbacks=callbacks, device="cpu", progress=False,
            directory=Path(folder, "run"),
        )  # fmt: skip
        trainer.fit()
    return [(later - earlier) / 50 for earlier, later in itertools.pairwise(marks[101::50])]


def costs(rounds: int, steps: int, only: str) -> tuple[float, dict[str, float]]:
    """Return the microseconds of a step without callbacks, and those that each callback adds."""
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(steps)]
    times: dict[str, list[float]] = {name: [] for name in ("none", *LISTS) if only in name or name in ("none", "again")}
    for _ in range(rounds):
        for name, some in times.items():
            some += chunks(batches, LISTS.get(name, list)())
    fast = {name: sorted(some)[len(some) // 10] * 1e6 for name, some in times.items()}
    base = fast.pop("none")
    return base, {name: time - base for name, time in fast.items()}


def table(base: float, added: dict[str, float]) -> str:
    """Return the costs as a table."""
    rows = [f"| {name} | {round(cost)} | {round(cost / base * 100)} % |" for name, cost in added.items()]
    return "\n".join([f"| a step takes {base:.0f} us | us more | share |", "|---|---:|---:|", *rows])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="only the rows that contain this text")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("cadenza").setLevel(logging.ERROR)
    text = table(*costs(arguments.rounds, arguments.steps, arguments.only))
    print(text)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(re.sub(f"(?s)(?<={START}\n).*(?={END})", lambda _: text + "\n", page), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Cost of a step with ``Trainer(compile=...)``, compared with the same compiled model in a hand-written loop.

    python benchmarks/compiled.py [--rounds 5] [--steps 100] [--only shakespeare vit mlp]

The graph must not break because of the trainer: new breaks are counted in each loop. Both loops use a fused AdamW, take turns
of 20 steps in one process, and must end with bit-identical weights. Times are CPU time on one thread, without the
first round, which compiles. "By hand, again" replaces the trainer with the hand-written loop, which shows the noise of the
measurement.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.job import Clock
from peers.turns import Turns
from torch import Tensor, nn
from torch._dynamo.utils import graph_break_reasons

from cadenza import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from shakespeare import CONTEXT, Writer  # the model of the example

GOAL, TURN = 1.01, 20
MODES: dict[str, bool | str] = {"compile=True": True, '"reduce-overhead"': "reduce-overhead"}

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Loop = Callable[[nn.Module, list[Batch], Loss, bool | str], None]


class Vit(nn.Module):
    """A small vision transformer: (B, 1, 28, 28) to (B, 10)."""

    def __init__(self, width: int = 64, patch: int = 7) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.places = nn.Parameter(torch.zeros((28 // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.layers(patches + self.places).mean(1))
        return logits


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def written(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the next characters, which the model computes."""
    loss: Tensor = model(*batch)
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Loss]] = {
    "shakespeare": (lambda: Writer(65), lambda: (characters(), characters()), written),
    "vit": (Vit, lambda: (torch.randn(32, 1, 28, 28), torch.randint(10, (32,))), classified),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        lambda: (torch.randn(64, 64), torch.randint(10, (64,))),
        classified,
    ),
}


def characters() -> Tensor:
    """Return (4, CONTEXT)."""
    return torch.randint(65, (4, CONTEXT))


def by_hand(model: nn.Module, batches: list[Batch], loss_of: Loss, mode: bool | str) -> None:
    """Train by hand."""
    model.compile(**({} if mode is True else {"mode": mode}))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.train()
    torch.manual_seed(0)
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()


def trained(model: nn.Module, batches: list[Batch], loss_of: Loss, mode: bool | str) -> None:
    """Train with a trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Trainer(model, optimizer, batches, loss_of, max_epochs=1, device="cpu", progress=False, compile=mode)
    torch.manual_seed(0)
    trainer.fit()


def measured(
    name: str, mode: bool | str, rounds: int, steps: int, ours: Loop
) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """Return the seconds of a step in each turn, of a loop and by hand; and how often graphs broke in each.

    Raises:
        RuntimeError: They end with different weights.
    """
    make, batch, loss_of = MODELS[name]
    pairs: list[tuple[float, float]] = []
    breaks = [0, 0]
    for number in range(rounds + 1):
        torch.manual_seed(number)
        batches = [batch() for _ in range(steps)]
        turns, clocks, models = Turns(), (Clock(TURN), Clock(TURN)), list[nn.Module]()
        clocks[0].now, clocks[0].turn_over = turns.here_s, turns.pass_from_here
        clocks[1].now, clocks[1].turn_over = time.thread_time, turns.pass_from_hand
        runs: list[Callable[[], Any]] = []
        for loop, clock in zip((ours, by_hand), clocks, strict=True):
            torch.manual_seed(0)
            models.append(make())
            runs.append(_run_of(loop, models[-1], batches, _ticking(loss_of, clock), mode))
        gc.collect()
        if number:
            turns.run(*runs)
        else:
            for which, (run, clock) in enumerate(zip(runs, clocks, strict=True)):
                clock.turn_over = _nothing
                before = len(graph_break_reasons)
                run()
                breaks[which] = len(graph_break_reasons) - before
        ends = [torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) for model in models]
        if not torch.equal(*ends):
            raise RuntimeError(f"{name}: the trainer ends with other weights than the loop by hand")
        if number:
            taken = ([later - earlier for later, earlier in zip(clock.at[1:], clock.begun, strict=False)] for clock in clocks)
            pairs += [(first / TURN, other / TURN) for first, other in zip(*taken, strict=True)]
    return pairs, (breaks[0], breaks[1])


def _run_of(loop: Loop, model: nn.Module, batches: list[Batch], loss_of: Loss, mode: bool | str) -> Callable[[], None]:
    return lambda: loop(model, batches, loss_of, mode)


def _ticking(loss_of: Loss, clock: Clock) -> Loss:
    """Return `loss_of` with a tick before the forward pass, which the compiled model cannot make."""

    def ticking(model: nn.Module, batch: Batch) -> Tensor:
        clock.tick()
        return loss_of(model, batch)

    return ticking


def _nothing() -> None:
    """Go on."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':30} by hand, us  ratio  by hand, again  goal  breaks  breaks by hand")
    for name in arguments.only:
        for label, mode in MODES.items():
            pairs, breaks = measured(name, mode, arguments.rounds, arguments.steps, trained)
            again, _ = measured(name, mode, arguments.rounds, arguments.steps, by_hand)
            hand = statistics.median(other for _, other in pairs) * 1e6
            print(
                f"{f'{name}, {label}':30} {hand:11.0f} {ratio(pairs):6.3f} {ratio(again):15.3f}  {GOAL:4.2f}  {breaks[0]:6} "
                f"{breaks[1]:15}",
                flush=True,
            )


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median of the ratios."""
    return statistics.median(first / other for first, other in pairs)


if __name__ == "__main__":
    main()

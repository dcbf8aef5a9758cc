"""Cost of a step on a GPU, compared with a hand-written loop: time, waits, kernels, idle time, memory, and stall of a save.

    python benchmarks/gpu.py [--only mlp gpt resnet] [--rounds 5] [--steps 40] [--peak TFLOPS] [--device cuda] [--small]

The ways take turns in one process. The time of a step is wall time over the steps of a turn, with one wait for the device at
each end. A wait is a line at which torch reports that the host waits for the device. Kernels and the idle part come from a
trace of a few steps. The stall is the time of a step with a save beyond the median step. ``--small`` and ``--device cpu`` try
the script without a GPU: columns that only a GPU has are empty.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cadenza import Callback, Trainer, on
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, LearningRate, LogTraining

Batch = tuple[Tensor, Tensor]
Mark = Callable[[], None]


class Block(nn.Module):
    """A block of a decoder: (B, T, width) to (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention(self.before(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.wide(self.after(hidden))
        return output


class Decoder(nn.Module):
    """A GPT of 124 million parameters, by default: (B, T) token numbers to (B, T, tokens) logits."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, tokens: int = 50257, length: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers: Tensor) -> Tensor:
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        logits: Tensor = self.head(self.blocks(self.tokens(numbers) + self.positions(positions)))
        return logits.flatten(0, 1)


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()

        def layer(channels: int, size: int, step: int = 1, come: int = width) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(come, channels, size, step, size // 2, bias=False), nn.BatchNorm2d(channels))

        first, second = layer(width, 1, come=inputs), layer(width, 3, stride)
        self.path = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), layer(4 * width, 1))
        self.short = layer(4 * width, 1, stride, inputs) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.path(images) + self.short(images))


def resnet(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """Return a ResNet, by default with 50 layers: (B, 3, H, W) to (B, 1000)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    come = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(come, width << stage, 2 if stage and not block else 1))
            come = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(come, 1000))


def jobs(*, small: bool) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], str]]:
    """Return for each job its model, a batch and the precision."""
    batch, length, size = (2, 16, 32) if small else (8, 1024, 224)
    decoder = {"width": 32, "layers": 2, "heads": 2, "tokens": 100, "length": 16} if small else {}
    tokens = decoder.get("tokens", 50257)
    images = 2 if small else 64
    return {
        "mlp": (
            lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
            lambda: (torch.randn(16, 32), torch.randint(10, (16,))),
            "fp32",
        ),
        "gpt": (
            lambda: Decoder(**decoder),
            lambda: (torch.randint(tokens, (batch, length)), torch.randint(tokens, (batch, length))),
            "bf16",
        ),
        "resnet": (
            lambda: resnet(8, (1, 1, 1, 1)) if small else resnet(),
            lambda: (torch.randn(images, 3, size, size), torch.randint(1000, (images,))),
            "bf16",
        ),
    }


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1].flatten())


def by_hand(model: nn.Module, batches: list[Batch], precision: str, device: torch.device, mark: Mark) -> None:
    """Train by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for inputs, labels in batches:
        batch = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mark()


def fit(model: nn.Module, batches: list[Batch], precision: str, device: torch.device, **given: Any) -> None:
    """Train for an epoch with a trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    usual: dict[str, Any] = {"max_epochs": 1, "device": device, "precision": precision, "progress": False}
    Trainer(model, optimizer, batches, loss_of, **usual, **given).fit()


def trained(*callbacks: Callback) -> Callable[..., None]:
    """Return a function that trains with a trainer."""

    def train(model: nn.Module, batches: list[Batch], precision: str, device: torch.device, mark: Mark) -> None:
        ends = on(Callback.on_step_end)(lambda run: mark())
        fit(model, batches, precision, device, callbacks=[*callbacks, ends])

    return train


def usual() -> list[Callback]:
    """Return the callbacks of a usual training."""
    schedule = LearningRate(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000))
    return [LogTraining("5 steps"), schedule, ClipGradients(1.0), Ema(0.999)]


def timed(
    way: Callable[..., None], model: nn.Module, batches: list[Batch], precision: str, device: torch.device
) -> list[float]:
    """Return the seconds of each step, without the first five.

    On a GPU only the total is exact, because the host runs ahead.
    """
    marks: list[float] = []

    def mark() -> None:
        if device.type == "cuda" and len(marks) in (4, len(batches) - 1):
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    way(model, batches, precision, device, mark)
    return [later - earlier for earlier, later in pairwise(marks[4:])]


def on_the_device(way: Callable[..., None], run: tuple[Any, ...], device: torch.device) -> tuple[str, str, str]:
    """Return the waits and the kernels of a step, and the idle part of the device, from a trace."""
    if device.type != "cuda":
        return "", "", ""
    model, batches, *rest = run
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way(model, batches, *rest, lambda: None)
    torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(warning.message) for warning in caught)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        began = time.perf_counter()
        way(model, batches, *rest, lambda: None)
        torch.cuda.synchronize()
        passed = time.perf_counter() - began
    kernels = [event for event in trace.events() if event.device_type.name == "CUDA"]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
    return f"{waits / len(batches):.2f}", f"{len(kernels) / len(batches):.0f}", f"{max(0.0, 1 - busy / passed):.2f}"


def stall(model: nn.Module, batches: list[Batch], precision: str, device: torch.device) -> float:
    """Return the milliseconds of a step with a save beyond the median step."""
    with tempfile.TemporaryDirectory() as folder:
        seconds: list[float] = []
        ends = on(Callback.on_step_start)(lambda run: seconds.append(time.perf_counter()))
        save = Checkpoint(f"{len(batches) // 2} steps", keep_last=1)
        fit(model, batches, precision, device, callbacks=[save, ends], directory=Path(folder))
    steps = [later - earlier for earlier, later in pairwise(seconds)]
    return 1000 * (max(steps[len(batches) // 2 - 1 : len(batches) // 2 + 1]) - statistics.median(steps))


def measured(name: str, rounds: int, steps: int, device: torch.device, peak: float | None, *, small: bool) -> list[str]:
    """Return the rows of a job."""
    make, batch, precision = jobs(small=small)[name]
    ways = {"by hand": by_hand, "by hand, again": by_hand, "Cadenza": trained(), "Cadenza, usual callbacks": trained(*usual())}
    torch.manual_seed(0)
    batches = [batch() for _ in range(steps)]
    if device.type == "cuda":
        batches = [(inputs.pin_memory(), labels.pin_memory()) for inputs, labels in batches]
    model = make().to(device)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, (batches[0][0].to(device), batches[0][1].to(device))).backward()
    times: dict[str, list[float]] = {way: [] for way in ways}
    memory = dict.fromkeys(ways, 0.0)
    for number in range(rounds + 1):
        for way, train in ways.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            passed = statistics.mean(timed(train, model, batches, precision, device))
            if number:  # the first round warms up
                times[way].append(passed)
            if device.type == "cuda":
                memory[way] = torch.cuda.max_memory_allocated() / 2**30
    rows = []
    for way, train in ways.items():
        ratio = statistics.median(ours / hand for ours, hand in zip(times[way], times["by hand"], strict=True))
        step = statistics.median(times[way])
        waits, kernels, idle = on_the_device(train, (model, batches[:10], precision, device), device)
        used = "" if peak is None else f"{counter.get_total_flops() / step / peak / 1e12:.3f}"
        gib = f"{memory[way]:.2f}" if memory[way] else ""
        cells = [name, way, f"{1000 * step:.3f}", f"{ratio:.2f}", waits, kernels, idle, gib, used]
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, f"| {name} | stall of a save | {stall(model, batches, precision, device):.1f} | | | | | | |"]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="*", default=["mlp", "gpt", "resnet"], choices=["mlp", "gpt", "resnet"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="at least 12")
    parser.add_argument("--peak", type=float, help="the most TFLOPS of the device in this precision, for the used part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else device}\n")
    print("| job | way | step, ms | ratio | waits a step | kernels a step | idle | peak GiB | MFU |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.only:
        print("\n".join(measured(name, options.rounds, options.steps, device, options.peak, small=options.small)), flush=True)


if __name__ == "__main__":
    main()

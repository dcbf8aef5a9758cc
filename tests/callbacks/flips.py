"""A network and flipped bits, for the tests of `ReplayCheck` and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, supervised
from cadenza.drivers.sharding import local
from tests.callbacks.parts import state_of as state_of

Kind = Literal["gradient", "activation", "buffer", "weight"]
KINDS: Sequence[Kind] = ("gradient", "activation", "buffer", "weight")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


def samples(count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def trainer(callbacks: Sequence[Any], **arguments: Any) -> Trainer:
    """Return a trainer of the network; 5 batches of 8 samples in an epoch."""
    given: dict[str, Any] = {"max_epochs": 2, "driver": "single", "device": "cpu"}
    loader = DataLoader(samples(), batch_size=8 if "driver" not in arguments else 4, shuffle=True)
    model = arguments.pop("model", None) or network()
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=False),
        loader,
        supervised(nn.CrossEntropyLoss()),
        **{**given, "seed": 3, "progress": False, **arguments},
        callbacks=callbacks,
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(numpy.array_equal(bits(one[name]), bits(other[name])) for name in one)


def bits(tensor: Tensor) -> Any:
    """Return the memory of a tensor as bytes. A change in it does not raise the tensor's version, as in faulty memory."""
    return local(tensor).reshape(-1).view(torch.uint8).numpy()


class Flip(Callback):
    """Flip one bit in some steps, of a kind and at a position that a seed draws for each step."""

    def __init__(self, kinds: Sequence[Kind] = KINDS, steps: Sequence[int] | None = None, *, rank: int = 0) -> None:
        self.kinds, self.steps, self.rank = kinds, steps, rank
        self.done: list[tuple[int, Kind, str]] = []
        self._armed = ""

    def on_fit_start(self, run: Run) -> None:
        for name, module in run.model.named_children():
            module.register_forward_hook(lambda _, inputs, output, name=name: self._flip_output(name, output))

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self._act(run, before=True)

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
        self._act(run, before=False)

    def _act(self, run: Run, *, before: bool) -> None:
        step = run.progress.step + 1
        if run.driver.rank != self.rank or (self.steps is not None and step not in self.steps):
            return
        draw = numpy.random.default_rng(step)
        kind = self.kinds[int(draw.integers(len(self.kinds)))]
        if before is not (kind == "activation"):
            return
        if kind == "activation":
            self._armed = str(draw.choice([name for name, _ in run.model.named_children()]))
            self._draw, self._step = draw, step
            return
        tensors = {name: one.detach() for name, one in run.model.named_buffers()}
        if kind != "buffer":
            held = dict(run.model.named_parameters())
            tensors = {name: one.detach() if kind == "weight" or one.grad is None else one.grad for name, one in held.items()}
        name = str(draw.choice(sorted(tensors)))
        flip(tensors[name], draw)
        self.done.append((step, kind, name))

    def _flip_output(self, name: str, output: Tensor) -> None:
        if self._armed == name:
            self._armed = ""
            flip(output.detach(), self._draw)
            self.done.append((self._step, "activation", name))


def flip(tensor: Tensor, draw: numpy.random.Generator) -> None:
    """Flip one bit."""
    memory = bits(tensor)
    memory[draw.integers(len(memory))] ^= 1 << draw.integers(8)

"""What the tests of several processes train, and on which ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.drivers import Driver
from cadenza.engine.training_log import EpochMeans
from tests.distributed.drivers import ddp, single

Batch = tuple[Tensor, ...]


def samples(count: int) -> TensorDataset:
    """Return samples ``(inputs, target, number)``: shapes (3,), (1,), ()."""
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2, torch.arange(count))


def loader(count: int = 24, batch_size: int = 4, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size, shuffle=shuffle, **options)


class Stream:
    """Batches of a loader, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(self.count, shuffle=False))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def judged(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return loss, predictions and targets, for an evaluation."""
    return {"loss": squared_error(model, batch), "predictions": model(batch[0]), "targets": batch[1]}


class InOrder:
    """A metric as one writes it by hand: it depends on the predictions of all ranks, and on their order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen += (predictions - targets).flatten().tolist()

    def compute(self) -> float:
        return sum(value * number for number, value in enumerate(self.seen, 1))


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the loss, and how much a batch counts: so a step is that of one process on all its samples."""
    return {"loss": squared_error(model, batch), "weight": len(batch[0])}


def own_rank() -> int:
    """Return which of the launched processes this is."""
    return int(os.environ["RANK"])


def rank() -> int | None:
    """Return which of the launched processes this is; None outside of `launch`."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


class Partly(nn.Module):
    """Has parameters that are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def driver() -> Driver:
    """Return DDP on the CPU inside of `launch`, and one process outside."""
    return ddp() if "RANK" in os.environ else single()


def trainer(data: Iterable[Any] | None = None, **arguments: Any) -> Trainer:
    arguments.setdefault("compute_loss", squared_error)
    arguments.setdefault("max_epochs", 2)
    model = arguments.pop("model", None)
    made = Trainer(
        network() if model is None else model,
        arguments.pop("optimizer", momentum),
        loader() if data is None else data,
        driver=arguments.pop("driver", None) or driver(),
        seed=arguments.pop("seed", 5),
        **{"progress": False, **arguments},
    )
    made.callbacks = [one for one in made.callbacks if not isinstance(one, EpochMeans)]  # records have what a test logs
    return made


def seeing(numbers: list[int]) -> Callback:
    """Return a callback that adds the numbers of the samples of this rank to a list."""

    def see(run: Run, batch: Batch) -> None:
        numbers.extend(batch[2].tolist())

    return on(Callback.on_batch_start)(see)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which ranks may have parts. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vector(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of tensors as one vector. Every rank must call this."""
    return torch.cat([whole(one).detach().flatten() for one in tensors])


def weights_of(one: Trainer) -> Tensor:
    """Return all weights as one vector. Every rank must call this."""
    return vector(one.model.parameters())


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def refusal(make: Callable[[], object]) -> str:
    """Return what a ValueError says; an empty string if there is none."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""

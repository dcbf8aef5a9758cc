"""The model of the tests of both versions: a line, on numbers that are easy to follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.core import NmTensor
from cadenza.testing import tiny_loader

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.0}


@dataclass
class Line:
    """A line and the tensors of its graph."""

    data: DataLayerNM
    net: TrainableNM
    x: NmTensor
    y: NmTensor
    prediction: NmTensor
    loss: NmTensor

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]


class NetNM(TrainableNM):
    """A module with the input ``x`` and the output ``y_pred``."""

    @property
    def input_ports(self) -> dict[str, None]:
        return {"x": None}

    @property
    def output_ports(self) -> dict[str, None]:
        return {"y_pred": None}


class LineNM(NetNM):
    """``y = wx + b``; starts with w = 0.5, b = 0. It counts its calls in training and in evaluation."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.layer = nn.Linear(1, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, 0.0)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        result: Tensor = self.layer(x)
        return result


def line(batches: int = 5, *, loader: Any = None, net: TrainableNM | None = None) -> Line:
    """Return a graph with this many batches of two samples per epoch."""
    data = DataLayerNM.of(tiny_loader(batches) if loader is None else loader, ["x", "y"])
    net = LineNM() if net is None else net
    x, y = data()
    prediction = net(x=x)
    loss = LossNM.of(nn.functional.mse_loss, ["predictions", "target"])(predictions=prediction, target=y)
    return Line(data, net, x, y, prediction, loss)


def worst_of(graph: Line) -> tuple[NmTensor, list[int]]:
    """Return a tensor that the training does not need, and a list that gets an entry for each computation."""
    computed: list[int] = []

    def worst(prediction: Tensor, target: Tensor) -> Tensor:
        computed.append(1)
        return (prediction - target).abs().max()

    module = NonTrainableNM.of(worst, ["prediction", "target"], ["worst_error"])
    tensor: NmTensor = module(prediction=graph.prediction, target=graph.y)
    return tensor, computed


def spoiled(batches: int, at: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches. The one with this index has a loss of NaN."""
    loader = tiny_loader(batches)
    loader[at] = (loader[at][0], torch.full_like(loader[at][1], float("nan")))
    return loader


def written(folder: str | Path) -> list[tuple[str, int]]:
    """Return tag and step of all entries in the event files of a folder, in the order of writing."""
    files = sorted(Path(folder).glob("events.*"), key=lambda file: file.stat().st_mtime_ns)
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return [(value.tag, event.step) for event in events for value in event.summary.value]


def numbers(folder: str | Path, tag: str) -> list[float]:
    """Return the scalars of a tag."""
    events = [event for file in sorted(Path(folder).glob("events.*")) for event in EventFileLoader(str(file)).Load()]
    return [value.tensor.float_val[0] for event in events for value in event.summary.value if value.tag == tag]


def names_in(folder: str | Path) -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


def steps_of(folder: str | Path, kind: str = "STEP") -> list[int]:
    """Return the numbers in the names of trainer files."""
    found: Sequence[Path] = list(Path(folder).glob(f"trainer-{kind}-*.pt"))
    return sorted(int(file.stem.rpartition("-")[2]) for file in found)


def genuine(folder: Path, mark: str, step: int, epoch: int, epoch_key: str = "epoch", weight: float = 3.0) -> None:
    """Write the files of NeMo itself, in the format of its torch version."""
    folder.mkdir(exist_ok=True)
    net = {"layer.weight": torch.full((1, 1), weight), "layer.bias": torch.ones(1)}
    states = [torch.optim.SGD([torch.ones(1, 1), torch.ones(1)], lr=0.05).state_dict()]
    trainer = {"step": step, epoch_key: epoch, "optimizer_state": states}
    for name, content in (("LineNM", net), ("trainer", trainer)):
        torch.save(content, folder / f"{name}-{mark}.pt", _use_new_zipfile_serialization=False)

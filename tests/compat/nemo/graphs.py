"""The model of the tests of both versions: a line, on numbers that are easy to follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.core import NeuralModuleFactory, NeuralType, NmTensor
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.nemo10.core import NeuralModuleFactory as OldFactory
from cadenza.compat.neural.action import EVENT_OF, ActionCallback
from cadenza.testing import tiny_loader

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.0}
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_X_DISABLE_META": "true",
}

OF_TRAIN = {"batches_per_step", "lr_policy", "reset", "stop_on_nan_loss", "synced_batchnorm"}
"""The arguments of ``nf.train`` that `train` passes on; all others are ``optimization_params``."""


@dataclass
class Line:
    """A line and the tensors of its graph."""

    data: DataLayerNM
    net: Any
    x: NmTensor
    y: NmTensor
    prediction: NmTensor
    loss: NmTensor

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]


def ports(**types: NeuralType | None) -> Any:
    """Return a property of a module: its ports. `Scale` in test_module_facts.py has them as users write them."""
    return property(lambda module: types)


class NetNM(TrainableNM):
    """A module with the input ``x`` and the output ``y_pred``."""

    input_ports, output_ports = ports(x=None), ports(y_pred=None)


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


def noisy_net() -> Any:
    """Return a network that draws random numbers and has buffers."""
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    return TrainableNM.of(net, ["x"], ["y_pred"])


def line(batches: int = 5, *, loader: Any = None, net: TrainableNM | None = None) -> Line:
    """Return a graph with this many batches of two samples per epoch."""
    data = DataLayerNM.of(tiny_loader(batches) if loader is None else loader, ["x", "y"])
    net = LineNM() if net is None else net
    x, y = data()
    prediction = net(x=x)
    loss = LossNM.of(nn.functional.mse_loss, ["predictions", "target"])(predictions=prediction, target=y)
    return Line(data, net, x, y, prediction, loss)


def train(graph: Line | list[NmTensor], *callbacks: Any, factory: Any = None, optimizer: Any = "sgd", **given: Any) -> Any:
    """Train the loss of a graph, or these losses, with a factory of 0.11 if none is given; return the run."""
    tensors = [graph.loss] if isinstance(graph, Line) else graph
    arguments = {name: given.pop(name) for name in OF_TRAIN & given.keys()}
    params = {**(SGD if optimizer == "sgd" else {"lr": 0.1}), **given}
    return (factory or NeuralModuleFactory()).train(tensors, optimizer, params, list(callbacks), **arguments)


def train_0_10(graph: Line | list[NmTensor], *callbacks: Any, factory: Any = None, **given: Any) -> Any:
    """Do the same with a factory of 0.10."""
    return train(graph, *callbacks, factory=factory or OldFactory(), **given)


EVENTS = [f"on_{part}_{side}" for part in ("action", "epoch", "step", "batch") for side in ("start", "end")]


class Trace(NeMoCallback):
    """Records each event of 0.11 with its step and epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    @property
    def counts(self) -> tuple[int, ...]:
        counted = Counter(event for event, _, _ in self.seen)
        order = ("on_batch_start", "on_batch_end", "on_step_start", "on_step_end", "on_epoch_start", "on_epoch_end")
        return tuple(counted[event] for event in (*order, "on_action_start", "on_action_end"))

    def note(self, event: str, state: State) -> None:
        self.seen.append((event, state["step"], state["epoch"]))


class OldTrace(ActionCallback):
    """Records each event of 0.10 with its step, its epoch, the number of registered tensors, and the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []
        self.registered: dict[str, list[int]] = {}
        self.rates: list[float] = []

    def note(self, event: str) -> None:
        self.seen.append((event, self.step, self.epoch_num))
        self.registered.setdefault(event, []).append(len(self.registered_tensors))
        self.rates.append(self.learning_rate)


for _event in EVENTS:
    setattr(Trace, _event, partialmethod(Trace.note, _event))
for _event in EVENT_OF:
    setattr(OldTrace, _event, partialmethod(OldTrace.note, _event))


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
    return sorted(int(file.stem.rpartition("-")[2]) for file in Path(folder).glob(f"trainer-{kind}-*.pt"))


def genuine(folder: Path, mark: str, step: int, epoch: int, epoch_key: str = "epoch", weight: float = 3.0) -> None:
    """Write the files of NeMo itself, in the format of its torch version."""
    folder.mkdir(exist_ok=True)
    net = {"layer.weight": torch.full((1, 1), weight), "layer.bias": torch.ones(1)}
    states = [torch.optim.SGD([torch.ones(1, 1), torch.ones(1)], lr=0.05).state_dict()]
    trainer = {"step": step, epoch_key: epoch, "optimizer_state": states}
    for name, content in (("LineNM", net), ("trainer", trainer)):
        torch.save(content, folder / f"{name}-{mark}.pt", _use_new_zipfile_serialization=False)


def logged(caplog: pytest.LogCaptureFixture, level: int | None = None) -> list[str]:
    """Return the messages of the logger of NeMo, or those of a level."""
    records = [record for record in caplog.records if record.name == "nemo"]
    return [record.getMessage() for record in records if level in (None, record.levelno)]

"""What the guide of NeMo 0.11 takes for granted: a factory, modules on images of digits, and names that it uses undefined."""

from __future__ import annotations

import types
from typing import Any

import sklearn.datasets
import sklearn.metrics
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza.compat.nemo as nemo
from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM

nf = nemo.core.NeuralModuleFactory(log_dir="work", create_tb_writer=True, random_seed=1)

images, digits = sklearn.datasets.load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits))
labels = list(range(10))
network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Classifier(TrainableNM):
    """The digit that the network sees in each image."""

    input_ports = {"inputs": None}  # noqa: RUF012  # as short as possible
    output_ports = {"predictions": None}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        digits: Tensor = self.network(inputs).argmax(1)
        return digits


class Trained(TrainableNM):
    """The network's loss on images: the listing has it depend on the inputs, and not on the predictions."""

    input_ports = {"inputs": None, "targets": None}  # noqa: RUF012
    output_ports = {"loss": None}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(inputs), targets)


def scores(targets: Tensor, predictions: Tensor) -> tuple[Tensor, ...]:
    """Return precision, recall and F1, means over the digits."""
    found = sklearn.metrics.precision_recall_fscore_support(
        targets, predictions.argmax(1), average="macro", zero_division=0.0
    )
    return tuple(torch.tensor(value) for value in found[:3])


layer = DataLayerNM.of(DataLoader(data, batch_size=64, shuffle=True), ["inputs", "targets"])
inputs, targets = layer()
target = targets  # the listing says `target` where it means `targets`


def MyDataLayerNM() -> tuple[Any, Any]:  # noqa: N802  # the listing's name
    """Return the tensors of the one data layer, so that `target` is what the listing means."""
    return inputs, targets


MyNeuralNetworkNM = Classifier()
MyLossNM = Trained()
MyLossModule = LossNM.of(lambda targets, predictions: nn.functional.cross_entropy(predictions, targets), ["targets", "predictions"])
MyMetricModule = NonTrainableNM.of(scores, ["targets", "predictions"], ["precision", "recall", "F1"])
predictions = TrainableNM.of(network, ["inputs"], ["predictions"])(inputs=inputs)


def confusion_matrix(targets: Any, predictions: Any, labels: Any) -> Any:
    """Return scikit-learn's matrix. It accepts `labels` by name only today; the listing passes them by position."""
    return sklearn.metrics.confusion_matrix(targets, predictions, labels=labels)


sklearn_as_it_was = types.SimpleNamespace(metrics=types.SimpleNamespace(confusion_matrix=confusion_matrix))

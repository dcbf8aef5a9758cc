"""NeMo's first tutorial: a polynomial learns a function of one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.compat.neural.elements import ChannelType, LabelsType, LossType
from cadenza.compat.neural.modules import DataLayerNM, LossNM, TrainableNM
from cadenza.compat.neural.ports import NeuralType
from cadenza.compat.neural.tensors import Ports

FUNCTIONS = {"sin": torch.sin, "cos": torch.cos, "exp": torch.exp}  # NeMo has no exp


class RealFunctionDataLayer(DataLayerNM):
    """Pairs ``x, f(x)`` with x at random in a range, in a constant order; float32 of shape (batch_size, 1).

    The values of x come from NumPy's global generator: ``np.random.seed`` before this line gives NeMo's values.

    Args:
        batch_size: The number of pairs in a batch.
        f_name: ``"sin"``, ``"cos"`` or ``"exp"``.
        n: The number of pairs.
        x_lo: The lower end of the range.
        x_hi: The upper end of the range.
        name: The name of the module.

    Raises:
        ValueError: `f_name` is another name.
    """

    def __init__(
        self,
        batch_size: int,
        f_name: str = "sin",
        n: int = 1000,
        x_lo: float = -4,
        x_hi: float = 4,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if f_name not in FUNCTIONS:
            raise ValueError(f"f_name must be one of {list(FUNCTIONS)}; got {f_name!r}")
        self._n, self._batch_size = n, batch_size
        x = torch.tensor(np.random.uniform(x_lo, x_hi, n)).unsqueeze(-1)
        self._dataset = TensorDataset(x.float(), FUNCTIONS[f_name](x).float())  # f of the float64 numbers, as NeMo does
        self._data_iterator = DataLoader(self._dataset, batch_size=batch_size)

    @property
    def output_ports(self) -> Ports:
        return {"x": NeuralType(("B", "D"), ChannelType()), "y": NeuralType(("B", "D"), LabelsType())}

    @property
    def dataset(self) -> TensorDataset:
        return self._dataset

    @property
    def data_iterator(self) -> DataLoader[Any]:
        return self._data_iterator

    def __len__(self) -> int:
        return self._n


class TaylorNet(TrainableNM):
    """A polynomial of x with learned coefficients: the weighted sum of ``x**p`` for p = 0..dim-1, plus a bias.

    Its weights are ``fc1.weight``, shape (1, dim), and ``fc1.bias``, shape (1,).

    Args:
        dim: The number of powers.
        name: The name of the module.
    """

    def __init__(self, dim: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._dim = dim
        self.fc1: nn.Linear = nn.Linear(dim, 1)
        nn.init.xavier_uniform_(self.fc1.weight)

    @property
    def input_ports(self) -> Ports:
        return {"x": NeuralType(("B", "D"), ChannelType())}

    @property
    def output_ports(self) -> Ports:
        return {"y_pred": NeuralType(("B", "D"), ChannelType())}

    def forward(self, x: Tensor) -> Tensor:
        """Return the polynomial's values, shape (B, 1), of x, shape (B, 1)."""
        values: Tensor = self.fc1(torch.cat([x**power for power in range(self._dim)], dim=-1))
        return values


class TaylorNetO(TaylorNet):
    """A `TaylorNet` with an optional input ``o``, which it does not use (NeMo 0.10)."""

    @property
    def input_ports(self) -> Ports:
        return {**super().input_ports, "o": NeuralType(("B", "D"), ChannelType(), optional=True)}

    def forward(self, x: Tensor, o: Tensor | None = None) -> Tensor:
        """Return the polynomial's values, shape (B, 1), of x, shape (B, 1)."""
        return super().forward(x)


class _Criterion(LossNM):
    """A loss of predictions and labels by a function of torch, with the output ``loss``."""

    _labels: tuple[str, Sequence[str]] = ("target", ("B", "D"))
    _criterion: nn.Module

    @property
    def input_ports(self) -> Ports:
        port, axes = self._labels
        return {"predictions": NeuralType(("B", "D"), ChannelType()), port: NeuralType(axes, LabelsType())}

    @property
    def output_ports(self) -> Ports:
        return {"loss": NeuralType(elements_type=LossType())}

    def _loss_function(self, **values: Tensor) -> Tensor:
        loss: Tensor = self._criterion(*(values[port] for port in self.input_ports))
        return loss


class MSELoss(_Criterion):
    """The mean squared error of ``predictions`` and ``target``."""

    _criterion = nn.MSELoss()


class L1Loss(_Criterion):
    """The mean absolute error of ``predictions`` and ``target``."""

    _criterion = nn.L1Loss()


class CrossEntropyLoss(_Criterion):
    """The cross-entropy of ``predictions``, shape (B, C), and ``labels``, integers of shape (B,)."""

    _labels = ("labels", ("B",))
    _criterion = nn.CrossEntropyLoss()

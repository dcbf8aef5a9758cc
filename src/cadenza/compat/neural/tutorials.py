"""NeMo's first tutorial: a polynomial learns a function of one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.compat.neural.modules import DataLayerNM, LossNM, TrainableNM
from cadenza.compat.neural.ports import ChannelType, LabelsType, LossType, NeuralType, RegressionValuesType
from cadenza.compat.neural.tensors import Ports

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sin": torch.sin, "cos": torch.cos, "exp": torch.exp}


class RealFunctionDataLayer(DataLayerNM):
    """Pairs ``x, f(x)`` with x at random in a range; shapes (batch_size, 1).

    Args:
        n: The number of pairs.
        batch_size: The number of pairs in a batch.
        f_name: ``"sin"``, ``"cos"`` or ``"exp"``.
        x_lo: The lower end of the range.
        x_hi: The upper end of the range.
        name: The name of the module.
    """

    def __init__(
        self, n: int, batch_size: int, f_name: str = "sin", x_lo: float = -4.0, x_hi: float = 4.0, name: str | None = None
    ) -> None:
        super().__init__(name)
        if f_name not in FUNCTIONS:
            raise ValueError(f"f_name must be one of {list(FUNCTIONS)}; got {f_name!r}")
        self.batch_size = batch_size
        x = torch.rand(n, 1) * (x_hi - x_lo) + x_lo
        self._loader = DataLoader(TensorDataset(x, FUNCTIONS[f_name](x)), batch_size=batch_size)

    @property
    def output_ports(self) -> Ports:
        return {"x": NeuralType(("B", "D"), ChannelType()), "y": NeuralType(("B", "D"), LabelsType())}

    @property
    def data_iterator(self) -> DataLoader[Any]:
        return self._loader

    def __len__(self) -> int:
        return len(self._loader.dataset)  # type: ignore[arg-type]  # a TensorDataset has a length


class TaylorNet(TrainableNM):
    """A polynomial of x with learned coefficients: ``x, x**2, ..., x**dim``.

    Args:
        dim: Its degree.
        name: The name of the module.
    """

    def __init__(self, dim: int, name: str | None = None) -> None:
        super().__init__(name)
        self._dim = dim
        self.fc1 = nn.Linear(dim, 1)
        nn.init.xavier_uniform_(self.fc1.weight)

    @property
    def input_ports(self) -> Ports:
        return {"x": NeuralType(("B", "D"), ChannelType())}

    @property
    def output_ports(self) -> Ports:
        return {"y_pred": NeuralType(("B", "D"), RegressionValuesType())}

    def forward(self, x: Tensor) -> Tensor:
        """Return the polynomial's values, shape (B, 1), of x, shape (B, 1)."""
        powers = [x**power / math.factorial(power) for power in range(1, self._dim + 1)]
        values: Tensor = self.fc1(torch.cat(powers, dim=1))
        return values


class MSELoss(LossNM):
    """The mean squared error."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._criterion = nn.MSELoss()

    @property
    def input_ports(self) -> Ports:
        return {
            "predictions": NeuralType(("B", "D"), RegressionValuesType()),
            "target": NeuralType(("B", "D"), LabelsType()),
        }

    @property
    def output_ports(self) -> Ports:
        return {"loss": NeuralType(elements_type=LossType())}

    def _loss_function(self, predictions: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self._criterion(predictions, target)
        return loss

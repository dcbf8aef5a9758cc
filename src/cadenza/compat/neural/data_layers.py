"""Data layers of ``nemo.backends.pytorch.common``: zeros, and several data layers in one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cadenza.compat.neural.axes import AxisKind
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.modules import DataLayerNM
from cadenza.compat.neural.ports import NeuralType
from cadenza.compat.neural.tensors import Ports


def neuralType2TensorShape(  # noqa: N802  # NeMo's name
    neural_type: NeuralType, default_dim: int = 32, skip_batch_axis: bool = True
) -> torch.Size:
    """Return a shape that fits a type.

    Args:
        neural_type: The type. It must have axes.
        default_dim: The size of axes without a size.
        skip_batch_axis: Leave out the batch axis.

    Raises:
        ValueError: The type has no axes.
    """
    if neural_type.axes is None:
        raise ValueError(f"a shape needs a type with axes; got {neural_type}. Pass shapes= instead.")
    axes = [axis for axis in neural_type.axes if not (skip_batch_axis and axis.kind is AxisKind.Batch)]
    return torch.Size(default_dim if axis.size is None else axis.size for axis in axes)


class _Zeros(Dataset[tuple[Tensor, ...]]):
    def __init__(self, size: int, shapes: Sequence[Sequence[int]], types: Sequence[Any]) -> None:
        self._size, self._shapes, self._types = size, shapes, types

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(tuple(shape)).type(kind) for shape, kind in zip(self._shapes, self._types, strict=True))

    def __len__(self) -> int:
        return self._size


class ZerosDataLayer(DataLayerNM):
    """Samples of zeros, for tests and measurements.

    Args:
        size: The number of samples.
        output_ports: Its output ports.
        dtype: The type of all tensors, or a list with one for each port, such as ``torch.FloatTensor``; None is that.
        batch_size: The number of samples in a batch.
        shapes: The shape of a sample for each port; None takes the sizes of the axes, and 32 where there is none.
    """

    def __init__(
        self,
        size: int,
        output_ports: Mapping[str, NeuralType],
        dtype: Any,
        batch_size: int,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self._output_ports, self._batch_size = output_ports, batch_size
        if shapes is None:
            shapes = [neuralType2TensorShape(type) for type in output_ports.values()]
        types = dtype if isinstance(dtype, list) else [dtype or torch.float32] * len(shapes)
        self._dataset = _Zeros(size, shapes, types)

    @property
    def output_ports(self) -> Ports:
        return self._output_ports

    @property
    def dataset(self) -> Dataset[Any]:
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)


class DataCombination(Enum):
    """How the samples of several data sets are combined."""

    CROSSPRODUCT = 1
    ZIP = 2


class MultiDataset(Dataset[list[Any]]):
    """Samples of several data sets, one after the other in a list.

    Args:
        datasets: The data sets. Each sample is a sequence.
        combination_mode: CROSSPRODUCT gives all combinations, ZIP the samples with the same index.

    Raises:
        ValueError: The mode is unknown, or ZIP has data sets of different lengths.
    """

    def __init__(self, datasets: Sequence[Any], combination_mode: DataCombination = DataCombination.CROSSPRODUCT) -> None:
        if not isinstance(combination_mode, DataCombination):
            raise ValueError(f"combination_mode must be a DataCombination; got {combination_mode!r}")
        self.datasets: list[Any] = list(datasets)
        self.combination_mode: DataCombination = combination_mode
        lengths = [len(dataset) for dataset in self.datasets]
        self._zipped = combination_mode is DataCombination.ZIP
        if self._zipped and len(set(lengths)) != 1:
            raise ValueError(f"DataCombination.ZIP needs data sets of equal lengths; got {lengths}")
        self.len: int = lengths[0] if self._zipped else math.prod(lengths)

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < self.len:
            raise IndexError(f"index {index} is out of range for {self.len} samples")
        parts: list[Any] = []
        for dataset in self.datasets:
            parts += dataset[index % len(dataset)]
            index = index if self._zipped else index // len(dataset)
        return parts

    def __len__(self) -> int:
        return self.len


class MultiDataLayer(DataLayerNM):
    """Several data layers with a `dataset` as one.

    A port that an earlier layer has too gets the index of its layer: ``a`` of the second layer is ``a_1``.

    Args:
        data_layers: The data layers.
        batch_size: The number of samples in a batch.
        shuffle: Whether each epoch has another order.
        combination_mode: How the samples are combined.
        port_names: Other names for all ports.

    Raises:
        ValueError: See `MultiDataset`.
    """

    def __init__(
        self,
        data_layers: Sequence[DataLayerNM],
        batch_size: int,
        shuffle: bool = False,
        combination_mode: DataCombination = DataCombination.CROSSPRODUCT,
        port_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._batch_size, self._shuffle = batch_size, shuffle
        self._dataset = MultiDataset([layer.dataset for layer in data_layers], combination_mode)
        self._ports: dict[str, NeuralType | None] = {}
        for index, layer in enumerate(data_layers):
            for port, type in layer.output_ports.items():
                name = port_names[len(self._ports)] if port_names else port
                if name in self._ports:
                    logging.warning("port %r is in two data layers; the second is %r", name, f"{name}_{index}")
                    name = f"{name}_{index}"
                self._ports[name] = type

    @property
    def output_ports(self) -> Ports:
        return self._ports

    @property
    def dataset(self) -> MultiDataset:
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)

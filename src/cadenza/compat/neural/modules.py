"""The kinds of neural modules: with weights, without weights, losses and data layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from cadenza.compat.neural.kinds import ModuleType, OperationMode
from cadenza.compat.neural.tensors import NeuralModule, Ports
from cadenza.compat.neural.weights import (
    Renames,
    Weights,
    copy_weights,
    load_weights,
    save_weights,
    set_trainable,
    tie_weights,
    weights_of,
)


class TrainableNM(NeuralModule, nn.Module):
    """A module with weights. A subclass defines ``input_ports``, ``output_ports`` and ``forward``."""

    _module_type = ModuleType.trainable

    def __init__(self, pretrained_model_name: str | None = None, name: str | None = None) -> None:
        nn.Module.__init__(self)
        NeuralModule.__init__(self, name)
        self._pretrained_model_name = pretrained_model_name

    @property
    def operation_mode(self) -> OperationMode:
        """What the module is used for. Setting ``evaluation`` calls `eval`, and setting another mode calls `train`."""
        return self._operation_mode

    @operation_mode.setter
    def operation_mode(self, value: OperationMode) -> None:
        self._operation_mode = value
        self.train(value is not OperationMode.evaluation)

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def _compute_outputs(self, *arguments: Any, **values: Any) -> Any:
        return nn.Module.__call__(self, *arguments, **values)

    def get_weights(self) -> Weights:
        return weights_of(self)

    def set_weights(self, name2weight: Weights, name2name_and_transform: Renames | None = None) -> None:
        copy_weights(self, name2weight, name2name_and_transform)

    def tie_weights_with(
        self, module: nn.Module, weight_names: Iterable[str], name2name_and_transform: Renames | None = None
    ) -> None:
        tie_weights(self, module, weight_names, name2name_and_transform)

    def save_to(self, path: str) -> None:
        save_weights(self, path)

    def restore_from(self, path: str, local_rank: int | None = 0) -> None:
        load_weights(self, path)

    def freeze(self, weights: Iterable[str] | None = None) -> None:
        set_trainable(self, False, weights)

    def unfreeze(self, weights: Iterable[str] | None = None) -> None:
        set_trainable(self, True, weights)

    def is_frozen(self) -> bool:
        """Return whether it has frozen weights."""
        return not all(parameter.requires_grad for parameter in self.parameters())

    def __str__(self) -> str:
        return NeuralModule.__str__(self)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return NeuralModule.__call__(self, *inputs, **keywords)

    @staticmethod
    def of(module: nn.Module, inputs: Sequence[str], outputs: Sequence[str], name: str | None = None) -> TrainableNM:
        """Return an ``nn.Module`` as a neural module. Its ``forward`` gets the inputs in this order.

        >>> net = TrainableNM.of(nn.Linear(2, 1), inputs=["x"], outputs=["y"])
        >>> net.num_weights
        3
        """
        return _Wrapped(module, inputs, outputs, name)


class NonTrainableNM(NeuralModule):
    """A module without weights. A subclass defines ``input_ports``, ``output_ports`` and ``forward``.

    Gradients flow through it, as in NeMo 0.11. In NeMo 0.10, no gradient flows through them.
    """

    _module_type = ModuleType.nontrainable
    _gradients = True

    def restore_from(self, path: str, local_rank: int | None = 0) -> None:
        """Do nothing, as in NeMo: there are no weights."""

    def forward(self, *arguments: Any, **values: Any) -> Any:
        """Compute the outputs."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def _compute_outputs(self, *arguments: Any, **values: Any) -> Any:
        with torch.set_grad_enabled(self._gradients and torch.is_grad_enabled()):
            return self.forward(*arguments, **values)

    @classmethod
    def of(
        cls, function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], name: str | None = None
    ) -> NonTrainableNM:
        """Return a function as a neural module. It gets the inputs in this order."""
        module = _Function(function, inputs, outputs, name)
        module._gradients = cls._gradients
        return module


class LossNM(NeuralModule):
    """A loss. A subclass defines ``input_ports``, ``output_ports`` and ``_loss_function``."""

    _module_type = ModuleType.loss

    def _loss_function(self, *arguments: Any, **values: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _loss_function")

    def _compute_outputs(self, *arguments: Any, **values: Any) -> Any:
        return self._loss_function(*arguments, **values)

    @staticmethod
    def of(function: Callable[..., Any], inputs: Sequence[str], name: str | None = None) -> LossNM:
        """Return a loss function as a neural module with the output ``loss``. It gets the inputs in this order."""
        return _Loss(function, inputs, name)


class DataLayerNM(NeuralModule):
    """The source of a graph. A subclass defines ``output_ports``, and ``dataset`` or ``data_iterator``.

    A subclass with a dataset sets ``_batch_size`` (1), ``_shuffle`` (False), ``_num_workers`` (0) and ``_pin_memory`` (False),
    or overrides these properties, and may define ``collate_fn``.
    """

    _module_type = ModuleType.datalayer
    _batch_size = 1
    _shuffle = False
    _num_workers = 0
    _pin_memory = False

    @property
    def dataset(self) -> Dataset[Any] | None:
        """Samples; None if there is only a `data_iterator`."""
        return None

    @property
    def data_iterator(self) -> Iterable[Any] | None:
        """Batches, read once per epoch if there is no `dataset`."""
        return None

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._batch_size = value

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has another order."""
        return self._shuffle

    @shuffle.setter
    def shuffle(self, value: bool) -> None:
        self._shuffle = value

    @property
    def num_workers(self) -> int:
        """The number of processes that load samples. NeMo's default is the number of CPUs."""
        return self._num_workers

    @property
    def pin_memory(self) -> bool:
        """Whether batches are loaded into pinned memory."""
        return self._pin_memory

    def _compute_outputs(self, *arguments: Any, **values: Any) -> Any:
        raise ValueError(f"data layer {self.name!r} cannot be called with values: the trainer reads its batches")

    @staticmethod
    def of(loader: Iterable[Any], outputs: Sequence[str], name: str | None = None) -> DataLayerNM:
        """Return a loader as a data layer. A batch is a sequence of the outputs in this order, or a mapping with these keys."""
        return _Loader(loader, outputs, name)


def loader_of(layer: DataLayerNM) -> Iterable[Any]:
    """Return the loader of a data layer for the trainer: of its `dataset`, or else its `data_iterator`.

    Raises:
        TypeError: Both are None.
    """
    if layer.dataset is None:
        if layer.data_iterator is None:
            raise TypeError(f"data layer {layer.name!r} needs a dataset or a data_iterator; both are None")
        return layer.data_iterator
    return DataLoader(
        layer.dataset,
        batch_size=layer.batch_size,
        shuffle=layer.shuffle,
        num_workers=layer.num_workers,
        pin_memory=layer.pin_memory,
        collate_fn=getattr(layer, "collate_fn", None),
    )


class _Ports(NeuralModule):
    """Ports without types, and values passed in their order."""

    _inputs: Sequence[str] = ()
    _outputs: Sequence[str] = ()

    @property
    def input_ports(self) -> Ports:
        return dict.fromkeys(self._inputs)

    @property
    def output_ports(self) -> Ports:
        return dict.fromkeys(self._outputs)

    def _in_order(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[port] for port in self._inputs if port in values]


class _Wrapped(_Ports, TrainableNM):
    def __init__(self, module: nn.Module, inputs: Sequence[str], outputs: Sequence[str], name: str | None) -> None:
        TrainableNM.__init__(self, name=name or type(module).__name__.lower())
        self.module = module
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def forward(self, **values: Any) -> Any:
        return self.module(*self._in_order(values))

    def __str__(self) -> str:
        return type(self.module).__name__


def _name_of(function: Callable[..., Any]) -> str | None:
    """Return the name of a function; None if it has none."""
    name: str | None = getattr(function, "__name__", None)
    return None if name == "<lambda>" else name


class _Function(_Ports, NonTrainableNM):
    def __init__(self, function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], name: str | None) -> None:
        super().__init__(name or _name_of(function))
        self._function, self._inputs, self._outputs = function, tuple(inputs), tuple(outputs)

    @classmethod
    def _kind(cls) -> str:
        return NonTrainableNM.__name__

    def forward(self, **values: Any) -> Any:
        return self._function(*self._in_order(values))


class _Loss(_Ports, LossNM):
    _outputs = ("loss",)

    def __init__(self, function: Callable[..., Any], inputs: Sequence[str], name: str | None) -> None:
        super().__init__(name or _name_of(function))
        self._function, self._inputs = function, tuple(inputs)

    @classmethod
    def _kind(cls) -> str:
        return LossNM.__name__

    def _loss_function(self, *arguments: Any, **values: Any) -> Any:
        return self._function(*self._in_order(values))


class _Loader(_Ports, DataLayerNM):
    def __init__(self, loader: Iterable[Any], outputs: Sequence[str], name: str | None) -> None:
        super().__init__(name)
        self._loader, self._outputs = loader, tuple(outputs)

    @classmethod
    def _kind(cls) -> str:
        return DataLayerNM.__name__

    @property
    def data_iterator(self) -> Iterable[Any]:
        return self._loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # called only if the loader has a length

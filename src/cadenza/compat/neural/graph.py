"""The execution of a graph: the calls that a step needs, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.compat.neural.modules import DataLayerNM
from cadenza.compat.neural.tensors import LOSS, Call, NeuralModule, NmTensor, calls_for, connected
from cadenza.errors import CadenzaError, LossError
from cadenza.loading.rng import preserve_rng_state

Values = MutableMapping[str, Any]


class GraphError(CadenzaError, ValueError):
    """A graph that cannot be executed."""


class Graph:
    """The computation of some tensors from the data layer on which they depend.

    Args:
        wanted: The tensors.

    Raises:
        TypeError: One of them is not an NmTensor.
        GraphError: They depend on no data layer, or on several.
    """

    def __init__(self, wanted: Sequence[NmTensor]) -> None:
        self.wanted: list[NmTensor] = list(wanted)
        for tensor in self.wanted:
            if not isinstance(tensor, NmTensor):
                raise TypeError(f"expected NmTensors, which calls of modules return; got {tensor!r}")
        self.chain: list[Call] = list(calls_for(self.wanted))
        sources = [call for call in self.chain if isinstance(call.module, DataLayerNM)]
        if len(sources) != 1:
            names = ", ".join(call.module.name for call in sources) or "none"
            raise GraphError(
                f"{', '.join(tensor.name for tensor in wanted)} must depend on one data layer, called once; got {names}"
            )
        self.source: Call = sources[0]
        self.tensors: dict[str, NmTensor] = {tensor.unique_name: tensor for tensor in connected(self.wanted)}
        """All tensors of the graph at this time by unique name: those connected to the wanted ones."""

    @property
    def data_layer(self) -> DataLayerNM:
        """The data layer of the graph."""
        layer = self.source.module
        assert isinstance(layer, DataLayerNM), "the source is the call of a data layer"
        return layer

    def read(self, batch: Any) -> dict[str, Any]:
        """Return the values of the data layer's outputs in a batch. A mapping is read by port, a sequence in order."""
        ports = [port for port, _ in self.source.names]
        if isinstance(batch, Mapping):
            if missing := [port for port in ports if port not in batch]:
                raise GraphError(
                    f"data layer {self.data_layer.name!r} returned a batch without {missing}; it has {list(batch)}"
                )
            given = [batch[port] for port in ports]
        else:
            given = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(given) != len(ports):
            raise GraphError(
                f"data layer {self.data_layer.name!r} has the ports {ports}, but returned a batch of {len(given)} parts"
            )
        return {name: value for (_, name), value in zip(self.source.names, given, strict=True)}

    def compute(self, values: Values, wanted: Iterable[NmTensor]) -> None:
        """Add the wanted values and their dependencies to `values`, which hold the outputs of the data layer."""
        for call in calls_for(wanted, values):
            execute(call, values)

    def loss(self, values: Mapping[str, Any], tensors: Iterable[NmTensor]) -> Tensor:
        """Return the sum of the tensors that are optimised, shape ().

        Raises:
            LossError: One of them is more than one number.
        """
        losses = []
        for tensor in tensors:
            value = values[tensor.unique_name]
            if not isinstance(value, Tensor) or value.numel() != 1:
                found = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
                raise LossError(
                    f"a loss must be a tensor of one number; {tensor.name!r} of {tensor.producer_name} {found}. Pass "
                    "the output of a loss module to nf.train."
                )
            losses.append(value.reshape(()))
        total: Tensor = sum(losses[1:], losses[0])
        return total

    def modules(self) -> list[NeuralModule]:
        """Return the modules of the needed calls, each once, in the order of their first call."""
        return list(dict.fromkeys(call.module for call in self.chain))

    def others(self) -> list[NeuralModule]:
        """Return all modules that are connected to the graph, including those that are not needed."""
        return list(dict.fromkeys(tensor.producer for tensor in self.tensors.values()))

    def late(self, values: Mapping[str, Any], tensor: NmTensor) -> dict[str, Any]:
        """Return `values` with a tensor that the training does not need, without an effect on the training.

        Modules are in evaluation mode, and the RNG states are restored. Gradients are enabled, because modules such as a
        gradient penalty need them.
        """
        scratch = dict(values)
        calls = list(calls_for([tensor], scratch))
        idle = [call.module for call in calls if isinstance(call.module, nn.Module)]
        modes = [(part, part.training) for module in idle for part in module.modules()]
        with torch.enable_grad(), preserve_rng_state():
            try:
                for module in idle:
                    module.eval()
                for call in calls:
                    execute(call, scratch)
            finally:
                for part, training in modes:
                    part.training = training
        return scratch


class GraphModel(nn.Module):
    """The trainable modules of a graph as one model, which returns all values and the loss for a batch."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        trainable = [module for module in graph.modules() if isinstance(module, nn.Module)]
        self.parts: nn.ModuleList = nn.ModuleList(trainable)

    def forward(self, batch: Any, optimised: Sequence[NmTensor]) -> dict[str, Any]:
        """Return the values of the optimised tensors and of their dependencies, and their sum as ``loss``."""
        values = self.graph.read(batch)
        self.graph.compute(values, optimised)
        return {LOSS: self.graph.loss(values, optimised), **values}


def execute(call: Call, values: Values) -> None:
    """Compute the outputs of one call and add them to `values`."""
    if isinstance(call.module, DataLayerNM):
        raise GraphError(
            f"{call.names[0][0]!r} depends on data layer {call.module.name!r}, which has no batch now: it belongs to "
            "another graph, or the current batch has not been read yet"
        )
    given = {port: values[tensor.unique_name] for port, tensor in call.inputs.items()}
    result = call.module._compute_outputs(**given)
    results = [result] if len(call.names) == 1 else list(result)
    if len(results) != len(call.names):
        ports = [port for port, _ in call.names]
        raise GraphError(f"{call.module.name} has the output ports {ports}, but returned {len(results)} values")
    for (_, name), value in zip(call.names, results, strict=True):
        values[name] = value

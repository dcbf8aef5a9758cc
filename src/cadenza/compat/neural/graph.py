"""A graph as it is carried out: which calls a step needs, and how values flow through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.compat.neural.modules import DataLayerNM
from cadenza.compat.neural.tensors import LOSS, Call, NeuralModule, NmTensor, calls_for, connected
from cadenza.errors import CadenzaError, LossError
from cadenza.loading.seeding import streams_kept

Values = MutableMapping[str, Any]


class GraphError(CadenzaError, ValueError):
    """A graph that cannot be carried out."""


class Graph:
    """What is computed for some tensors, from the one data layer on which they rest.

    Args:
        wanted: The tensors.

    Raises:
        TypeError: One of them is no NmTensor.
        GraphError: They rest on no data layer, or on several.
    """

    def __init__(self, wanted: Sequence[NmTensor]) -> None:
        self.wanted = list(wanted)
        for tensor in self.wanted:
            if not isinstance(tensor, NmTensor):
                raise TypeError(f"expected NmTensors, as calls of modules return them; got {tensor!r}")
        self.chain = list(calls_for(self.wanted))
        sources = [call for call in self.chain if isinstance(call.module, DataLayerNM)]
        if len(sources) != 1:
            names = ", ".join(call.module.name for call in sources) or "none"
            raise GraphError(
                f"{', '.join(tensor.name for tensor in wanted)} must rest on one data layer, called once; found: {names}"
            )
        self.source = sources[0]
        self.tensors = {tensor.unique_name: tensor for tensor in connected(self.wanted)}
        """All tensors that hang together with the wanted ones when the graph is made, by unique name."""

    @property
    def data_layer(self) -> DataLayerNM:
        """Where it begins."""
        layer = self.source.module
        assert isinstance(layer, DataLayerNM), "that is how the source was found"
        return layer

    def read(self, batch: Any) -> dict[str, Any]:
        """Return the values of the data layer's outputs in a batch: by port if it is a mapping, else in order."""
        ports = [tensor.port for tensor in self.source.outputs]
        if isinstance(batch, Mapping):
            if missing := [port for port in ports if port not in batch]:
                raise GraphError(f"data layer {self.data_layer.name!r} gave a batch without {missing}; it has {list(batch)}")
            given = [batch[port] for port in ports]
        else:
            given = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(given) != len(ports):
            raise GraphError(
                f"data layer {self.data_layer.name!r} has the ports {ports}, and gave a batch of {len(given)} parts"
            )
        return {tensor.unique_name: value for tensor, value in zip(self.source.outputs, given, strict=True)}

    def compute(self, values: Values, wanted: Iterable[NmTensor]) -> None:
        """Add the wanted values, and what they need, to `values`, which hold those of the data layer."""
        for call in calls_for(wanted, values):
            carry_out(call, values)

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
                    f"{tensor.name!r} of {tensor.producer.module.name} is no loss: it {found}, and a tensor of one number is "
                    "needed. Give nf.train what a loss module returns."
                )
            losses.append(value.reshape(()))
        total: Tensor = sum(losses[1:], losses[0])
        return total

    def modules(self) -> list[NeuralModule]:
        """Return the modules that are needed, each once, in the order of their first call."""
        return list(dict.fromkeys(call.module for call in self.chain))

    def others(self) -> list[NeuralModule]:
        """Return all modules that hang together with it; they may be asked for later."""
        return list(dict.fromkeys(tensor.producer.module for tensor in self.tensors.values()))

    def late(self, values: Mapping[str, Any], tensor: NmTensor) -> dict[str, Any]:
        """Return `values` with a tensor that the training does not need; nothing of the training is disturbed.

        Without gradient, with modules that are not trained in evaluation mode, and random streams put back: a value that
        is only looked at must not change what is trained.
        """
        scratch = dict(values)
        calls = list(calls_for([tensor], scratch))
        idle = [call.module for call in calls if isinstance(call.module, nn.Module)]
        modes = [(part, part.training) for module in idle for part in module.modules()]
        with torch.no_grad(), streams_kept():
            try:
                for module in idle:
                    module.eval()
                for call in calls:
                    carry_out(call, scratch)
            finally:
                for part, training in modes:
                    part.training = training
        return scratch


class GraphModel(nn.Module):
    """The trainable modules of a graph as one model: a batch in, all values and the loss out."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        trainable = [module for module in graph.modules() if isinstance(module, nn.Module)]
        self.parts = nn.ModuleList(trainable)

    def forward(self, batch: Any, optimised: Sequence[NmTensor]) -> dict[str, Any]:
        """Return the values of the tensors that are optimised and of all they need, and their sum as ``loss``."""
        values = self.graph.read(batch)
        self.graph.compute(values, optimised)
        return {LOSS: self.graph.loss(values, optimised), **values}


def carry_out(call: Call, values: Values) -> None:
    """Compute the outputs of one call, and add them to `values`."""
    if isinstance(call.module, DataLayerNM):
        raise GraphError(
            f"{call.outputs[0].name!r} rests on data layer {call.module.name!r}, whose batch is not there: it belongs to "
            "another graph, or the batch under way has not been read yet"
        )
    given = {port: values[tensor.unique_name] for port, tensor in call.inputs.items()}
    result = call.module.carry_out(**given)
    results = [result] if len(call.outputs) == 1 else list(result)
    if len(results) != len(call.outputs):
        ports = [tensor.port for tensor in call.outputs]
        raise GraphError(f"{call.module.name} has the output ports {ports}, and gave {len(results)} values")
    for tensor, value in zip(call.outputs, results, strict=True):
        values[tensor.unique_name] = value

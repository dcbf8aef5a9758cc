"""A graph: neural modules, their calls, and the tensors that the calls give. Nothing is computed here."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cadenza.compat.neural.ports import ANY, NeuralPortNameMismatchError, NeuralPortNmTensorMismatchError, NeuralType
from cadenza.errors import nearest

Ports = Mapping[str, NeuralType | None]

LOSS = "loss"  # the name of the training loss

_COUNTS: Counter[str] = Counter()  # for default names alone; two modules may have one name


class Call:
    """One use of a module in a graph."""

    def __init__(self, module: NeuralModule, inputs: Mapping[str, NmTensor], outputs: Mapping[str, NeuralType]) -> None:
        self.module, self.inputs = module, dict(inputs)
        self.outputs = [NmTensor(self, port, type) for port, type in outputs.items()]
        for tensor in self.inputs.values():
            tensor.consumers.append(self)


class NmTensor:
    """A description of a value that a module will compute; it holds no data.

    Tensors and calls refer to each other. There is no registry.
    """

    def __init__(self, producer: Call, port: str, ntype: NeuralType) -> None:
        self.producer, self.port, self.ntype = producer, port, ntype
        self.consumers: list[Call] = []
        self.unique_name = f"{port}~~~{producer.module.name}~~~{uuid.uuid4()}"
        """Unique and constant."""
        self.user_name: str | None = None
        """The name from `rename`."""

    @property
    def name(self) -> str:
        """The name from `rename`, or the name of the port."""
        return self.user_name or self.port

    def rename(self, new_name: str) -> None:
        """Set the name that callbacks use for this tensor. It replaces an earlier one.

        Raises:
            TypeError: It is not a string, or empty.
            KeyError: The name is already used in this graph, or is the name of the training loss.
        """
        if not isinstance(new_name, str) or not new_name:
            raise TypeError(f"the name of a tensor must be a non-empty string; got {new_name!r}. {self.name!r} keeps its name.")
        others = [tensor for tensor in connected([self]) if tensor is not self]
        taken = {name for tensor in others for name in (tensor.user_name, tensor.unique_name)} | {LOSS}
        if new_name in taken:
            raise KeyError(
                f"the name {new_name!r} is already used in this graph; {self.name!r} keeps its name. Choose another."
            )
        self.user_name = new_name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"NmTensor({self.unique_name!r})"


def connected(tensors: Iterable[NmTensor]) -> list[NmTensor]:
    """Return all tensors that are connected to these through calls, in both directions."""
    found: dict[NmTensor, None] = {}
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if tensor not in found:
            found[tensor] = None
            for call in (tensor.producer, *tensor.consumers):
                waiting += [*call.inputs.values(), *call.outputs]
    return list(found)


def calls_for(wanted: Iterable[NmTensor], there: Iterable[str] = ()) -> Iterator[Call]:
    """Yield the calls that compute the wanted tensors, each after its dependencies. The names `there` are already computed."""
    done: set[Call] = set()
    known = set(there)

    def needed(tensor: NmTensor) -> Iterator[Call]:
        call = tensor.producer
        if tensor.unique_name in known or call in done:
            return
        done.add(call)
        for one in call.inputs.values():
            yield from needed(one)
        yield call

    for tensor in wanted:
        yield from needed(tensor)


class NeuralModule:
    """A module with named inputs and outputs. A call with NmTensors adds to a graph and computes nothing.

    Args:
        name: Its name in the names of tensors; by default its class in lower case, and a number.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            kind = self._kind().lower()
            name, _COUNTS[kind] = f"{kind}{_COUNTS[kind]}", _COUNTS[kind] + 1
        self.name = name

    @property
    def input_ports(self) -> Ports:
        """The types of the inputs by name; None accepts any type."""
        return {}

    @property
    def output_ports(self) -> Ports:
        """The types of the outputs by name, in order; None is any type."""
        return {}

    @property
    def num_weights(self) -> int:
        """The number of its trainable parameters."""
        return 0

    @abstractmethod
    def execute(self, **values: Any) -> Any:
        """Compute the outputs, in the order of the ports."""

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Add a call to the graph; return one NmTensor, or a tuple of them in the order of the output ports.

        Raises:
            NeuralPortNameMismatchError: An input is not a port, or an input is missing.
            NeuralPortNmTensorMismatchError: A tensor does not fit its port.
        """
        if not any(isinstance(value, NmTensor) for value in (*arguments, *inputs.values())) and (arguments or inputs):
            return self.execute(*arguments, **inputs)
        if arguments:
            raise NeuralPortNameMismatchError(
                f"{self.name} ({self}) accepts NmTensors by name only. Its ports are {list(self.input_ports)}."
            )
        inputs = {port: value for port, value in inputs.items() if value is not None}
        _check(self, inputs)
        call = Call(self, inputs, {port: type or ANY for port, type in self.output_ports.items()})
        return call.outputs[0] if len(call.outputs) == 1 else tuple(call.outputs)

    @classmethod
    def _kind(cls) -> str:
        """Return its name in messages and files. Default names have it in lower case."""
        return cls.__name__

    def __str__(self) -> str:
        return self._kind()


def _check(module: NeuralModule, inputs: Mapping[str, NmTensor]) -> None:
    ports = module.input_ports
    for port, tensor in inputs.items():
        if port not in ports:
            raise NeuralPortNameMismatchError(
                f"{module.name} ({module}) has no input port {port!r}.{nearest(port, ports)} It has {list(ports)}"
            )
        if not isinstance(tensor, NmTensor):
            raise NeuralPortNmTensorMismatchError(
                f"port {port!r} of {module.name} ({module}) needs an NmTensor; got a {type(tensor).__name__}. Data layers and "
                "other modules return NmTensors."
            )
        if not (ports[port] or ANY).accepts(tensor.ntype):
            raise NeuralPortNmTensorMismatchError(
                f"port {port!r} of {module.name} ({module}) accepts {ports[port]}; got {tensor.name!r} of "
                f"{tensor.producer.module.name} with {tensor.ntype}"
            )
    missing = [port for port, type in ports.items() if port not in inputs and not (type or ANY).optional]
    if missing:
        raise NeuralPortNameMismatchError(f"{module.name} ({module}) was called without {missing}. Pass it by name.")

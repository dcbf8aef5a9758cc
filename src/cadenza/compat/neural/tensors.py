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

    The graph is held together by its tensors and calls alone: nothing is registered anywhere.
    """

    def __init__(self, producer: Call, port: str, ntype: NeuralType) -> None:
        self.producer, self.port, self.ntype = producer, port, ntype
        self.consumers: list[Call] = []
        self.unique_name = f"{port}~~~{producer.module.name}~~~{uuid.uuid4()}"
        """Never changes, and is that of no other tensor."""
        self.user_name: str | None = None
        """What `rename` gave it."""

    @property
    def name(self) -> str:
        """The port that it comes from, or what `rename` gave it."""
        return self.user_name or self.port

    def rename(self, new_name: str) -> None:
        """Give it a name by which callbacks can ask for it; it takes the place of an earlier one.

        Raises:
            TypeError: It is no text.
            KeyError: The name is in use in this graph, or is that of the training loss.
        """
        if not isinstance(new_name, str) or not new_name:
            raise TypeError(f"a tensor's name is a text of at least one letter; got {new_name!r}. {self.name!r} keeps its own.")
        others = [tensor for tensor in connected([self]) if tensor is not self]
        taken = {name for tensor in others for name in (tensor.user_name, tensor.unique_name)} | {LOSS}
        if new_name in taken:
            raise KeyError(f"the name {new_name!r} is taken in this graph; {self.name!r} keeps its own. Choose another.")
        self.user_name = new_name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"NmTensor({self.unique_name!r})"


def connected(tensors: Iterable[NmTensor]) -> list[NmTensor]:
    """Return all tensors that hang together with these: what they are made of, and all that is made of that."""
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
    """Yield the calls that give the wanted tensors, each after those it needs; `there` are values that need none."""
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
    """Something with ports.

    Args:
        name: What it is called in names of tensors; by default its class in lower case, and a number.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            kind = self._kind().lower()
            name, _COUNTS[kind] = f"{kind}{_COUNTS[kind]}", _COUNTS[kind] + 1
        self.name = name

    @property
    def input_ports(self) -> Ports:
        """Names of inputs and what they take; None takes anything."""
        return {}

    @property
    def output_ports(self) -> Ports:
        """Names of outputs and what they give, in order."""
        return {}

    @property
    def num_weights(self) -> int:
        """How many trainable numbers it has."""
        return 0

    @abstractmethod
    def carry_out(self, **values: Any) -> Any:
        """Compute the outputs, in the order of the ports, from real values."""

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Write down a use of the module: one NmTensor, or a tuple of them in the order of the output ports.

        Raises:
            NeuralPortNameMismatchError: An input that is no port, or one that is missing.
            NeuralPortNmTensorMismatchError: A tensor that does not fit its port.
        """
        if not any(isinstance(value, NmTensor) for value in (*arguments, *inputs.values())) and (arguments or inputs):
            return self.carry_out(*arguments, **inputs)
        if arguments:
            raise NeuralPortNameMismatchError(f"{self.name} ({self}) takes NmTensors by name: {list(self.input_ports)}")
        inputs = {port: value for port, value in inputs.items() if value is not None}
        _check(self, inputs)
        call = Call(self, inputs, {port: type or ANY for port, type in self.output_ports.items()})
        return call.outputs[0] if len(call.outputs) == 1 else tuple(call.outputs)

    @classmethod
    def _kind(cls) -> str:
        """What it is called in messages, in names of files and, in lower case, in default names."""
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
                f"port {port!r} of {module.name} ({module}) got a {type(tensor).__name__} beside NmTensors; give an NmTensor, "
                "as a data layer or another module returns it"
            )
        if not (ports[port] or ANY).takes(tensor.ntype):
            raise NeuralPortNmTensorMismatchError(
                f"port {port!r} of {module.name} ({module}) takes {ports[port]}; got {tensor.name!r} of "
                f"{tensor.producer.module.name} with {tensor.ntype}"
            )
    missing = [port for port, type in ports.items() if port not in inputs and not (type or ANY).optional]
    if missing:
        raise NeuralPortNameMismatchError(f"{module.name} ({module}) was called without {missing}; give it by name")

"""The graph as it is written down: calls of modules, and the tensors that they will give."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cadenza.compat.neural.ports import NeuralType

if TYPE_CHECKING:
    from cadenza.compat.neural.modules import NeuralModule

LOSS = "loss"  # the name under which the training loss is known


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

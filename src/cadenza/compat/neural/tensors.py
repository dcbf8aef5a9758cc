"""A graph of neural modules, their calls, and the resulting tensors. Nothing is computed here."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from cadenza.compat.neural import kinds
from cadenza.compat.neural.configs import Configurable
from cadenza.compat.neural.defaults import Factory, default_factory, placement_now
from cadenza.compat.neural.kinds import DeviceType, ModuleType, OperationMode, Optimization
from cadenza.compat.neural.ports import ANY, NeuralPortNameMismatchError, NeuralPortNmTensorMismatchError, NeuralType
from cadenza.compat.neural.weights import Renames, Weights
from cadenza.errors import nearest
from cadenza.status.reprs import signature_of

Ports = Mapping[str, NeuralType | None]

LOSS = "loss"  # the name of the training loss

_COUNTS: Counter[str] = Counter()  # for default names alone; two modules may have one name
_CALLS = count()

LIVE_MODULES: WeakSet[NeuralModule] = WeakSet()
"""Used only by `AppState`. It holds weak references."""


class StepModulePort(NamedTuple):
    """A port of a module in one call."""

    step_number: int
    """The index of the call among all calls of modules in this process."""
    module_name: str
    port_name: str


class Connection(NamedTuple):
    """A tensor between two ports."""

    producer: StepModulePort
    consumer: StepModulePort
    ntype: NeuralType


class Call:
    """One use of a module in a graph."""

    def __init__(self, module: NeuralModule, inputs: Mapping[str, NmTensor], outputs: Mapping[str, NeuralType]) -> None:
        self.module: NeuralModule = module
        self.inputs: dict[str, NmTensor] = dict(inputs)
        self.number: int = next(_CALLS)
        made = [NmTensor(self, port, type) for port, type in outputs.items()]
        self.made: list[NmTensor] | None = made
        """The tensors of its outputs, until they are returned to the user."""
        self.names: list[tuple[str, str]] = [(tensor.output_port_name, tensor.unique_name) for tensor in made]
        """The port and the unique name of each output, in order."""
        self._outputs = [ref(tensor) for tensor in made]
        for tensor in dict.fromkeys(self.inputs.values()):  # each once, though it may go into two ports
            tensor._uses.append(ref(self))
            tensor.consumers += [self.port(port) for port, source in self.inputs.items() if source is tensor]

    @property
    def outputs(self) -> list[NmTensor]:
        """Its outputs that the user or another call still references."""
        return [tensor for output in self._outputs if (tensor := output()) is not None]

    def port(self, name: str) -> StepModulePort:
        """Return one of its ports."""
        return StepModulePort(self.number, self.module.name, name)


class NmTensor(NeuralType):
    """A description of a value that a module will compute; it holds no data. It has the type of its port.

    It references its call, and a call its inputs; reverse references are weak. There is no registry.
    """

    def __init__(self, call: Call, port: str, ntype: NeuralType) -> None:
        super().__init__(ntype.axes, ntype.elements_type, ntype.optional)
        self.call: Call = call
        self.ntype: NeuralType = ntype
        self.output_port_name: str = port
        self._uses: list[ref[Call]] = []
        self.consumers: list[StepModulePort] = []
        """The input ports that consume it, in call order."""
        self.unique_name: str = f"{port}~~~{call.module.name}~~~{uuid.uuid4()}"
        """Unique and constant."""
        self.user_name: str | None = None
        """The name from `rename`."""

    @property
    def name(self) -> str:
        """The name from `rename`, or the name of the port."""
        return self.user_name or self.output_port_name

    @property
    def uses(self) -> list[Call]:
        """The calls that need it."""
        return [call for reference in self._uses if (call := reference()) is not None]

    @property
    def producer(self) -> NeuralModule:
        """The module that computes it."""
        return self.call.module

    @property
    def producer_name(self) -> str:
        """The name of the module that computes it."""
        return self.call.module.name

    @property
    def producer_args(self) -> dict[str, NmTensor]:
        """The inputs of the call that computes it, by port."""
        return self.call.inputs

    @property
    def producer_step_number(self) -> int:
        """The index of the call that computes it."""
        return self.call.number

    @property
    def producer_step_module_port(self) -> StepModulePort:
        """The output port that it comes from."""
        return self.call.port(self.output_port_name)

    def connections(self) -> list[Connection]:
        """Return its connections to these input ports."""
        return [Connection(self.producer_step_module_port, consumer, self.ntype) for consumer in self.consumers]

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


def tensor_list(name: str, given: object) -> list[NmTensor]:
    """Return one NmTensor, or a sequence of them, as a list.

    Raises:
        TypeError: It is neither.
    """
    tensors = [given] if isinstance(given, NmTensor) else given
    if isinstance(tensors, list | tuple) and all(isinstance(tensor, NmTensor) for tensor in tensors):
        return list(tensors)
    raise TypeError(f"{name} must be a list of NmTensors, which calls of modules return; got {given!r}")


def connected(tensors: Iterable[NmTensor]) -> list[NmTensor]:
    """Return all tensors that are connected to these through calls, in both directions."""
    found: dict[NmTensor, None] = {}
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if tensor not in found:
            found[tensor] = None
            for call in (tensor.call, *tensor.uses):
                waiting += [*call.inputs.values(), *call.outputs]
    return list(found)


def calls_for(wanted: Iterable[NmTensor], there: Iterable[str] = ()) -> Iterator[Call]:
    """Yield the calls that compute the wanted tensors, each after its dependencies. The names `there` are already computed."""
    done: set[Call] = set()
    known = set(there)
    for tensor in wanted:
        yield from _needed(tensor, known, done)


def _needed(tensor: NmTensor, known: set[str], done: set[Call]) -> Iterator[Call]:
    call = tensor.call
    if tensor.unique_name in known or call in done:
        return
    done.add(call)
    for source in call.inputs.values():
        yield from _needed(source, known, done)
    yield call


class NeuralModule(Configurable):
    """A module with named inputs and outputs. A call with NmTensors adds to a graph and computes nothing.

    Args:
        name: Its name in the names of tensors; by default its class in lower case, and a number.
    """

    _module_type = ModuleType.module

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            kind = self._kind().lower()
            name, _COUNTS[kind] = f"{kind}{_COUNTS[kind]}", _COUNTS[kind] + 1
        self.name = name
        self.unique_instance_id: str = str(uuid.uuid4())
        """Unique and constant; part of the names of `ModuleSaverCallback`'s files."""
        self.operation_mode = OperationMode.both
        self._placement = placement_now()
        self._device = kinds.device_of(self._placement)
        """For tensors that a module creates. A training moves weights and batches to its device."""
        LIVE_MODULES.add(self)

    # -- what a subclass defines ------------------------------------------------------------------------

    @property
    def input_ports(self) -> Ports:
        """The types of the inputs by name; None accepts any type."""
        return {}

    @property
    def output_ports(self) -> Ports:
        """The types of the outputs by name, in order; None is any type."""
        return {}

    @abstractmethod
    def _compute_outputs(self, **values: Any) -> Any:  # private, since a subclass may use the public name for an attribute
        """Compute the outputs, in the order of the ports."""

    # -- attributes ------------------------------------------------------------------------------------------

    @property
    def type(self) -> Any:  # not ModuleType: nn.Module has a method of this name
        """Its `ModuleType`. NeMo 0.10 has no such attribute, so that a subclass may set its own."""
        return self._module_type

    @type.setter
    def type(self, value: Any) -> None:
        self._module_type = value

    @property
    def placement(self) -> DeviceType:
        """The device of the factory at its construction."""
        return self._placement

    @property
    def factory(self) -> Factory | None:
        """The default factory; None without one."""
        return default_factory()

    # private names of NeMo's base class that user modules read

    @property
    def _factory(self) -> Factory | None:
        return default_factory()

    @property
    def _opt_level(self) -> Optimization:
        factory = default_factory()
        return Optimization.mxprO0 if factory is None else factory.optim_level

    @property
    def _uuid(self) -> str:
        return self.unique_instance_id

    # -- calls ------------------------------------------------------------------------------------------

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Add a call to the graph; return one NmTensor, or a named tuple of them in the order of the output ports.

        With values instead of NmTensors, or with ``force_pt=True``, compute the outputs of these values.

        Raises:
            NeuralPortNameMismatchError: An input is not a port, or an input is missing.
            NeuralPortNmTensorMismatchError: A tensor does not fit its port.
        """
        force_pt = inputs.pop("force_pt", False)
        with_tensors = any(isinstance(value, NmTensor) for value in (*arguments, *inputs.values()))
        if force_pt or (not with_tensors and (arguments or inputs)):
            return self._compute_outputs(*arguments, **inputs)
        if arguments:
            raise NeuralPortNameMismatchError(
                f"{self.name} ({self}) accepts NmTensors by name only. Its ports are {list(self.input_ports)}."
            )
        inputs = {port: value for port, value in inputs.items() if value is not None}
        _check(self, inputs)
        call = Call(self, inputs, {port: type or ANY for port, type in self.output_ports.items()})
        made, call.made = call.made or [], None
        return made[0] if len(made) == 1 else _named_outputs(self, made)

    @classmethod
    def _kind(cls) -> str:
        """Return its name in messages and files. Default names have it in lower case."""
        return cls.__name__

    def __str__(self) -> str:
        return self._kind()

    # -- weights: a module without any has nothing to do ------------------------------------------------

    @property
    def num_weights(self) -> int:
        """The number of its trainable parameters."""
        return 0

    def is_trainable(self) -> bool:
        """Return whether it has trainable parameters."""
        return self.num_weights > 0

    def get_weights(self) -> Weights | None:
        """Return its weights by name, each with whether it is trainable; None for a module without weights."""
        return None

    def set_weights(self, name2weight: Weights, name2name_and_transform: Renames | None = None) -> None:
        """Copy the values of weights of another module."""

    def tie_weights_with(
        self, module: Any, weight_names: Iterable[str], name2name_and_transform: Renames | None = None
    ) -> None:
        """Use weights of another module."""

    def save_to(self, path: str) -> None:
        """Write its weights to a file."""

    def restore_from(self, path: str, local_rank: int | None = 0) -> None:
        """Read its weights from a file of `save_to`, or of a checkpoint of NeMo.

        Raises:
            NotImplementedError: It has no weights.
        """
        raise NotImplementedError(f"{self.name} ({self}) has no weights to restore")

    def freeze(self, weights: Iterable[str] | None = None) -> None:
        """Freeze all of its weights, or these."""

    def unfreeze(self, weights: Iterable[str] | None = None) -> None:
        """Unfreeze all of its weights, or these."""


def _named_outputs(module: NeuralModule, made: Sequence[NmTensor]) -> Any:
    kind = f"{type(module).__name__.strip('_')}Output"
    ports = [tensor.output_port_name for tensor in made]
    outputs: Any = namedtuple(kind, ports, rename=True)  # type: ignore[misc]  # the ports are known at a call only
    return outputs(*made)


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
        accepted = ports[port] or ANY
        if not accepted.accepts(tensor.ntype):
            raise NeuralPortNmTensorMismatchError(
                f"port {port!r} of {module.name} ({module}) accepts {accepted}; got {tensor.name!r} of {tensor.producer_name} "
                f"with {tensor.ntype}. The result of the comparison is {accepted.compare(tensor.ntype).name}."
            )
    absent = [port for port, type in ports.items() if port not in inputs and not (type or ANY).optional]
    if missing := [port for port in absent if port not in _with_default(module)]:
        raise NeuralPortNameMismatchError(f"{module.name} ({module}) was called without {missing}. Pass it by name.")


def _with_default(module: NeuralModule) -> set[str]:
    """Return the inputs that have a default: a call may leave them out, even if their ports are not optional."""
    compute = getattr(module, "forward", None) or getattr(module, "_loss_function", None)
    known = {} if compute is None else signature_of(compute).parameters
    return {name for name, parameter in known.items() if parameter.default is not Parameter.empty}

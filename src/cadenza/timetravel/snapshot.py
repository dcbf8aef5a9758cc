"""The state of a step: copied, restored in the same objects, computed again and compared."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cadenza.drivers.sharding import checksum, local, same_bits
from cadenza.engine.session import Session
from cadenza.engine.weight_update import complete_window
from cadenza.loading.rng import RNGState, preserve_rng_state
from cadenza.optim.model_state import is_compiled
from cadenza.optim.non_finite import tensors_at
from cadenza.optim.parameters import parameters_of
from cadenza.status.outputs import Outputs

_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, MethodType, nn.Module, torch.device)
_CONTAINERS = (list, dict, set, deque)
_LONGEST = 10_000  # a longer container holds data: only its order is state, and its entries are not visited


class Snapshot:
    """The present state of objects, to restore it in the same objects: attributes, containers, tensors, random generators.

    References to parts of them stay valid, such as those of a wrapper to the parameter groups of its inner optimizer.

    Args:
        holders: Modules, and other objects of which the attributes are state, the entries of containers in them, and the
            tensors in both. Objects in them are not visited.
        objects: Objects of which all parts are state, such as optimizers and loaders. Modules, functions, classes and objects
            of the standard library in them, such as threads and files, are not visited.
        on_host: Whether tensors are copied to the host. Else a tensor is only written if its bits differ: its version stays.
        data: Whether all tensors are copied; else only one-dimensional integer tensors, such as indices.
        since: An earlier snapshot: of a tensor with the same bits, its copy is used.
    """

    def __init__(
        self,
        holders: Iterable[Any] = (),
        objects: Iterable[Any] = (),
        *,
        on_host: bool,
        data: bool = True,
        since: Snapshot | None = None,
    ) -> None:
        self._on_host, self._data, self._since = on_host, data, since
        self._seen: dict[int, Any] = {}  # keeps each object alive, so that ids stay unique
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        for holder in holders:
            for value in self._attributes_of(holder):
                for part in self._entries_of(value) if isinstance(value, _CONTAINERS) else (value,):
                    if isinstance(part, Tensor):
                        self._copy(part)
        self._since = None  # an earlier snapshot may be freed
        pending = deque(objects)
        while pending:
            pending.extend(self._look_at(pending.popleft()))

    def restore(self) -> None:
        """Restore the state in place."""
        for current, before in self._attributes:
            for name in current.keys() - before.keys():
                del current[name]
            current.update(before)
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                if self._on_host or not same_bits(tensor, value):
                    local(tensor).copy_(value)
        for array, values in self._arrays:
            array[:] = values
        for put, state in self._generators:
            put(state)

    def _attributes_of(self, holder: Any) -> Iterable[Any]:
        self._attributes.append((vars(holder), dict(vars(holder))))
        return [*vars(holder).values()]

    def _entries_of(self, container: Any) -> Iterable[Any]:
        if not isinstance(container, tuple):
            self._containers.append((container, copy(container)))
        if len(container) > _LONGEST:
            return ()
        return [*container.values()] if isinstance(container, dict) else [*container]

    def _copy(self, tensor: Tensor) -> None:
        known, value = id(tensor), local(tensor)
        if known in self._tensors or tensor.is_meta:
            return
        before = None if self._since is None else self._since._tensors.get(known)
        if before is not None and same_bits(value, before[1]):
            self._tensors[known] = tensor, before[1]
        else:
            self._tensors[known] = tensor, value.to("cpu", copy=True) if self._on_host else value.clone()

    def _look_at(self, value: Any) -> Iterable[Any]:
        """Copy the state of one object; return the objects that it holds."""
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return ()
        self._seen[id(value)] = value
        room = type(value).__module__.partition(".")[0]
        if isinstance(value, Tensor):
            if self._data or (value.ndim == 1 and not value.is_floating_point()):
                self._copy(value)
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif room == "numpy":
            self._look_at_numpy(value)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            return self._entries_of(value)
        elif room not in sys.stdlib_module_names and hasattr(value, "__dict__"):
            return self._attributes_of(value)
        return ()

    def _look_at_numpy(self, value: Any) -> None:
        name = type(value).__name__
        if name == "RandomState":
            self._generators.append((value.set_state, value.get_state()))
        elif name == "Generator":
            inner = value.bit_generator
            self._generators.append((lambda state: setattr(inner, "state", state), deepcopy(inner.state)))
        elif name == "ndarray" and value.ndim == 1 and value.dtype.kind in "biu":
            self._arrays.append((value, value.copy()))


@contextmanager
def undone(session: Session) -> Iterator[None]:
    """Restore model, optimizers, gradients, fp16 scaler and RNG state at the exit, after an error too.

    A LightningModule logs nothing meanwhile.

    The copies are on the host, so they take no memory of the device.
    """
    wrapper, mode = session.model, session.model.training
    holders = [*session.module.modules(), session.precision, getattr(session.precision, "scaler", None)]
    without_effects = getattr(inspect.unwrap(session.compute), "without_effects", nullcontext)
    with preserve_rng_state(), without_effects():
        # A wrapper such as SAM or Lookahead holds another optimizer, and tensors that no state_dict contains.
        before = Snapshot((holder for holder in holders if holder is not None), session.optimizers, on_host=True)
        gradients = [
            (parameter, parameter.grad) for parameter in chain(session.module.parameters(), parameters_of(session.optimizers))
        ]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            before.restore()
            wrapper.training = mode
            for parameter, gradient in gradients:
                parameter.grad = gradient


KINDS = ("weight", "module", "output", "buffer", "gradient")
"""The kinds of results, in the order in which a message names them: a changed weight explains all others."""


@dataclass(slots=True)
class Pass:
    """The results of computing a step once."""

    sums: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """By kind, the name and the checksum of each result, in the order in which they were computed."""
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    """The gradient of each parameter, by its id."""
    after: Snapshot | None = None
    """The weights, buffers and attributes of the modules after the pass."""

    def differences(self, other: Pass) -> dict[str, str]:
        """Return the first difference of each kind that differs, by kind."""
        found = {kind: _first(self.sums[kind], other.sums[kind]) for kind in KINDS}
        return {kind: name for kind, name in found.items() if name is not None}


def _first(mine: list[tuple[str, int]], theirs: list[tuple[str, int]]) -> str | None:
    for (name, value), (other, two) in zip(mine, theirs, strict=False):
        if (name, value) != (other, two):
            return name
    if len(mine) != len(theirs):
        return (mine + theirs)[min(len(mine), len(theirs))][0]
    return None


@dataclass(slots=True)
class _Batch:
    batch: Any
    rng: RNGState
    held_back: bool
    loss: Tensor | None = None


class StepRepeat:
    """Takes a snapshot before the first batch of a step; computes the step again, from there, with each call of `again`.

    It replaces the function that computes a batch, so it sees the batch after all hooks of ``on_batch_start``. The hooks of
    callbacks are not called again. All that the forward and the backward pass change is put back: weights, buffers, gradients,
    RNG states, and attributes of modules.

    Args:
        session: The session, with a ``compute_loss``.

    The step must be between ``on_step_start`` and its update. Memory: a copy of weights, buffers and batches, and on several
    ranks of the gradients.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.step: int = session.progress.step + 1
        """The number of the step."""
        self._compute = session.compute
        self._batches: list[_Batch] = []
        self._before: Snapshot | None = None
        self._gradients: dict[int, Tensor | None] = {}
        self._pass = Pass()
        self._traced = -1  # the batch that is computed now
        self._handles: list[RemovableHandle] = []
        session.compute = self._first_time
        modules = dict(session.module.named_modules())
        if not any(map(is_compiled, modules.values())):  # hooks would have it compiled anew, with other bits
            for name, module in modules.items():
                self._handles.append(module.register_forward_hook(self._tracer(name, module)))

    def close(self) -> None:
        """Compute the next batches as before."""
        self.session.compute = self._compute
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before, self._pass = None, Pass()  # which hold the hooks of the modules, and these refer to this object

    @property
    def obstacle(self) -> str | None:
        """Why the step cannot be repeated; None if it can."""
        window = self.session.step.window
        if window.left_out or len(window.losses) != len(self._batches) or not self._batches:
            return "a batch was skipped"
        for batch, used in zip(self._batches, window.losses, strict=True):
            if batch.loss is None or batch.loss.data_ptr() != used.data_ptr():
                return "a callback replaced the loss in on_before_backward"
        return None

    def original(self) -> Pass:
        """Return the results of the step itself, before they are used for the update."""
        return self._results(self._pass)

    def again(self) -> Pass:
        """Compute the step once more, from its snapshot, and return the results. Every rank must call this."""
        session, window = self.session, self.session.step.window
        self._put_back()
        self._pass = Pass()
        for index, batch in enumerate(self._batches):
            batch.rng.restore()
            with session.driver.no_sync(session.model) if batch.held_back else nullcontext(), torch.enable_grad():
                outputs = Outputs()
                outputs.take(self._computed(index, session.model, deepcopy(batch.batch)))
                scale = window.scale_of(index)
                shared = window.of_ranks is not None
                if type(scale) is not float or scale or (shared and not session.driver.adds_nothing):
                    session.precision.backward(outputs["loss"], scale)
                elif shared and not batch.held_back:
                    session.driver.add_no_gradients(session.model, outputs["loss"])
        complete_window(session)
        if session.driver.reduces:
            session.driver.average_gradients(session.extra_parameters.parameters)
        session.precision.unscale_again(session.optimizers)
        return self._results(self._pass)

    @contextmanager
    def repeating(self) -> Iterator[Pass]:
        """Yield the results of the step itself; at the end put them back, and the RNG state.

        `again` may be called inside. If the block raises, the same happens.
        """
        rng, mine = RNGState.capture(), self.original()
        kept = [(parameter, parameter.grad) for parameter in self._parameters()]
        try:
            yield mine
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
            self.use(mine)
            rng.restore()

    def use(self, result: Pass) -> None:
        """Continue with the weights, buffers and gradients of one pass."""
        assert result.after is not None, "the pass is complete"
        result.after.restore()
        for parameter in self._parameters():
            gradient = result.gradients[id(parameter)]
            if parameter.grad is None or gradient is None:
                parameter.grad = gradient
            elif not same_bits(parameter.grad, gradient):
                local(parameter.grad).copy_(local(gradient))

    # -- the step itself -------------------------------------------------------------------------------

    def _first_time(self, model: nn.Module, batch: Any) -> Any:
        session = self.session
        if session.progress.step + 1 != self.step:  # the step had no update
            self.close()
            return self._compute(model, batch)
        if not self._batches:
            self._before = self._snapshot()
            self._gradients = {
                id(parameter): None if parameter.grad is None else parameter.grad.clone() for parameter in self._parameters()
            }
        repeated = _Batch(deepcopy(batch), RNGState.capture(), session.sync.holds_back)
        self._batches.append(repeated)
        result = self._computed(len(self._batches) - 1, model, batch)
        outputs = Outputs()
        outputs.take(result)
        repeated.loss = outputs["loss"] if isinstance(outputs["loss"], Tensor) else None
        return result

    def _computed(self, index: int, model: nn.Module, batch: Any) -> Any:
        self._traced = index
        try:
            result = self._compute(model, batch)
        finally:
            self._traced = -1
        where = f" of batch {index + 1}" if self.session.step.window.size > 1 else ""
        path = "the loss" if isinstance(result, Tensor) else "outputs"
        self._pass.sums["output"] += [(f"{at}{where}", checksum(value)) for at, value in tensors_at(result, path)]
        return result

    def _tracer(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        label = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"

        def trace(_: nn.Module, arguments: Any, output: Any) -> None:
            if self._traced >= 0:
                where = f" in batch {self._traced + 1}" if self.session.step.window.size > 1 else ""
                self._pass.sums["module"] += [(label + where, checksum(value)) for _, value in tensors_at(output, "")]

        return trace

    # -- its state -------------------------------------------------------------------------------------

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.session.module.named_modules()
        for loss in self.session.extra_parameters.modules:
            yield from loss.named_modules(prefix="loss")

    def _parameters(self) -> list[Tensor]:
        held = [*self.session.module.parameters(), *self.session.extra_parameters.parameters]
        return list({id(value): value for value in held}.values())

    def _snapshot(self) -> Snapshot:
        return Snapshot((submodule for _, submodule in self._modules()), on_host=False, since=self._before)

    def _put_back(self) -> None:
        """Set weights, buffers, gradients and attributes to their values before the step."""
        if self._before is not None:
            self._before.restore()
        for parameter in self._parameters():
            gradient = self._gradients[id(parameter)]
            parameter.grad = None if gradient is None else gradient.clone()

    def _results(self, result: Pass) -> Pass:
        """Complete the results of a pass: weights, buffers and gradients as they are now."""
        known = set[int]()
        for prefix, module in self._modules():
            for kind, holder in (("weight", module._parameters), ("buffer", module._buffers)):
                for key, tensor in holder.items():
                    if tensor is not None and id(tensor) not in known:
                        known.add(id(tensor))
                        result.sums[kind].append((repr(f"{prefix}.{key}" if prefix else key), checksum(tensor)))
        names = {id(parameter): repr(name) for name, parameter in self.session.module.named_parameters()}
        found: list[tuple[str, int]] = []
        for parameter in self._parameters():
            gradient = parameter.grad
            # Memory of the driver, such as the buckets of DDP, is written again by the next pass.
            result.gradients[id(parameter)] = (
                gradient.clone() if gradient is not None and self.session.driver.reduces else gradient
            )
            if gradient is not None:
                found.append((names.get(id(parameter), "a parameter outside of the model"), checksum(gradient)))
        result.sums["gradient"] = found[::-1]  # the backward pass begins with the last ones
        result.after = self._snapshot()
        return result


def named(differences: Mapping[str, str]) -> str:
    """Describe differences in one line.

    >>> named({"module": "'0' (Linear)", "gradient": "'0.bias'"})
    "the output of module '0' (Linear), the gradient of '0.bias'"
    >>> named({"module": "the model (Linear)"})
    'the output of the model (Linear)'
    """
    texts = {
        "weight": "the weight {}",
        "module": "the output of module {}",
        "output": "{}",
        "buffer": "the buffer {}",
        "gradient": "the gradient of {}",
    }
    text = ", ".join(texts[kind].format(name) for kind, name in differences.items())
    return text.replace("module the model", "the model")

"""Compute the batches of a step a second time, before the update, and compare the bits. The run goes on as if it had not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cadenza.drivers.sharding import checksum, local, same_bits
from cadenza.engine.session import Session
from cadenza.engine.updating import complete_window
from cadenza.loading.rng import RNGState
from cadenza.optim.finite import tensors_at
from cadenza.optim.model_state import is_compiled
from cadenza.status.outputs import Outputs
from cadenza.timetravel.restore_point import restore_in_place

_OF_TORCH = frozenset(vars(nn.Module()))  # weights and buffers are slots of their own, and hooks do not change
_LONGEST = 10_000  # the entries of a longer container are not copied
KINDS = ("weight", "module", "output", "buffer", "gradient")
"""The kinds of results, in the order in which a message names them: a changed weight explains all others."""


@dataclass(slots=True)
class Pass:
    """The results of computing a step once."""

    sums: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """By kind, the name and the checksum of each result, in the order in which they were computed."""
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    """The gradient of each parameter, by its id."""
    changed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By the index of a slot, the tensor in it and its values, if they are not those before the step."""
    attributes: _Attributes | None = None
    """The attributes of the modules after the pass."""

    def differences(self, other: Pass) -> dict[str, str]:
        """Return the first difference of each kind that differs, by kind."""
        found = {kind: _first(self.sums[kind], other.sums[kind]) for kind in KINDS}
        return {kind: name for kind, name in found.items() if name is not None}


def _first(mine: list[tuple[str, int]], theirs: list[tuple[str, int]]) -> str | None:
    for (name, one), (other, two) in zip(mine, theirs, strict=False):
        if (name, one) != (other, two):
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


@dataclass(slots=True)
class _Slot:
    """A weight or a buffer, which a module holds by a name."""

    kind: str
    name: str
    holder: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    before: Tensor

    @property
    def now(self) -> Tensor:
        value = self.holder[self.key]
        return self.tensor if value is None else value


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
        self._slots: list[_Slot] = []
        self._gradients: dict[int, Tensor | None] = {}
        self._attributes: _Attributes | None = None
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

    @property
    def obstacle(self) -> str | None:
        """Why the step cannot be repeated; None if it can."""
        window = self.session.step.window
        if window.left_out or len(window.losses) != len(self._batches) or not self._batches:
            return "a batch was skipped"
        for one, used in zip(self._batches, window.losses, strict=True):
            if one.loss is None or one.loss.data_ptr() != used.data_ptr():
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
        for index, one in enumerate(self._batches):
            one.rng.restore()
            with session.driver.no_sync(session.model) if one.held_back else nullcontext(), torch.enable_grad():
                outputs = Outputs()
                outputs.take(self._computed(index, session.model, deepcopy(one.batch)))
                scale = window.scale_of(index)
                shared = window.of_ranks is not None
                if type(scale) is not float or scale or (shared and not session.driver.adds_nothing):
                    session.precision.backward(outputs["loss"], scale)
                elif shared and not one.held_back:
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
        kept = [(one, one.grad) for one in self._parameters()]
        try:
            yield mine
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
            self.use(mine)
            rng.restore()

    def use(self, result: Pass) -> None:
        """Continue with the weights, buffers and gradients of one pass."""
        if result.attributes is not None:
            result.attributes.restore()
        with torch.no_grad():
            self._put_back_tensors()
            for index, (tensor, value) in result.changed.items():
                slot = self._slots[index]
                slot.holder[slot.key] = tensor
                _fill(tensor, value)
            for parameter in self._parameters():
                gradient = result.gradients[id(parameter)]
                if parameter.grad is None or gradient is None:
                    parameter.grad = gradient
                else:
                    _fill(parameter.grad, gradient)

    # -- the step itself -------------------------------------------------------------------------------

    def _first_time(self, model: nn.Module, batch: Any) -> Any:
        session = self.session
        if session.progress.step + 1 != self.step:  # the step had no update
            self.close()
            return self._compute(model, batch)
        if not self._batches:
            self._take_snapshot()
        one = _Batch(deepcopy(batch), RNGState.capture(), session.sync.holds_back)
        self._batches.append(one)
        result = self._computed(len(self._batches) - 1, model, batch)
        outputs = Outputs()
        outputs.take(result)
        one.loss = outputs["loss"] if isinstance(outputs["loss"], Tensor) else None
        return result

    def _computed(self, index: int, model: nn.Module, batch: Any) -> Any:
        self._traced = index
        try:
            result = self._compute(model, batch)
        finally:
            self._traced = -1
        where = f" of batch {index + 1}" if self.session.step.window.size > 1 else ""
        path = "the loss" if isinstance(result, Tensor) else "outputs"
        self._pass.sums["output"] += [(f"{at}{where}", checksum(one)) for at, one in tensors_at(result, path)]
        return result

    def _tracer(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        label = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"

        def trace(_: nn.Module, arguments: Any, output: Any) -> None:
            if self._traced >= 0:
                where = f" in batch {self._traced + 1}" if self.session.step.window.size > 1 else ""
                self._pass.sums["module"] += [(label + where, checksum(one)) for _, one in tensors_at(output, "")]

        return trace

    # -- its state -------------------------------------------------------------------------------------

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.session.module.named_modules()
        for loss in self.session.extra_parameters.modules:
            yield from loss.named_modules(prefix="loss")

    def _parameters(self) -> list[Tensor]:
        held = [*self.session.module.parameters(), *self.session.extra_parameters.parameters]
        return list({id(one): one for one in held}.values())

    def _take_snapshot(self) -> None:
        known: set[int] = set()
        for prefix, module in self._modules():
            for kind, holder in (("weight", module._parameters), ("buffer", module._buffers)):
                for key, tensor in holder.items():
                    if tensor is not None and id(tensor) not in known:
                        known.add(id(tensor))
                        name = f"{prefix}.{key}" if prefix else key
                        held: Any = holder  # a dict of parameters is one of tensors here
                        self._slots.append(_Slot(kind, name, held, key, tensor, local(tensor).clone()))
        self._gradients = {id(one): None if one.grad is None else one.grad.clone() for one in self._parameters()}
        self._attributes = _Attributes(one for _, one in self._modules())

    def _results(self, result: Pass) -> Pass:
        """Complete the results of a pass: weights, buffers and gradients as they are now."""
        for index, slot in enumerate(self._slots):
            now = slot.now
            result.sums[slot.kind].append((repr(slot.name), checksum(now)))
            if now is not slot.tensor or not same_bits(now, slot.before):
                result.changed[index] = now, local(now).clone()
        names = {id(one): repr(name) for name, one in self.session.module.named_parameters()}
        found: list[tuple[str, int]] = []
        for one in self._parameters():
            gradient = one.grad
            # Memory of the driver, such as the buckets of DDP, is written again by the next pass.
            result.gradients[id(one)] = gradient.clone() if gradient is not None and self.session.driver.reduces else gradient
            if gradient is not None:
                found.append((names.get(id(one), "a parameter outside of the model"), checksum(gradient)))
        result.sums["gradient"] = found[::-1]  # the backward pass begins with the last ones
        result.attributes = _Attributes(one for _, one in self._modules())
        return result

    def _put_back(self) -> None:
        """Set weights, buffers, gradients and attributes to their values before the step."""
        if self._attributes is not None:
            self._attributes.restore()
        with torch.no_grad():
            self._put_back_tensors()
        for one in self._parameters():
            gradient = self._gradients[id(one)]
            one.grad = None if gradient is None else gradient.clone()

    def _put_back_tensors(self) -> None:
        for slot in self._slots:
            slot.holder[slot.key] = slot.tensor
            _fill(slot.tensor, slot.before)


class _Attributes:
    """The attributes of modules, to put them back: also tensors that are no buffers, and the entries of containers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._own = [(vars(module), dict(vars(module))) for module in modules]
        values = [value for own, _ in self._own for name, value in own.items() if name not in _OF_TORCH]
        containers = [one for one in values if isinstance(one, list | dict | set | deque)]
        inner = [[*one.values()] if isinstance(one, dict) else [*one] for one in containers if len(one) <= _LONGEST]
        tensors = {id(one): one for one in chain(values, *inner) if isinstance(one, Tensor) and not one.is_meta}
        self._containers = [(one, copy(one)) for one in containers]
        self._tensors = [(one, local(one).detach().clone()) for one in tensors.values()]

    def restore(self) -> None:
        """Set the attributes to what they were when this object was made."""
        restore_in_place(self._own, self._containers, ())
        with torch.no_grad():
            for tensor, value in self._tensors:
                _fill(tensor, value)


def _fill(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a tensor if their bits differ. A tensor that is equal is not written to: its version stays."""
    target, value = local(tensor), local(value)
    if not same_bits(target, value):
        target.copy_(value)


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

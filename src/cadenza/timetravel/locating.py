"""Find the module, the parameter and the sample at which a number stops being finite, by a second pass over the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.drivers.sharding import is_sharded
from cadenza.loading.batches import tensors_in
from cadenza.loading.rng import RNGState
from cadenza.optim.finite import all_finite, first_not_finite, tensors_at

_MOST_SINGLE = 512  # a batch of more samples is not passed through the model sample by sample


@dataclass(slots=True)
class Located:
    """The first numbers in the batches of one step that were not finite. None and an empty list: all were finite."""

    losses: list[float] = field(default_factory=list)
    """The loss of each batch."""
    weight: str | None = None
    """The first weight or buffer that was not finite before the step."""
    tensor: str | None = None
    """The first tensor of a batch, and its first such number."""
    batch: int | None = None
    """The index of the first batch, from 0, with one of these."""
    module: str | None = None
    """The first module with such an output; else the loss, or the module of the first such gradient."""
    parameter: str | None = None
    """The first parameter with such a gradient in the backward pass, or such a weight before it."""
    rows: list[int] = field(default_factory=list)
    """The samples of that batch, by their index in it."""

    @property
    def found(self) -> bool:
        """Whether something was not finite."""
        return any(one is not None for one in (self.weight, self.tensor, self.module, self.parameter))

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def locate(
    model: nn.Module,
    compute: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    rng_states: Sequence[RNGState],
    others: Sequence[nn.Module] = (),
    *,
    accumulates: bool = True,
) -> Located:
    """Repeat the forward and backward passes of a step, and return where the first number is not finite.

    Gradients are added to the parameters if `accumulates`, buffers change, and the random generators advance: the caller
    restores them. No other rank takes part.

    Args:
        model: The user's own module, in the mode and with the weights and buffers of before the step.
        compute: ``compute(model, batch)``, as the session calls it.
        batches: The batches of the step.
        rng_states: The RNG state before the forward pass of each.
        others: Further modules to watch, such as a loss.
        accumulates: Whether to add gradients to the parameters, which calls the hooks of DDP: these may exchange gradients.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    result = Located(weight=first_not_finite((repr(name), one) for name, one in named))
    for number, (batch, state) in enumerate(zip(batches, rng_states, strict=True)):
        state.restore()
        watch = _Watch(model, others)
        with watch.watching():
            outputs = compute(model, batch)
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            result.losses.append(float(loss.detach()))
            if watch.parameter is None and torch.is_grad_enabled() and loss.requires_grad:
                if accumulates:
                    loss.backward()
                else:
                    held = {id(one): one for module in (model, *others) for one in module.parameters() if one.requires_grad}
                    torch.autograd.grad(loss, [*held.values()], allow_unused=True)
        tensor = first_not_finite(_floats(tensors_at(batch, "batch")))
        finite = bool(torch.isfinite(loss.detach()).all())
        if watch.module is None and watch.parameter is None and tensor is None and finite:
            continue
        result.batch, result.tensor, result.parameter = number, tensor, watch.parameter
        result.module = watch.module or ("the loss" if not finite else watch.of_parameter)
        result.rows = _rows(model, compute, batch, state, watch.output)
        break
    if result.weight is not None:
        result.parameter = result.weight
    return result


def located_in(batches: Sequence[Any]) -> Located:
    """Return the first number in the batches of a step that is not finite, without a pass through the model.

    >>> found = located_in([torch.ones(2, 1), torch.tensor([[1.0], [float("inf")]])])
    >>> found.tensor, found.batch, found.rows
    ('batch is inf, first at index (1, 0)', 1, [1])
    """
    for number, batch in enumerate(batches):
        tensor = first_not_finite(_floats(tensors_at(batch, "batch")))
        if tensor is not None:
            return Located(tensor=tensor, batch=number, rows=_rows_in(batch, _size(batch)))
    return Located()


class _Watch:
    """Hooks on modules and parameters that keep the first one with a number that is not finite."""

    def __init__(self, model: nn.Module, others: Iterable[nn.Module]) -> None:
        self.module: str | None = None
        self.output: Any = None
        self.parameter: str | None = None
        self.of_parameter: str | None = None
        self._model, self._others = model, others

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside."""
        modules = [*self._model.named_modules()]
        with ExitStack() as removing, torch.compiler.set_stance("force_eager"):
            for name, module in chain(modules, (("", one) for one in self._others)):
                kind = type(module).__name__
                called = f"{name!r} ({kind})" if name else f"the model ({kind})" if module is self._model else kind
                removing.callback(module.register_forward_hook(partial(self._look, called)).remove)
            owners = {id(one): (name, module) for name, module in modules for one in module.parameters(recurse=False)}
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    owner, module = owners[id(parameter)]
                    hook = partial(self._look_at_gradient, name, f"{owner!r} ({type(module).__name__})")
                    removing.callback(parameter.register_hook(hook).remove)
            yield

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.module is None and not all_finite(tensors_in(output)):
            self.module, self.output = name, output

    def _look_at_gradient(self, name: str, owner: str, gradient: Tensor) -> None:
        if self.parameter is None and not all_finite([gradient]):
            self.parameter, self.of_parameter = name, f"the backward pass of {owner}"


def _floats(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, one) for name, one in named if one.is_floating_point() or one.is_complex())


def _rows(model: nn.Module, compute: Callable[[nn.Module, Any], Any], batch: Any, state: RNGState, output: Any) -> list[int]:
    """Return the indices of the samples that are not finite: in the batch, in the first such output, or each one alone."""
    size = _size(batch)
    for value in (batch, output):
        bad = _rows_in(value, size)
        if bad and len(bad) < max(size, 2):
            return bad
    if not 1 < size <= _MOST_SINGLE:
        return [0] if size == 1 else []
    alone: list[int] = []
    with torch.no_grad(), suppress(Exception):  # a model may need more than one sample: then they are not told apart
        for row in range(size):
            state.restore()
            outputs = compute(model, _sample(batch, row, size))
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            alone += [] if bool(torch.isfinite(loss).all()) else [row]
        return alone if len(alone) < size else []
    return []


def _rows_in(value: Any, size: int) -> list[int]:
    tensors = (one for _, one in _floats(tensors_at(value, "")) if one.ndim and len(one) == size)
    return sorted({row for one in tensors for row in _bad_rows(one)})


def _bad_rows(tensor: Tensor) -> list[int]:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if is_sharded(dense):
        return []
    found: list[int] = (~dense.isfinite()).flatten(1).any(1).nonzero().flatten().tolist() if dense.ndim > 1 else []
    return found if dense.ndim > 1 else (~dense.isfinite()).nonzero().flatten().tolist()


def _size(batch: Any) -> int:
    return next((len(one) for one in tensors_in(batch) if one.ndim), 0)


def _sample(value: Any, row: int, size: int) -> Any:
    """Return a batch of one sample: each tensor with `size` rows has only this one."""
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.ndim and len(value) == size else value
    if isinstance(value, Mapping):
        return {key: _sample(one, row, size) for key, one in value.items()}
    if isinstance(value, list | tuple):
        parts = [_sample(one, row, size) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value

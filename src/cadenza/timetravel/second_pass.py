"""Repeat the forward and backward pass of a step on one rank alone, and find the first number that is not finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.drivers.collective_check import alone
from cadenza.drivers.sharding import is_sharded
from cadenza.drivers.single import SingleDriver
from cadenza.engine.session import Session
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading.batches import moved, rebuilt, tensors_in
from cadenza.loading.rng import RNGState, preserve_rng_state
from cadenza.loops.run_segment import TrainerArguments
from cadenza.optim.model_state import load_into, state_of
from cadenza.optim.non_finite import all_finite, first_not_finite, tensors_at
from cadenza.optim.parameters import modules_of
from cadenza.status.encoding import same
from cadenza.status.progress import Counters
from cadenza.timetravel.capsule_files import CapsuleContent, read_capsule


@dataclass(frozen=True, slots=True, repr=False)
class RepeatedStep:
    """What `replay_capsule` returns."""

    step: int
    """The number of the step, from 1."""
    batches: Sequence[Any]
    """The batches of the step, on the device."""
    losses: Sequence[float]
    """The loss of each batch now, up to the first that is not finite."""
    recorded: Sequence[float]
    """The loss of each batch in the run."""
    located: Located
    """The first numbers that were not finite."""
    exact: bool
    """Whether the weights are those before the step; else they are the newest earlier ones that were finite."""
    facts: Mapping[str, Any]
    """The facts of the capsule."""

    @property
    def same(self) -> bool:
        """Whether the losses are equal to the recorded ones to the bit, as far as both are known."""
        both = min(len(self.losses), len(self.recorded))
        return same([*self.losses[:both]], [*self.recorded[:both]])

    def __repr__(self) -> str:
        found = self.located.module or self.located.parameter or self.located.tensor
        where = f", first not finite: {found}" if found else ""
        compared = "same losses" if self.same else "other losses"
        if not (self.losses and self.recorded):
            compared = "no losses to compare"
        return f"<RepeatedStep: step {self.step}, {compared}{where}>"


def replay_capsule(trainer: TrainerArguments, path: str | PathLike[str]) -> RepeatedStep:
    """Repeat the forward and backward passes of the step in a capsule, and find the first number that is not finite.

    Call it in a debugger. The model gets the weights of the capsule, and keeps them. Its gradients are those of the step. No
    callback is called and no optimizer steps. If an exception ended the step, it is raised again. One process repeats the part
    of the rank that wrote the capsule, also with a trainer of multiple ranks: it waits for no other.

    Args:
        trainer: A `Trainer` with the model and ``compute_loss`` of the run. With another ``compute_loss``, such as one with a
            correction, the losses may differ.
        path: A capsule; or a run directory, for its last capsule.

    Raises:
        CheckpointError: There is no capsule, or it cannot be read.
        CheckpointMismatchError: Its weights do not fit the model.
        DataError: The capsule holds no batches, as their type cannot be saved.
        DistributedError: The step calls a collective, and other ranks take no part.
        TypeError: `trainer` is no trainer, or has a ``step_fn``, which does not say what the forward pass is.
    """
    if not isinstance(trainer, TrainerArguments):
        raise TypeError(f"replay_capsule(trainer, path) takes a Trainer first; got a {type(trainer).__name__}")
    if trainer.step_fn is not None:
        raise TypeError("replay_capsule repeats compute_loss, and this trainer has a step_fn. Use replay_step.")
    capsule = read_capsule(path)
    if capsule.state["batches"] is None:
        left_out = capsule.facts.get("batches_left_out", "")
        raise DataError(f"the capsule {str(capsule.path)!r} holds no batches: {left_out}. Use replay_step.")
    session = _alone(trainer)._make_session()
    _load_weights(session, capsule)
    batches = [moved(batch, session.driver.device) for batch in capsule.state["batches"]]
    states = [RNGState.from_plain(state) for state in capsule.state["rng"]]
    not_training = {*capsule.facts.get("not_training", ())}
    for name, module in session.module.named_modules():
        module.training = name not in not_training
    session.module.zero_grad()
    facts = capsule.facts
    with preserve_rng_state(), _at_step(session, facts), alone("replay_capsule"):
        located = locate(session.module, session.compute, batches, states, modules_of(inspect.unwrap(session.compute)))
    recorded = [float(loss) for loss in facts["losses"]]
    return RepeatedStep(facts["step"], batches, located.losses, recorded, located, facts["weights_exact"], facts)


def _alone(trainer: TrainerArguments) -> TrainerArguments:
    """Return a trainer that does not wrap the model for multiple ranks."""
    again = copy(trainer)
    if trainer.driver.world_size > 1:
        again.driver = SingleDriver(trainer.driver.device)
    return again


def _at_step(session: Session, facts: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let the counters be those before the step, and a LightningModule know its trainer."""
    first = facts["batches"][0]
    session.progress.begin(Counters(first["epoch"], facts["step"] - 1, 0, first["batch_in_epoch"]), None)
    outside_fit = getattr(inspect.unwrap(session.compute), "outside_fit", None)
    return nullcontext() if outside_fit is None else outside_fit(session.run)


def _load_weights(session: Session, capsule: CapsuleContent) -> None:
    weights = capsule.state["model"]
    if weights is None:
        raise CheckpointMismatchError(
            f"the capsule {str(capsule.path)!r} holds no weights: they were sharded over ranks. Use replay_step."
        )
    other, own = f"the capsule {str(capsule.path)!r} belongs to another model", state_of(session.module)
    if absent := [name for name, value in own.items() if isinstance(value, Tensor) and name not in weights]:
        raise CheckpointMismatchError(f"{other}: it has no {', '.join(map(repr, absent[:3]))}. Give the model of the run.")
    try:
        load_into(session.module, {**own, **weights})
    except RuntimeError as error:
        raise CheckpointMismatchError(f"{other}: {error}") from None


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
        return any(state is not None for state in (self.weight, self.tensor, self.module, self.parameter))


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
    result = Located(weight=first_not_finite((repr(name), tensor) for name, tensor in named))
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
                    held = {
                        id(parameter): parameter
                        for module in (model, *others)
                        for parameter in module.parameters()
                        if parameter.requires_grad
                    }
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
            for name, module in chain(modules, (("", other) for other in self._others)):
                kind = type(module).__name__
                called = f"{name!r} ({kind})" if name else f"the model ({kind})" if module is self._model else kind
                removing.callback(module.register_forward_hook(partial(self._look, called)).remove)
            owners = {
                id(parameter): (name, module) for name, module in modules for parameter in module.parameters(recurse=False)
            }
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
    return ((name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex())


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
    tensors = (state for _, state in _floats(tensors_at(value, "")) if state.ndim and len(state) == size)
    return sorted({row for tensor in tensors for row in _bad_rows(tensor)})


def _bad_rows(tensor: Tensor) -> list[int]:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if is_sharded(dense):
        return []
    found: list[int] = (~dense.isfinite()).flatten(1).any(1).nonzero().flatten().tolist() if dense.ndim > 1 else []
    return found if dense.ndim > 1 else (~dense.isfinite()).nonzero().flatten().tolist()


def _size(batch: Any) -> int:
    return next((len(item) for item in tensors_in(batch) if item.ndim), 0)


def _sample(value: Any, row: int, size: int) -> Any:
    """Return a batch of one sample: each tensor with `size` rows has only this one."""
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.ndim and len(value) == size else value
    return rebuilt(value, lambda part: _sample(part, row, size))

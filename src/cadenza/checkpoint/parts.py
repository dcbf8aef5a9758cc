"""The parts of a checkpoint: for each entry, how to save and how to load it. Nothing else lists what a checkpoint holds."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.checkpoint.other_ranks import Written, data_of
from cadenza.checkpoint.store import Loaded, Stored
from cadenza.checkpoint.store.state_fields import check_moments
from cadenza.drivers.sharding import laid_out, optimizer_laid_out
from cadenza.engine.session import Loops, Session
from cadenza.errors import CadenzaError, CheckpointMismatchError
from cadenza.loading.data_course import DataCourse
from cadenza.loading.rng import RNGState
from cadenza.optim.held_weights import holders_in
from cadenza.optim.optimizers import changed_by_loading, is_of_torch, load_state, loadable
from cadenza.optim.parameters import parameters_of
from cadenza.records.history import History


class Target(NamedTuple):
    """A run that is set up, and the checkpoint that is loaded into it."""

    session: Session
    loaded: Loaded
    own: Mapping[str, Any]
    """The entries of this rank."""
    written: Written
    strict: bool
    """Whether a state without a callback is an error."""


class Part(NamedTuple):
    """An entry in the state of a checkpoint."""

    name: str
    save: Callable[[Session], Any]
    """Returns plain values and tensors."""
    load: Callable[[Target, Any], object] | None = None
    """None: another part loads it, or it is only compared."""
    each_rank: bool = False
    """Whether each rank has its own."""
    optional: bool = False
    """Whether it is left out if it is None."""
    fixed: bool = False
    """Whether it does not change during a run."""


Owner = Callable[[Session], Any]
"""Returns the object in a run that has the state."""


def _state(name: str, owner: Owner, *, each_rank: bool = False) -> Part:
    """Return the part of an object that has ``state_dict`` and ``load_state_dict``."""
    return Part(name, lambda run: owner(run).state_dict(), lambda to, one: owner(to.session).load_state_dict(one), each_rank)


def _attribute(name: str, owner: Owner) -> Part:
    """Return the part of a plain attribute of this name."""
    return Part(name, lambda run: getattr(owner(run), name), lambda to, one: setattr(owner(to.session), name, one))


def _streams(to: Target, plain: Mapping[str, Any]) -> None:
    to.session.restored.rng_state = RNGState.from_plain(plain, _devices(to.session))  # set with the first step


def _devices(session: Session) -> list[int] | None:
    """Return the accelerators of this rank by role: its device, then the others of a split model. None for a run on a CPU.

    A run that continues may have another index, such as on a machine of which it gets another GPU.
    """
    own = session.driver.device
    if own.type == "cpu":
        return None
    held = {one.device.index or 0 for one in session.module.parameters() if one.device.type == own.type}
    return [own.index or 0, *sorted(held - {own.index or 0})]


def _course(to: Target, plain: Sequence[Mapping[str, Any]]) -> None:
    to.session.cursor.course = DataCourse.from_plain(plain)


def _switched(to: Target, flags: Mapping[str, Any]) -> None:
    to.session.module_flags.saved = flags


def _history(to: Target, series: Mapping[str, Any]) -> None:
    metrics = to.session.metrics
    metrics.history = History.from_state(series, metrics.history.limit, to.loaded.state.get("rows"))


def _states_of(session: Session, *, each_rank: bool) -> dict[str, Any]:
    callbacks = {name: one for name, one in session.hooks.callbacks.items() if one.each_rank is each_rank}
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict())}


def _callbacks(to: Target, states: Mapping[str, Any]) -> None:
    callbacks = to.session.hooks.callbacks
    states = {**states, **to.own.get("callbacks of the rank", {})}
    gone = [one for one in states if one not in callbacks]
    fresh = [one for one, callback in callbacks.items() if one not in states and callback.state_dict()]
    if gone or fresh:
        text = f"state of callbacks does not fit: saved but not in the list {gone}; in the list but not saved {fresh}"
        if to.strict:
            raise CheckpointMismatchError(f"{text}. Give the same callbacks under the same names, or strict=False.")
        to.session.warn(text)
    load_callbacks(to.session, to.loaded.name, states)


def load_callbacks(session: Session, checkpoint: str, states: Mapping[str, Any]) -> None:
    """Restore the callbacks of the list that have a state, by name."""
    for name, saved in states.items():
        if name in session.hooks.callbacks:
            with naming(checkpoint, f"callbacks.{name}"):
                session.hooks.callbacks[name].load_state_dict(placed(session, saved))


def _optimizers(to: Target, states: Sequence[Mapping[str, Any]]) -> None:
    session = to.session
    for index, (optimizer, stored) in enumerate(zip(session.optimizers, states, strict=True)):
        saved = loadable(optimizer, stored)
        if change := changed_by_loading(optimizer, saved):
            session.warn(change)
        fits = is_of_torch(saved)
        with naming(to.loaded.name, f"optimizers[{index}]"):
            parameters = list(parameters_of([optimizer]))
            if fits:
                check_moments(optimizer, saved, [one.shape for one in parameters])
            load_state(optimizer, optimizer_laid_out(saved, parameters) if fits else placed(session, saved))
    session.given.take_over(session.run, to.loaded.state.get("given", {}))


def _unused_gradients(session: Session) -> dict[int, Tensor]:
    """Return the gradients of this rank that no update has used yet, by the index of their parameter."""
    return {i: p.grad for i, p in enumerate(parameters_of(session.optimizers)) if p.grad is not None}


def _gradients_of_the_rank(session: Session) -> dict[int, Tensor] | None:
    """Return the gradients of this rank if each rank has its own: in an attached loop.

    The update of the loop averages them. Those of a ``step_fn`` are averaged with each batch.
    """
    apart = session.loop is Loops.ATTACHED and session.driver.reduces and not session.driver.shards
    return _unused_gradients(session) if apart else None


def _gradients(to: Target, gradients: Mapping[int, Tensor]) -> None:
    """Take the gradients for later. On another number of ranks, each rank gets the mean of the ranks that wrote them."""
    by_rank, ranks = to.loaded.by_rank, len(to.loaded.by_rank)
    gradients = to.own.get("gradients", gradients)
    if to.session.loop is Loops.ATTACHED and ranks not in (1, to.session.driver.world_size) and "gradients" in by_rank[1]:
        everyone = [one["gradients"] for one in by_rank]
        indices = sorted({i for own in everyone for i in own})  # a rank without a gradient counts as zeros
        gradients = {i: torch.stack([own[i] for own in everyone if i in own]).sum(0) / ranks for i in indices}
    parameters = list(parameters_of(to.session.optimizers))
    pairs = [(parameters[i], laid_out(one, parameters[i]).to(parameters[i].device)) for i, one in gradients.items()]
    to.session.restored.gradients = pairs


_TRAINING = (
    Part("streams", lambda session: RNGState.capture().to_plain(_devices(session)), _streams, each_rank=True),
    Part("optimizers", lambda session: [one.state_dict() for one in session.optimizers], _optimizers),
    Part(
        "outside",
        lambda session: session.extra_parameters.state_dict() or None,
        lambda to, one: to.session.extra_parameters.load_state_dict(one),
        optional=True,
    ),
    _state("precision", lambda session: session.precision),
    _attribute("weight_unit", lambda session: session.step),
    Part("switched", lambda session: session.module_flags.changed(), _switched),
    Part("given", lambda session: session.given.table(session.run), fixed=True),
    Part("environment", lambda session: environment_of(session), fixed=True),
)
_RECORDS = (
    Part("state", lambda session: dict(session.state), lambda to, one: to.session.state.update(placed(to.session, one))),
    Part("history", lambda session: session.metrics.history.state_dict(), _history),
    Part("rows", lambda session: session.metrics.history.rows_state()),
)
_POSITION = (
    _attribute("data_seed", lambda session: session),
    _attribute("permuted", lambda session: session.cursor),
    Part("course", lambda session: session.cursor.course.to_plain(), _course),
    _attribute("in_epoch", lambda session: session.cursor),
    Part("exhausted", lambda session: session.cursor.exhausted),
    Part("data", data_of, optional=True),
    Part("batches_found", lambda session: session.progress.corrected),
    Part("progress", lambda session: asdict(session.progress.now()), lambda to, _: to.written.go_on(to.session)),
    _state("loader", lambda session: session.cursor.source, each_rank=True),
)
_HOOKS = (
    _state("requests", lambda session: session.sync.requests),
    Part(
        "evaluations due",
        lambda session: session.due.state,
        lambda to, one: to.session.due.restore(placed(to.session, one)),
        each_rank=True,
    ),
    _state("losses", lambda session: session.metrics.losses, each_rank=True),
    Part("callbacks", lambda session: _states_of(session, each_rank=False), _callbacks),
    Part("callbacks of the rank", lambda session: _states_of(session, each_rank=True) or None, each_rank=True, optional=True),
    Part(
        "weight_sets",
        lambda session: {name: [one.callback, *one.held] for name, one in holders_in(session.hooks).items() if one.held},
    ),
    Part(
        "schedules",
        lambda session: session.hooks.schedules_at(session.progress),
        lambda to, one: to.session.hooks.restore_schedules(one, to.session.progress),
    ),
)
PARTS: tuple[Part, ...] = (
    *_TRAINING,
    *_RECORDS,
    *_POSITION,
    *_HOOKS,
    Part("gradients", _unused_gradients, _gradients),
    Part("gradients", _gradients_of_the_rank, each_rank=True, optional=True),
    # The last one: saving another part may write a row.
    Part("offsets", lambda session: {} if session.files is None else session.files.offsets()),
)
"""In the order in which they are saved and loaded, after the weights of the model."""


def placed(session: Session, tree: Any) -> Any:
    """Return a checkpoint's state with each tensor that is stored in shards read, in the layout of the driver."""
    if isinstance(tree, Stored):
        return session.driver.placed(tree)
    if isinstance(tree, dict):
        return {key: placed(session, part) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(placed(session, part) for part in tree)
    return tree


@contextmanager
def naming(checkpoint: str, field: str) -> Iterator[None]:
    """Name the file and the field in an error of what restores it."""
    try:
        yield
    except CadenzaError:
        raise
    except Exception as error:
        raise CheckpointMismatchError(
            f"{checkpoint}: the field {field!r} of state.json cannot be restored: {type(error).__name__}: {error}. Give "
            "the callbacks and optimizers that wrote it, or another checkpoint with fit(resume=PATH)."
        ) from error


def environment_of(session: Session) -> dict[str, Any]:
    """Return the environment. It must be the same for a bit-identical result."""
    kind, cudnn = session.driver.device.type, torch.backends.cudnn
    facts = {
        "torch": torch.__version__,
        "device": kind,
        "threads": torch.get_num_threads(),
        "ranks": session.driver.world_size,
        "machine": platform.machine(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 products": _float32_products(kind),
    }
    if kind == "cuda":
        facts |= {"GPU": torch.cuda.get_device_name(session.driver.device), "CUDA": torch.version.cuda}
        facts |= {"cuDNN": cudnn.version(), "cuDNN benchmark": cudnn.benchmark}
    return facts


def _float32_products(kind: str) -> str:
    """Return the precision in which a device multiplies float32, such as ``ieee`` or ``tf32``: matrices, then cuDNN."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(torch.backends, "fp32_precision"):  # before torch 2.9
        return f"{torch.get_float32_matmul_precision()}, {'tf32' if cudnn.allow_tf32 else 'ieee'}"
    of_matrices = (torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    return f"{of_matrices}, {cudnn.conv.fp32_precision}" if kind == "cuda" else str(of_matrices)

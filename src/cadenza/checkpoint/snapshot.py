"""Everything that a run needs to continue to the same bits: taken at a step boundary, and put back."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cadenza.checkpoint.model_parts import (
    CHANGED,
    LEFT_OUT,
    add_groups,
    as_at_start,
    changed_buffers,
    changed_of,
    left_out_of,
    unchanged,
)
from cadenza.checkpoint.other_ranks import Written, data_of, rebatched
from cadenza.checkpoint.store import Content, Loaded, Stored
from cadenza.checkpoint.store.content import JoinedFiles
from cadenza.checkpoint.store.state_fields import check_moments
from cadenza.drivers.sharding import is_sharded, laid_out, local, optimizer_laid_out
from cadenza.engine import accumulating
from cadenza.engine.session import Loops, Session
from cadenza.errors import CadenzaError, CheckpointMismatchError, StateError
from cadenza.loading.rng import RNGState
from cadenza.optim.finite import all_finite
from cadenza.optim.held_weights import holders_in
from cadenza.optim.model_state import buffers_of, load_by_model, load_into, plain_name, state_of, untied
from cadenza.optim.optimizers import changed_by_loading, is_of_torch, load_state, loadable
from cadenza.optim.parameters import parameters_of
from cadenza.optim.settings import Difference
from cadenza.records.history import History
from cadenza.status.counting import some
from cadenza.status.plain import encode, host_copy
from cadenza.status.tensor_parts import first_unbuilt, is_built_of_tensors


@dataclass(slots=True)
class Snapshot:
    """The state to save. Callbacks get it in ``on_save``, and may add to `extra` and `files`."""

    reason: str
    model: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, Any]

    exact: bool
    """Whether a run could continue from here to the same bits."""

    own: dict[str, Any] | None = None
    """The state that only this rank has; None on the main process, where it is in `state`."""

    is_main: bool = True
    """Whether this rank writes the tensors that are not in shards."""

    files: JoinedFiles = field(default_factory=JoinedFiles)
    """Local files that join the checkpoint."""

    def content(
        self, *, weights_only: bool = False, averaged: str | None = None, copy: Callable[[Tensor], Tensor] = host_copy
    ) -> Content:
        """Copy it to the host: all of it on the main process; elsewhere the shards, and the state that only this rank has.

        Args:
            weights_only: Leave out all but the weights of the model and of `averaged`.
            averaged: The name of the averaged weights for which the checkpoint is kept as the best. `load_weights` loads them.
            copy: Copies a tensor to the host. See `Content.of`.

        Raises:
            StateError: A value cannot be saved; the message names its path.
        """
        facts = {"reason": self.reason, "exact": self.exact, "weights_only": weights_only, **self.state["progress"]}
        facts |= {} if averaged is None else {"weights": averaged}
        state = self._for_weights(averaged) if weights_only else {**self.state, "extra": self.extra}
        own = None if weights_only else self.own
        return replace(Content.of(self.model, state, facts, own=own, whole=self.is_main, copy=copy), files=self.files)

    def _for_weights(self, averaged: str | None) -> dict[str, Any]:
        kept = {name: self.state[name] for name in (LEFT_OUT, CHANGED) if self.state.get(name)}
        return {**self._averages(averaged), **kept}

    def _averages(self, averaged: str | None) -> dict[str, Any]:
        """Return the part of the state that holds the averaged weights of this name; nothing for None."""
        if averaged is None:
            return {}
        name, entry, prefix = self.state["weight_sets"][averaged]
        state = {entry: self.state["callbacks"][name][entry]}
        return {"callbacks": {name: state}, "weight_sets": {averaged: [name, entry, prefix]}}


def check_states(session: Session) -> None:
    """Raise `StateError`, naming the callback and the path, or the weight, if a state cannot be saved."""
    for name, weight in state_of(session.module).items():
        if is_built_of_tensors(local(weight) if is_sharded(weight) else weight):
            raise StateError(
                f"the weight {name!r} cannot be saved: expected a plain tensor; got a {type(weight).__name__}. Train with "
                "plain weights, and quantize the model after the training."
            )
    for name, callback in session.hooks.callbacks.items():
        encode({name: callback.state_dict()}, copy=type)  # nothing is copied


def fixed_facts(session: Session) -> dict[str, Any]:
    """Return the part of a snapshot that does not change during a run: its settings and its environment."""
    return {"given": session.given.table(session.run), "environment": environment_of(session)}


def take(session: Session, reason: str, fixed: Mapping[str, Any] | None = None) -> Snapshot:
    """Collect the state of a run at a step boundary, and fire ``on_save``. Every rank must call this.

    Args:
        run: The run.
        reason: The reason for the checkpoint.
        fixed: The result of `fixed_facts`, if it is known.
    """
    own = {
        "streams": RNGState.capture().to_plain(),
        "loader": session.cursor.source.state_dict(),
        "evaluations due": session.due.state,
        **gradients_of_the_rank(session),
        **({"callbacks of the rank": states} if (states := _states_of_callbacks(session, each_rank=True)) else {}),
    }
    session.metrics.deliver(session.run, wait=True)  # a record with numbers that are still on the device would be lost
    own["losses"] = session.metrics.losses.state_dict()
    weights, config = state_of(session.module), config_of(session)
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    state = {
        "progress": asdict(session.progress.now()),
        "in_epoch": session.cursor.in_epoch,
        "exhausted": session.cursor.exhausted,
        "requests": session.sync.requests.state_dict(),
        "schedules": session.hooks.schedules_at(session.progress),
        "config": config,
        **changed_of(session, config),
        **(fixed or fixed_facts(session)),
        "model_extra": {name: value for name, value in weights.items() if name not in tensors},
        "optimizers": [optimizer.state_dict() for optimizer in session.optimizers],
        "outside": session.extra_parameters.state_dict(),
        **gradients_of_the_run(session),
        "switched": session.module_flags.changed(),
        "data_seed": session.data_seed,
        "course": session.cursor.course.to_plain(),
        **data_of(session),
        "state": dict(session.state),
        "history": session.metrics.history.state_dict(),
        "rows": session.metrics.history.rows_state(),
        "offsets": session.files.offsets() if session.files is not None else {},
        "batches_found": session.progress.corrected,
        "callbacks": _states_of_callbacks(session, each_rank=False),
        "weight_sets": {name: [one.callback, *one.held] for name, one in holders_in(session.hooks).items() if one.held},
        **own,
    }
    exact = session.cursor.at_boundary and (session.driver.world_size == 1 or session.sync.together)
    exact = exact and not session.restored.pending
    main = session.is_main
    snapshot = Snapshot(reason, tensors, state, {}, exact, None if main or not session.sync.together else own, main)
    session.hooks.on_save(session.run, snapshot)
    return snapshot


def _states_of_callbacks(session: Session, *, each_rank: bool) -> dict[str, Any]:
    callbacks = {name: one for name, one in session.hooks.callbacks.items() if one.each_rank is each_rank}
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict())}


def is_finite(session: Session) -> bool:
    """Return whether all of the model's weights are finite. Waits for the device. Of shards every rank must ask."""
    weights = session.module.state_dict().values()
    finite = all_finite(one for one in (*weights, *session.extra_parameters.parameters) if isinstance(one, Tensor))
    return not session.driver.any_rank(not finite) if session.driver.shards else finite


def restore(session: Session, loaded: Loaded, *, strict: bool = False) -> None:
    """Restore a checkpoint into a run that is set up, and fire ``on_load``. The RNG state is restored with the first step.

    It may have been written on another number of ranks. Gradients that no update has used yet are kept.
    A warning names each state without a callback; with `strict` it is an error.

    Raises:
        CheckpointMismatchError: It belongs to another model, optimizer or accumulation; nothing is changed then.
        DataError: It lies inside an epoch that this number of ranks cannot continue; nothing is changed then.
    """
    state = loaded.state
    check_whole(loaded)
    written = Written.read(loaded.name, state)
    given, config = state.get("given", {}), config_of(session)
    saved = as_at_start(session, state, config)
    found = [*session.given.differences(session.run, given), *_of_steps(session, saved, config)]
    declared = {one.name for one in found} & {"accumulate", "batch_size"} & {*session.given.override}
    samples = [str(one) for one in found if one.samples and one.name not in declared]
    _check_schedules(loaded.name, found)
    _check_override(loaded.name, found, state["optimizers"])
    free = {*declared, *(["batches an epoch"] if "batch_size" in declared else [])}
    _check_config(loaded.name, *written.must_agree(session, saved, config, free), samples)
    written.check_source(session.cursor.source)
    if samples and written.inside:
        why = "The loader must not change inside an epoch. It may change at a checkpoint from the end of an epoch."
        raise CheckpointMismatchError(f"{_mismatch(loaded.name, samples)} {why}{_may_be_declared(samples)}")
    written = rebatched(session, written, given.get("loader", {}))
    if "batch_size" in declared:
        written = written._replace(found=None)  # it counts batches of another size
    load_model(session, loaded)
    if CHANGED in state:
        add_groups(session, state)
    _load_optimizers(session, loaded.name, state)
    with _naming(loaded.name, "precision"):
        session.precision.load_state_dict(state["precision"])
    session.data_seed, session.module_flags.saved = state["data_seed"], state.get("switched", {})
    session.step.weight_unit = state.get("weight_unit")
    session.state.update(placed(session, state["state"]))
    session.metrics.restore(History.from_state(state["history"], session.metrics.history.limit, state.get("rows")))
    over = state["exhausted"] or (written.over and "batch_size" in declared)
    session.cursor.restore(in_epoch=state["in_epoch"], exhausted=over)
    written.go_on(session)
    session.sync.requests.load_state_dict(state["requests"])
    own = written.taken_over(session, loaded.by_rank)
    with _naming(loaded.name, "loader"):
        session.cursor.source.load_state_dict(own["loader"])
    session.due.restore(placed(session, own.get("evaluations due")))
    if "losses" in own:
        session.metrics.losses.load_state_dict(own["losses"])
    both = {**state["callbacks"], **own.get("callbacks of the rank", {})}
    _restore_callbacks(session, loaded.name, {**state, "callbacks": both}, strict)
    for difference in _differences(*written.environments(session, state["environment"], environment_of(session))):
        session.warn(f"{loaded.name} was written elsewhere, so the result may not be bit-identical: {difference}")
    session.given.tell(session.run, loaded.name, found, given)
    written.warn(session)
    session.restored.put(rng_state=RNGState.from_plain(own["streams"]), gradients=saved_gradients(session, loaded, own))
    session.hooks.on_load(session.run, loaded)


def restore_own(session: Session, loaded: Loaded) -> None:
    """Restore what a loop of the user's own keeps on this rank, for a run that is over."""
    own = loaded.by_rank[min(session.driver.rank, len(loaded.by_rank) - 1)]
    _load_states(session, loaded.name, placed(session, own.get("callbacks of the rank", {})))


def check_whole(loaded: Loaded) -> None:
    """Raise `CheckpointMismatchError` if a run cannot continue from this content, whatever the run is."""
    if "config" not in loaded.state:
        raise CheckpointMismatchError(
            f"{loaded.name} holds weights only, and a run cannot continue there: use load_weights, or a checkpoint that was "
            "written without weights_only=True."
        )
    if unbuilt := first_unbuilt(loaded.state):
        raise CheckpointMismatchError(
            f"{loaded.name} holds tensors of the class {unbuilt.kind}, which torch may not load in this process; nothing was "
            "restored. Import the module of the class, with which it was written. If the module does not allow the class, call "
            "torch.serialization.add_safe_globals."
        )


def load_model(session: Session, loaded: Loaded) -> None:
    """Give the model the weights of a checkpoint, in the layout that they have in the run. Every rank must call this.

    Raises:
        CheckpointMismatchError: It belongs to another model; nothing is changed then.
    """
    left_out, model = left_out_of(loaded.state), session.module
    weights = {plain_name(name): weight for name, weight in loaded.model.items()}
    saved = {name: list(weight.shape) for name, weight in weights.items()}
    saved |= {name: one["shape"] for name, one in left_out.items()}
    whole, own = "model_extra" in loaded.state, config_of(session)["model"]  # else it holds weights only, perhaps not of all
    own = own if whole else {name: own[name] for name in saved if name in own}
    free = changed_buffers(loaded.state) & buffers_of(model).keys()
    extra = placed(session, loaded.state["model_extra"]) if whole else {}
    present = state_of(model)
    kept = unchanged(left_out, present, loaded.name)
    differing = [name for name in {**saved, **own} if saved.get(name) != own.get(name) and name not in free]
    if differing and not load_by_model(model, {**kept, **weights, **extra}):
        raise CheckpointMismatchError(_mismatch(loaded.name, _differences(saved, own)))
    if tied := untied(model, {**kept, **weights}):
        raise CheckpointMismatchError(_mismatch(loaded.name, [f"{one} is tied to {other} now" for one, other in tied.items()]))
    result = load_into(model, {**kept, **weights, **extra})
    missing = [*getattr(result, "unexpected_keys", ()), *map(plain_name, getattr(result, "missing_keys", ()))]
    missing = [name for name in missing if name in {**present, **weights}]
    if whole and missing:  # without what a state_dict of the model's own leaves out, such as frozen weights
        raise CheckpointMismatchError(f"{loaded.name} does not fit the model, which did not load {', '.join(missing)}")


def _load_optimizers(session: Session, name: str, state: Mapping[str, Any]) -> None:
    for index, (optimizer, stored) in enumerate(zip(session.optimizers, state["optimizers"], strict=True)):
        saved = loadable(optimizer, stored)
        if change := changed_by_loading(optimizer, saved):
            session.warn(change)
        fits = is_of_torch(saved)
        with _naming(name, f"optimizers[{index}]"):
            parameters = list(parameters_of([optimizer]))
            if fits:
                check_moments(optimizer, saved, [one.shape for one in parameters])
            load_state(optimizer, optimizer_laid_out(saved, parameters) if fits else placed(session, saved))
    session.given.take_over(session.run, state.get("given", {}))
    with _naming(name, "outside"):
        session.extra_parameters.load_state_dict(state.get("outside", {}))


def placed(session: Session, tree: Any) -> Any:
    """Return a checkpoint's state with each tensor that is stored in shards read, in the layout of the driver."""
    if isinstance(tree, Stored):
        return session.driver.placed(tree)
    if isinstance(tree, dict):
        return {key: placed(session, part) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(placed(session, part) for part in tree)
    return tree


def config_of(session: Session) -> dict[str, Any]:
    """Return the configuration. A run that continues must have the same."""
    weights = state_of(session.module)
    return {
        "model": {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)},
        "optimizers": [type(optimizer).__name__ for optimizer in session.optimizers],
        "parameter groups": [[len(group["params"]) for group in optimizer.param_groups] for optimizer in session.optimizers],
        "accumulate": accumulating.plain(session.accumulate),
        "precision": session.precision.name,
        "batches an epoch": session.progress.batches_said,
        "seed": session.seed,
        **(
            {"parameters outside of the model": session.extra_parameters.shapes()}
            if session.extra_parameters.parameters
            else {}
        ),
        **({"ranks": session.driver.data_world_size} if session.driver.data_world_size > 1 else {}),
    }


def environment_of(session: Session) -> dict[str, Any]:
    """Return the environment. It must be the same for a bit-identical result."""
    kind, cudnn = session.device.type, torch.backends.cudnn
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
        facts |= {"GPU": torch.cuda.get_device_name(session.device), "CUDA": torch.version.cuda}
        facts |= {"cuDNN": cudnn.version(), "cuDNN benchmark": cudnn.benchmark}
    return facts


def _float32_products(kind: str) -> str:
    """Return the precision in which a device multiplies float32, such as ``ieee`` or ``tf32``: matrices, then cuDNN."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(torch.backends, "fp32_precision"):  # before torch 2.9
        return f"{torch.get_float32_matmul_precision()}, {'tf32' if cudnn.allow_tf32 else 'ieee'}"
    of_matrices = (torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    return f"{of_matrices}, {cudnn.conv.fp32_precision}" if kind == "cuda" else str(of_matrices)


def _of_steps(session: Session, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the declared change of the batches in a step, if there is one. Without a declaration it is refused."""
    before, after = saved["accumulate"], now["accumulate"]
    if "accumulate" not in session.given.override or before == after:
        return []
    return [Difference("accumulate", "", before, after, present=True)]


def _check_config(name: str, saved: Mapping[str, Any], current: Mapping[str, Any], samples: Sequence[str]) -> None:
    differences = [*_differences(saved.pop("model"), current["model"])] if isinstance(saved, dict) else []
    differences += _differences(saved, {key: value for key, value in current.items() if key != "model"})
    if differences:
        raise CheckpointMismatchError(_mismatch(name, [*differences, *samples]) + _may_be_declared([*differences, *samples]))


def _may_be_declared(differences: Sequence[str]) -> str:
    """Return how to continue with another batch size or accumulation, if the differences follow from these alone."""
    names = dict.fromkeys(one.partition(":")[0] for one in differences)
    meant = [name for name in names if name in ("accumulate", "batch_size")]
    if not meant or {*names} - {*meant, "batches an epoch"}:
        return ""
    return f" If you mean this change: fit(resume=..., override={tuple(meant)!r})."


def _check_schedules(name: str, found: Sequence[Difference]) -> None:
    """Refuse a schedule of another class: the saved one cannot continue in it."""
    if classes := [str(one) for one in found if one.name == "scheduler" and not one.present]:
        raise CheckpointMismatchError(
            f'{_mismatch(name, classes)} fit(resume=..., override=("scheduler",)) makes the present schedule and steps it to '
            "the step of the checkpoint."
        )


_STATE_OF = {
    "amsgrad": ("max_exp_avg_sq", "exp_avg_sq"),
    "centered": ("grad_avg", "square_avg"),
    "momentum": ("momentum_buffer", "square_avg"),  # of RMSprop; SGD makes its buffer when it first needs it
}
"""By option, the state that it needs, and a state that the optimizers with such an option always have."""


def _check_override(name: str, found: Sequence[Difference], optimizers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to switch on an option that needs a state of each parameter that the checkpoint does not have."""
    known = [optimizer["state"] for optimizer in optimizers if is_of_torch(optimizer)]
    states = [state for held in known for state in held.values() if isinstance(state, Mapping)]
    for one in found:
        needed, always = _STATE_OF.get(one.name, ("", ""))
        if one.present and one.now and any(always in state and needed not in state for state in states):
            raise CheckpointMismatchError(
                f"{_mismatch(name, [str(one)])} {one.name} needs the state {needed!r} of each parameter, which the checkpoint "
                f"does not have: remove {one.name!r} from override."
            )


def _mismatch(name: str, differences: Sequence[str]) -> str:
    return (
        f"{name} does not fit this trainer; nothing was restored. It differs in {len(differences)}: {some(differences)}. "
        "Give the arguments that it was written with, or another directory."
    )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: saved {saved.get(key, 'nothing')}, now {current.get(key, 'nothing')}"
        for key in {**saved, **current}
        if saved.get(key) != current.get(key)
    ]


def _restore_callbacks(session: Session, name: str, state: Mapping[str, Any], strict: bool) -> None:
    callbacks, states = session.hooks.callbacks, placed(session, state["callbacks"])
    gone = [one for one in states if one not in callbacks]
    fresh = [one for one, callback in callbacks.items() if one not in states and callback.state_dict()]
    if gone or fresh:
        text = f"state of callbacks does not fit: saved but not in the list {gone}; in the list but not saved {fresh}"
        if strict:
            raise CheckpointMismatchError(f"{text}. Give the same callbacks under the same names, or strict=False.")
        session.warn(text)
    _load_states(session, name, states)
    session.hooks.restore_schedules(state.get("schedules", {}), session.progress)


def _load_states(session: Session, checkpoint: str, states: Mapping[str, Any]) -> None:
    """Restore the callbacks of the list that have a state, by name."""
    for name, saved in states.items():
        if name in session.hooks.callbacks:
            with _naming(checkpoint, f"callbacks.{name}"):
                session.hooks.callbacks[name].load_state_dict(saved)


@contextmanager
def _naming(checkpoint: str, field: str) -> Iterator[None]:
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


# -- gradients between two updates -----------------------------------------------------------------


def unused_gradients(session: Session) -> dict[int, Tensor]:
    """Return the gradients of this rank, by the index of their parameter."""
    return {i: p.grad for i, p in enumerate(parameters_of(session.optimizers)) if p.grad is not None}


def gradients_of_the_run(session: Session) -> dict[str, Any]:
    """Return the gradients of the main process, and what scales gradients."""
    scaled = {"precision": session.precision.state_dict(), "weight_unit": session.step.weight_unit}
    return {"gradients": unused_gradients(session), **scaled}


def gradients_of_the_rank(session: Session) -> dict[str, Any]:
    """Return the part of the state of this rank that holds its gradients, if each rank has its own: in an attached loop.

    The update of the loop averages them. Those of a ``step_fn`` are averaged with each batch.
    """
    apart = session.loop is Loops.ATTACHED and session.driver.reduces and not session.driver.shards
    return {"gradients": unused_gradients(session)} if apart else {}


def saved_gradients(session: Session, loaded: Loaded, own: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters and their gradients in a checkpoint; `own` is the state of this rank.

    On another number of ranks, each rank gets the mean of the ranks that wrote them.
    """
    gradients = own.get("gradients", loaded.state["gradients"])
    ranks, by_rank = len(loaded.by_rank), loaded.by_rank
    if session.loop is Loops.ATTACHED and ranks not in (1, session.driver.world_size) and "gradients" in by_rank[1]:
        gradients = _mean([one["gradients"] for one in by_rank])
    parameters = list(parameters_of(session.optimizers))
    return [(parameters[i], laid_out(one, parameters[i]).to(parameters[i].device)) for i, one in gradients.items()]


def _mean(by_rank: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Return the mean of the gradients of ranks. A rank without a gradient counts as zeros."""
    indices = sorted({i for gradients in by_rank for i in gradients})
    return {i: torch.stack([one[i] for one in by_rank if i in one]).sum(0) / len(by_rank) for i in indices}

"""Everything that a run needs to continue to the same bits: taken at a step boundary, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from sys import maxsize
from typing import Any

import torch
from torch import Tensor

from cadenza.checkpoint.parts import PARTS, Target, Written, environment_of, naming, placed
from cadenza.checkpoint.store import Content, Loaded
from cadenza.checkpoint.store.content import JoinedFiles
from cadenza.checkpoint.weights import (
    CHANGED,
    LEFT_OUT,
    add_groups,
    as_at_start,
    changed_buffers,
    changed_of,
    left_out_of,
    unchanged,
)
from cadenza.drivers.sharding import is_sharded, local
from cadenza.engine.arguments import plain_accumulate
from cadenza.engine.session import Session
from cadenza.errors import CheckpointMismatchError, StateError
from cadenza.optim.model_state import buffers_of, load_by_model, load_into, plain_name, state_of, untied
from cadenza.optim.optimizers import is_of_torch
from cadenza.optim.settings import Difference
from cadenza.records.scalars import ArrivingNumbers
from cadenza.status.encoding import encode, first_unbuilt, host_copy, is_built_of_tensors
from cadenza.status.formats import few


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
        """Return the part of the state that belongs to weights alone, with the averaged ones of this name."""
        state = {name: self.state[name] for name in (LEFT_OUT, CHANGED) if self.state.get(name)}
        if averaged is not None:
            name, entry, prefix = self.state["weight_sets"][averaged]
            held = {entry: self.state["callbacks"][name][entry]}
            state |= {"callbacks": {name: held}, "weight_sets": {averaged: [name, entry, prefix]}}
        return state


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


def fixed_parts(session: Session) -> dict[str, Any]:
    """Return the parts of a snapshot that do not change during a run: its settings and its environment."""
    return {part.name: part.save(session) for part in PARTS if part.fixed}


def take(session: Session, reason: str, fixed: Mapping[str, Any] | None = None) -> Snapshot:
    """Collect the state of a run at a step boundary, and fire ``on_save``. Every rank must call this.

    Args:
        session: The session of the run.
        reason: The reason for the checkpoint.
        fixed: The result of `fixed_parts`, if it is known.
    """
    if not session.metrics.buffer.idle:
        session.metrics.deliver(session.run, wait=True)  # a record with numbers that are still on the device would be lost
    snapshot = collected(session, reason, fixed)
    session.hooks.on_save(session.run, snapshot)
    return snapshot


def collected(session: Session, reason: str, fixed: Mapping[str, Any] | None = None) -> Snapshot:
    """Collect the state without a copy. No hook is called, and no number is waited for."""
    weights = state_of(session.module)
    config = config_of(session, weights)
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in weights.items() if name not in tensors}
    state: dict[str, Any] = {"config": config, **changed_of(session, config), "model_extra": extra, **(fixed or {})}
    own: dict[str, Any] = {}
    for part in PARTS:
        if part.fixed and part.name in state:
            continue
        saved = part.save(session)
        if saved is not None or not part.optional:
            state[part.name] = saved
            own |= {part.name: saved} if part.each_rank else {}
    together, main = session.driver.world_size == 1 or session.sync.together, session.driver.is_main
    exact = session.cursor.at_boundary and together and not session.restored.pending
    return Snapshot(reason, tensors, state, {}, exact, own if together and not main else None, main)


_SHOWN = 20  # names in a decision


class Digest:
    """The learning rates and sums of the bits of the weights at a save, by which ranks find that one has changed them alone.

    Weights on a device are read at the next step boundary, so that no save waits for it.

    Args:
        session: The session of a run on multiple ranks, by a weak reference.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = session.progress.step
        groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
        rates = torch.tensor([float(group.get("lr", 0.0)) for group in groups], dtype=torch.float64)
        weights = dict(session.module.named_parameters()) if session.driver.copies else {}
        sums = ArrivingNumbers([_sum_of_bits(local(weight)) for weight in weights.values()])
        self._names = ([f"the learning rate of group {number}" for number in range(len(groups))], [*weights])
        bits: list[int] = rates.view(torch.int64).tolist()
        self._numbers: tuple[Iterable[int], Iterable[int]] = bits, sums

    def compare(self) -> None:
        """Report what differs over the ranks. Every rank must call this."""
        session, driver = self._session, self._session.driver
        if not session.sync.together:
            return
        found: dict[str, int] = {}
        for names, numbers, of_weights in zip(self._names, self._numbers, (False, True), strict=True):
            if names:
                own = torch.tensor([*numbers], dtype=torch.int64)
                found |= {names[index]: int(own[index]) for index in driver.differing(own, of_weights=of_weights)}
        if not driver.any_rank(bool(found)):
            return
        everyone = driver.gather(dict(islice(found.items(), _SHOWN)))
        names = [*dict.fromkeys(chain.from_iterable(everyone))]
        holders = {rank: held[names[0]] for rank, held in enumerate(everyone) if names[0] in held}
        first, *others = holders
        differing = few([f"rank {rank}" for rank in others if holders[rank] != holders[first]], 4)
        why = f"at the save of step {self._step}, {names[0]} differs between rank {first} and {differing}"
        session.decide("ranks differ", why, who="Checkpoint", data={"step": self._step, "names": names})
        if driver.is_main:
            session.warn(
                f"{why}: they train different models, and the checkpoint holds one of them. A hook has changed it on some "
                "ranks alone. Change weights and learning rates on all ranks in the same way."
            )


def _sum_of_bits(weight: Tensor) -> Tensor:
    flat = weight.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    rest = len(flat) % 8  # sums of 8 bytes at a time are limited by the memory alone
    most = len(flat) - rest
    return (flat[:most].view(torch.int64).sum() + flat[most:].sum(dtype=torch.int64)) >> 1


def restore(session: Session, loaded: Loaded, *, strict: bool = False) -> None:
    """Restore a checkpoint into a run that is set up, and fire ``on_load``. The RNG state is restored with the first step.

    It may have been written on another number of ranks. Gradients that no update has used yet are kept.
    A warning names each state without a callback; with `strict` it is an error.

    Raises:
        CheckpointMismatchError: It belongs to another model, optimizer or accumulation; nothing is changed then.
        DataError: It lies inside an epoch that this number of ranks cannot continue; nothing is changed then.
    """
    check_whole(loaded)
    written, found = _agreed(session, loaded)
    state = {"permuted": maxsize, "schedules": {}, **loaded.state}  # earlier versions wrote none
    own = written.taken_over(session, loaded)
    load_model(session, loaded)
    if CHANGED in state:
        add_groups(session, state)
    to = Target(session, loaded, own, written, strict)
    for part in PARTS:
        entries = own if part.each_rank else state
        if part.load is not None and part.name in entries:
            with naming(loaded.name, part.name):
                part.load(to, entries[part.name])
    before, now = state["environment"], environment_of(session)
    if others := session.driver.data_world_size != written.ranks:
        now["ranks"] = before.get("ranks")
    for difference in _differences(before, {**before, **{name: value for name, value in now.items() if name in before}}):
        session.warn(f"{loaded.name} was written elsewhere, so the result may not be bit-identical: {difference}")
    session.given.tell(session.run, loaded.name, found, state.get("given", {}))
    if others:
        written.warn(session)
    session.hooks.on_load(session.run, loaded)


def _agreed(session: Session, loaded: Loaded) -> tuple[Written, list[Difference]]:
    """Return the position at which the run continues, and the settings that differ. Nothing is changed."""
    name, state = loaded.name, loaded.state
    written, given, config = Written.read(name, state), state.get("given", {}), config_of(session)
    saved, override = as_at_start(session, state, config), session.given.override
    found = session.given.differences(session.run, given)
    if "accumulate" in override and saved["accumulate"] != config["accumulate"]:
        found.append(Difference("accumulate", "", saved["accumulate"], config["accumulate"], present=True))
    declared = {difference.name for difference in found} & {"accumulate", "batch_size"} & {*override}
    samples = [str(difference) for difference in found if difference.samples and difference.name not in declared]
    if found:
        _check_settings(name, found, state["optimizers"])
    saved, config = written.must_agree(session, saved, config, declared)
    if differences := [*_differences(saved.pop("model"), config.pop("model")), *_differences(saved, config)]:
        raise CheckpointMismatchError(_mismatch(name, [*differences, *samples]) + _may_be_declared([*differences, *samples]))
    written.check_source(session.cursor.source)
    if samples and written.inside:
        why = "The loader must not change inside an epoch. It may change at a checkpoint from the end of an epoch."
        raise CheckpointMismatchError(f"{_mismatch(name, samples)} {why}{_may_be_declared(samples)}")
    if "batch_size" in declared:
        written = written.rebatched(session, given.get("loader", {}).get("batch_size"))
    return written, found


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
    saved |= {name: value["shape"] for name, value in left_out.items()}
    whole, own = "model_extra" in loaded.state, config_of(session)["model"]  # else it holds weights only, perhaps not of all
    own = own if whole else {name: own[name] for name in saved if name in own}
    free = changed_buffers(loaded.state) & buffers_of(model).keys()
    extra = placed(session, loaded.state["model_extra"]) if whole else {}
    present = state_of(model)
    kept = unchanged(left_out, present, loaded.name) if left_out else {}
    differing = [name for name in {**saved, **own} if saved.get(name) != own.get(name) and name not in free]
    if differing and not load_by_model(model, {**kept, **weights, **extra}):
        raise CheckpointMismatchError(_mismatch(loaded.name, _differences(saved, own)))
    if tied := untied(model, {**kept, **weights}):
        raise CheckpointMismatchError(
            _mismatch(loaded.name, [f"{name} is tied to {other} now" for name, other in tied.items()])
        )
    result = load_into(model, {**kept, **weights, **extra})
    missing = [*getattr(result, "unexpected_keys", ()), *map(plain_name, getattr(result, "missing_keys", ()))]
    missing = [name for name in missing if name in {**present, **weights}]
    if whole and missing:  # without what a state_dict of the model's own leaves out, such as frozen weights
        raise CheckpointMismatchError(f"{loaded.name} does not fit the model, which did not load {', '.join(missing)}")


def config_of(session: Session, weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration. A run that continues must have the same. `weights` are those of the model, if known."""
    outside, ranks = session.extra_parameters.shapes(), session.driver.data_world_size
    weights = weights or state_of(session.module)
    config = {
        "model": {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)},
        "optimizers": [type(optimizer).__name__ for optimizer in session.optimizers],
        "parameter groups": [[len(group["params"]) for group in optimizer.param_groups] for optimizer in session.optimizers],
        "accumulate": plain_accumulate(session.accumulate),
        "precision": session.precision.name,
        "batches an epoch": session.progress.batches_said,
        "seed": session.arguments.get("seed"),
    }
    config |= {"parameters outside of the model": outside} if outside else {}
    return config | ({"ranks": ranks} if ranks > 1 else {})


def _may_be_declared(differences: Sequence[str]) -> str:
    """Return how to continue with another batch size or accumulation, if the differences follow from these alone."""
    names = dict.fromkeys(difference.partition(":")[0] for difference in differences)
    meant = [name for name in names if name in ("accumulate", "batch_size")]
    if not meant or {*names} - {*meant, "batches an epoch"}:
        return ""
    return f" If you mean this change: fit(resume=..., override={tuple(meant)!r})."


_STATE_OF = {
    "amsgrad": ("max_exp_avg_sq", "exp_avg_sq"),
    "centered": ("grad_avg", "square_avg"),
    "momentum": ("momentum_buffer", "square_avg"),  # of RMSprop; SGD makes its buffer when it first needs it
}
"""By option, the state that it needs, and a state that the optimizers with such an option always have."""


def _check_settings(name: str, found: Sequence[Difference], optimizers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a schedule of another class, in which the saved one cannot continue, and an option that needs other states."""
    if classes := [str(difference) for difference in found if difference.name == "scheduler" and not difference.present]:
        raise CheckpointMismatchError(
            f'{_mismatch(name, classes)} fit(resume=..., override=("scheduler",)) makes the present schedule and steps it to '
            "the step of the checkpoint."
        )
    known = [optimizer["state"] for optimizer in optimizers if is_of_torch(optimizer)]
    states = [state for held in known for state in held.values() if isinstance(state, Mapping)]
    for difference in found:
        needed, always = _STATE_OF.get(difference.name, ("", ""))
        if difference.present and difference.now and any(always in state and needed not in state for state in states):
            raise CheckpointMismatchError(
                f"{_mismatch(name, [str(difference)])} {difference.name} needs the state {needed!r} of each parameter, which "
                f"the checkpoint does not have: remove {difference.name!r} from override."
            )


def _mismatch(name: str, differences: Sequence[str]) -> str:
    shown = few(differences, 10, "; ")
    return (
        f"{name} does not fit this trainer; nothing was restored. It differs in {len(differences)}: {shown}. "
        "Give the arguments that it was written with, or another directory."
    )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: saved {saved.get(key, 'nothing')}, now {current.get(key, 'nothing')}"
        for key in {**saved, **current}
        if saved.get(key) != current.get(key)
    ]

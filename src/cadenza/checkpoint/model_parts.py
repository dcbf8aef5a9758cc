"""What a checkpoint leaves out, frozen weights, and what training adds: buffers that get their shape, and parameter groups."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cadenza.engine.session import Session
from cadenza.errors import CheckpointMismatchError
from cadenza.optim.model_state import buffers_of, decides, plain_name
from cadenza.status.formats import some

LEFT_OUT = "left_out"
"""The name in the state of a checkpoint: by name of the weight, its shape and its checksum."""


def described(weight: Tensor) -> dict[str, Any]:
    """Return what a checkpoint holds instead of a weight: its shape, and the SHA-256 of its bytes in hexadecimal digits."""
    data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"shape": list(weight.shape), "sha256": hashlib.sha256(data.data).hexdigest()}


def left_out_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the weights that a checkpoint leaves out, by name."""
    return dict(state.get(LEFT_OUT, {}))


def unchanged(left_out: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the weights of a model that a checkpoint left out.

    Args:
        left_out: What the checkpoint holds instead of them.
        own: The ``state_dict`` of the model.
        where: The checkpoint, for the message.

    Raises:
        CheckpointMismatchError: A weight is missing, or has other values than at the save.
    """
    other = [name for name, one in left_out.items() if name not in own or described(own[name]) != dict(one)]
    if other:
        raise CheckpointMismatchError(
            f"{where} leaves out frozen weights, and {len(other)} of them differ in this model: {', '.join(other[:5])}. "
            "Nothing was loaded. Build the model from the same pretrained weights as in the run that wrote it."
        )
    return {name: own[name] for name in left_out}


CHANGED = "changed_shapes"
"""The name in the state of a checkpoint."""


def changed_buffers(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the buffers that had another shape at the start of the run that wrote a checkpoint."""
    return frozenset(state.get(CHANGED, {}).get("buffers", ()))


def changed_of(session: Session, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a checkpoint with what training made; warn, once, of what a resume cannot make again.

    Args:
        session: The session.
        config: Its configuration now. That of its start is kept in `Session.restored`.
    """
    start = session.restored.config
    return {} if _agree(config, start) else {CHANGED: _changes(session, start, config)}


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[part] == other[part] for part in ("model", "parameter groups"))


def _changes(session: Session, start: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    before, now, slots = start["model"], config["model"], buffers_of(session.module)
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    named = {id(one): plain_name(name) for name, one in session.module.named_parameters()}
    groups = [
        [[named.get(id(one)) for one in group["params"]] for group in optimizer.param_groups[len(first) :]]
        for optimizer, first in zip(session.optimizers, start["parameter groups"], strict=True)
    ]
    lost = [name for name in differing if name not in slots and not decides(session.module, differing)]
    lost += ["a parameter group with parameters outside of the model" for new in groups for group in new if None in group]
    if lost and not any(one.what == "not resumable" for one in session.decisions):
        told = (
            f"a hook changed what the run trains: {some(lost)}. A run that continues does not have it, so its checkpoints will "
            "be refused. Make it before the run, or in on_setup"
        )
        session.decide("not resumable", told, data={"names": lost})
        session.warn(told)
    return {"buffers": [name for name in differing if name in slots], "groups": groups}


def as_at_start(session: Session, state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a checkpoint without what training made, as far as this run can make it again.

    Args:
        session: The session, before anything is restored.
        state: The state in the checkpoint.
        config: The configuration of the session.
    """
    same = CHANGED not in state and _agree(state["config"], config)
    return dict(state["config"]) if same else _without_changes(session, state, config)


def _without_changes(session: Session, state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    saved, changed = dict(state["config"]), changed_buffers(state) & buffers_of(session.module).keys()
    session.restored.config = {**config, "model": {name: one for name, one in config["model"].items() if name not in changed}}
    saved["model"] = {
        name: config["model"][name] if name in changed else shape
        for name, shape in ((plain_name(name), shape) for name, shape in saved["model"].items())
        if name not in changed or name in config["model"]
    }
    names = {plain_name(name) for name, _ in session.module.named_parameters()}
    groups = state.get(CHANGED, {}).get("groups", ())
    if groups and names.issuperset(name for new in groups for group in new for name in group):
        first = [old[: len(old) - len(new)] for old, new in zip(saved["parameter groups"], groups, strict=True)]
        session.restored.config["parameter groups"] = first
        saved["parameter groups"] = [
            old if now == old else begun
            for old, begun, now in zip(saved["parameter groups"], first, config["parameter groups"], strict=False)
        ]
    before, now = saved["model"], config["model"]
    if decides(session.module, [name for name in {**before, **now} if before.get(name) != now.get(name)]):
        saved["model"] = config["model"]  # its load_state_dict is asked later, when all else agrees
    return saved


def add_groups(session: Session, state: Mapping[str, Any]) -> None:
    """Add the parameter groups of a checkpoint that a hook had added to the optimizers."""
    parameters = {plain_name(name): one for name, one in session.module.named_parameters()}
    sizes, groups = state["config"]["parameter groups"], state[CHANGED]["groups"]
    for optimizer, saved, new, before in zip(session.optimizers, state["optimizers"], groups, sizes, strict=True):
        if len(optimizer.param_groups) < len(before):
            options = saved.get("param_groups") or [{} for _ in before]
            for names, group in zip(new, options[len(before) - len(new) :], strict=True):
                optimizer.add_param_group({**group, "params": [parameters[name] for name in names]})

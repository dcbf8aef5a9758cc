"""Repeat the step that a capsule holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor

from cadenza.drivers.single import SingleDriver
from cadenza.engine.session import Session
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading.batches import moved
from cadenza.loading.rng import RNGState, preserve_rng_state
from cadenza.loops.part import Recipe
from cadenza.optim.model_state import load_into, state_of
from cadenza.optim.parameters import modules_of
from cadenza.status.plain import same
from cadenza.status.progress import Counters
from cadenza.timetravel.alone import alone
from cadenza.timetravel.capsule_files import CapsuleContent, read_capsule
from cadenza.timetravel.locating import Located, locate


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


def replay_capsule(trainer: Recipe, path: str | PathLike[str]) -> RepeatedStep:
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
    if not isinstance(trainer, Recipe):
        raise TypeError(f"replay_capsule(trainer, path) takes a Trainer first; got a {type(trainer).__name__}")
    if trainer.step_fn is not None:
        raise TypeError("replay_capsule repeats compute_loss, and this trainer has a step_fn. Use replay_step.")
    capsule = read_capsule(path)
    if capsule.state["batches"] is None:
        left_out = capsule.facts.get("batches_left_out", "")
        raise DataError(f"the capsule {str(capsule.path)!r} holds no batches: {left_out}. Use replay_step.")
    session = _alone(trainer)._new_session()
    _load_weights(session, capsule)
    batches = [moved(batch, session.driver.device) for batch in capsule.state["batches"]]
    states = [RNGState.from_plain(one) for one in capsule.state["rng"]]
    not_training = {*capsule.facts.get("not_training", ())}
    for name, module in session.module.named_modules():
        module.training = name not in not_training
    session.module.zero_grad()
    facts = capsule.facts
    with preserve_rng_state(), _at_step(session, facts), alone("replay_capsule"):
        located = locate(session.module, session.compute, batches, states, modules_of(inspect.unwrap(session.compute)))
    recorded = [float(loss) for loss in facts["losses"]]
    return RepeatedStep(facts["step"], batches, located.losses, recorded, located, facts["weights_exact"], facts)


def _alone(trainer: Recipe) -> Recipe:
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
    if absent := [name for name, one in own.items() if isinstance(one, Tensor) and name not in weights]:
        raise CheckpointMismatchError(f"{other}: it has no {', '.join(map(repr, absent[:3]))}. Give the model of the run.")
    try:
        load_into(session.module, {**own, **weights})
    except RuntimeError as error:
        raise CheckpointMismatchError(f"{other}: {error}") from None

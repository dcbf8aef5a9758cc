"""The gradients that no update has used yet, in a checkpoint: a ``step_fn`` and an attached loop accumulate over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cadenza.checkpoint.store import Loaded
from cadenza.drivers.sharding import laid_out
from cadenza.engine.session import Loops, Session
from cadenza.optim.parameters import parameters_of


def left(session: Session) -> dict[int, Tensor]:
    """Return the gradients of this rank, by the index of their parameter."""
    return {i: p.grad for i, p in enumerate(parameters_of(session.optimizers)) if p.grad is not None}


def of_the_run(session: Session) -> dict[str, Any]:
    """Return the gradients of the main process, and what scales gradients."""
    scaled = {"precision": session.precision.state_dict(), "weight_unit": session.step.weight_unit}
    return {"gradients": left(session), **scaled}


def of_the_rank(session: Session) -> dict[str, Any]:
    """Return the part of the state of this rank that holds its gradients, if each rank has its own: in an attached loop.

    The update of the loop averages them. Those of a ``step_fn`` are averaged with each batch.
    """
    apart = session.loop is Loops.ATTACHED and session.driver.reduces and not session.driver.shards
    return {"gradients": left(session)} if apart else {}


def saved(session: Session, loaded: Loaded, own: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
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

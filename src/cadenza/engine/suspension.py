"""Continue a moment after the resume, if a signal interrupted it in an evaluation.

The checkpoint is taken after the hooks before the evaluation and before the hooks after it. After the resume, the hook that
evaluates is called again, then the hooks after it: each hook takes effect once and in order, as in an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.drivers.sharding import refuse_shards
from cadenza.engine.session import Session
from cadenza.errors import StateError
from cadenza.hooks.fan_out import Left
from cadenza.hooks.moments import Callback, Moment
from cadenza.loading.batches import moved
from cadenza.status.decisions import Outcome
from cadenza.status.plain import encode

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks
    from cadenza.hooks.listener import Listener
    from cadenza.status.progress import Progress

_HOST = torch.device("cpu")


def suspend(session: Session, left: Left) -> bool:
    """Prepare the run for a checkpoint in the middle of a moment; return whether to write one.

    Every rank must call this. In `on_fit_start` nothing was trained, and a stop that was already taken is already saved.
    """
    session.sync.take_requests()
    listener = left.listener
    stop = session.sync.take_stop()
    if session.outcome is not None or listener is None or stop is None:
        return False
    data = {"evaluation": left.evaluation, "batches": left.batches}
    session.decide("evaluation left", f"{left}; it is repeated when the run continues", data=data)
    if listener.moment is Callback.on_fit_start:
        session.end(Outcome(session.sync.requests.kind, stop.why))
        return False
    session.sync.requests.suspended = _described(session, listener, left.due)
    session.metrics.deliver(session.run, session.progress.now(), wait=True)  # images and texts that were logged before
    session.cursor.at_boundary = True
    return True


def finish(session: Session, left: Left) -> None:
    """Call the hooks after the interrupted one, so that each start has its end. What they log is dropped until the resume."""
    assert left.listener is not None, "it was suspended"
    session.hooks.call(_from(session.hooks, left.listener)[1:], session.run)
    session.metrics.buffer.drop()
    for note in getattr(left, "__notes__", ()):
        if note.startswith("then "):
            session.warn(note)


def take_up(session: Session, moment: Moment) -> bool:
    """Continue `moment` after a resume, if it was interrupted; return whether it was."""
    suspended = session.sync.requests.suspended
    if suspended is None or suspended["moment"] != moment.__name__:
        return False
    session.sync.requests.suspended, session.cursor.at_boundary = None, False
    _restore(session, suspended)
    hooks = session.hooks
    if not any(_key(hooks, one) == tuple(suspended["left"]) for one in hooks.by_moment.get(moment, ())):
        session.warn(
            f"{suspended['left'][0]} was evaluating when the run was interrupted, but is no longer in callbacks. "
            "Its evaluation is not repeated"
        )
        return True
    with session.progress.last_step_is_new():
        listeners = resumed_listeners(hooks, suspended, session.progress)
        try:
            hooks.call(listeners, session.run)
        except Left as left:
            left.due = suspended["due"]
            raise
    return True


def resumed_listeners(hooks: Hooks, suspended: Mapping[str, Any], at: Progress) -> list[Listener]:
    """Return the listeners with which an interrupted moment goes on; none if the one that was left is gone.

    Those that were due are due again.
    """
    left, due = tuple(suspended["left"]), {tuple(key) for key in suspended["due"]}
    present = next((those for moment, those in hooks.by_moment.items() if moment.__name__ == suspended["moment"]), [])
    first = next((one for one in present if _key(hooks, one) == left), None)
    if first is None:
        return []
    for one in present:
        if one.trigger is not None and _key(hooks, one) in {left, *due}:
            one.trigger.make_due()
    return _from(hooks, first)


def _described(session: Session, left: Listener, due: list[list[Any]]) -> dict[str, Any]:
    """Return the state of the moment for the checkpoint: the hook that evaluates, the hooks due after it, and their input."""
    hooks, group = session.hooks, session.step.last_window
    later = _from(hooks, left)[1:]
    is_due = [one for one in later if hooks.is_due(one)]
    keys = {tuple(key) for key in due} | {_key(hooks, one) for one in is_due}
    described = {
        "moment": left.moment.__name__,
        "left": list(_key(hooks, left)),
        "due": [list(key) for one in later if (key := _key(hooks, one)) in keys],
        "numbers": session.metrics.buffer.take_numbers(),
        "updated": session.step.updated,
        "losses": list(group.losses),
        "weights": list(group.weights),
    }
    if later and left.moment is Callback.on_step_end:
        described["outputs"] = {name: value for name, value in dict.items(session.step.outputs) if _is_storable(value)}
        described["batch"] = session.step.batch if _is_storable(session.step.batch) else None
    return moved(pytree.tree_map_only(Tensor, Tensor.detach, described), _HOST)  # type: ignore[no-any-return]


def _restore(session: Session, suspended: dict[str, Any]) -> None:
    held = moved({key: suspended.get(key) for key in ("losses", "weights", "batch", "outputs")}, session.device)
    held["outputs"] = held["outputs"] or {}
    session.step.restore(**held, updated=suspended["updated"])
    for optimizer in session.optimizers:
        vars(optimizer)["_opt_called"] = True  # for torch's schedulers: the optimizer stepped before the resume
    session.metrics.buffer.put_numbers(suspended["numbers"])


def _from(hooks: Hooks, listener: Listener) -> list[Listener]:
    """Return a listener and the later listeners of the same moment."""
    present = hooks.by_moment[listener.moment]
    return present[present.index(listener) :]


def _key(hooks: Hooks, listener: Listener) -> tuple[str, int]:
    """Return the key of a listener in any process: the name of its callback, and its index in that callback."""
    own = [one for one in hooks.by_moment[listener.moment] if one.owner == listener.owner]
    return listener.owner, own.index(listener)


def _is_storable(value: Any) -> bool:
    try:
        refuse_shards(value, "the checkpoint of an interrupted evaluation")
        encode(value)
    except StateError:
        return False
    return True

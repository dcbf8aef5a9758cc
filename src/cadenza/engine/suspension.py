"""Continue a moment after the resume, if a signal interrupted it in an evaluation.

The checkpoint is taken after the hooks before the evaluation and before the hooks after it. After the resume, the hook that
evaluates is called again, then the hooks after it: each hook takes effect once and in order, as in an uninterrupted run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.drivers.sharding import refuse_shards
from cadenza.engine import agreement
from cadenza.errors import StateError
from cadenza.hooks.fan_out import Left, part_of
from cadenza.hooks.gates import Gate
from cadenza.hooks.moments import Callback, Moment
from cadenza.loading.batches import moved
from cadenza.status.decisions import Outcome
from cadenza.status.plain import encode

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks
    from cadenza.hooks.listener import Listener
    from cadenza.run import Run

_HOST = torch.device("cpu")


def suspend(run: Run, left: Left) -> bool:
    """Prepare the run for a checkpoint in the middle of a moment; return whether to write one.

    Every rank must call this. In `on_fit_start` nothing was trained, and a stop that was already taken is already saved.
    """
    agreement.take_requests(run)
    listener = left.listener
    if run.outcome is not None or listener is None or run.stopping is None:
        return False
    data = {"evaluation": left.evaluation, "batches": left.batches}
    run.decide("evaluation left", f"{left}; it is repeated when the run continues", data=data)
    if listener.moment is Callback.on_fit_start:
        run.outcome = Outcome(run.requests.kind, run.stopping.why)
        return False
    run.requests.suspended = _described(run, listener, left.due)
    run.flush(wait=True)  # images and texts that were logged before
    run.at_border = True
    return True


def finish(run: Run, left: Left) -> None:
    """Call the hooks after the interrupted one, so that each start has its end. What they log is dropped until the resume."""
    assert left.listener is not None, "it was suspended"
    _call(run, _from(run.hooks, left.listener)[1:])
    run.book.drop()
    for note in getattr(left, "__notes__", ()):
        if note.startswith("then "):
            run.warn(note)


def take_up(run: Run, moment: Moment) -> bool:
    """Continue `moment` after a resume, if it was interrupted; return whether it was."""
    suspended = run.requests.suspended
    if suspended is None or suspended["moment"] != moment.__name__:
        return False
    run.requests.suspended, run.at_border = None, False
    _put_back(run, suspended)
    hooks = run.hooks
    listeners = {_key(hooks, listener): listener for listener in hooks.heard.get(moment, ())}
    first = listeners.get(tuple(suspended["left"]))
    if first is None:
        run.warn(
            f"{suspended['left'][0]} was evaluating when the run was interrupted, but is no longer in callbacks. "
            "Its evaluation is not repeated"
        )
        return True
    with run.progress.last_step_is_new():
        for key in (suspended["left"], *suspended["due"]):
            gate = _gate(hooks, listeners.get(tuple(key)))
            if gate is not None:
                gate.let_through(run.progress)
        try:
            _call(run, _from(hooks, first))
        except Left as left:
            left.due = suspended["due"]
            raise
    return True


def _described(run: Run, left: Listener, due: list[list[Any]]) -> dict[str, Any]:
    """Return the state of the moment for the checkpoint: the hook that evaluates, the hooks due after it, and their input."""
    hooks, group = run.hooks, run.last_group
    later = _from(hooks, left)[1:]
    keys = {tuple(key) for key in due} | {_key(hooks, one) for one in later if _is_due(run, one)}
    described = {
        "moment": left.moment.__name__,
        "left": list(_key(hooks, left)),
        "due": [list(key) for one in later if (key := _key(hooks, one)) in keys],
        "numbers": run.book.take_numbers(),
        "updated": run.updated,
        "losses": list(group.losses),
        "weights": list(group.weights),
    }
    if later and left.moment is Callback.on_step_end:
        described["outputs"] = {name: value for name, value in dict.items(run.outputs) if _is_storable(value)}
        described["batch"] = run.batch if _is_storable(run.batch) else None
    return moved(_detached(described), _HOST)  # type: ignore[no-any-return]


def _put_back(run: Run, suspended: dict[str, Any]) -> None:
    held = moved({key: suspended.get(key) for key in ("losses", "weights", "batch", "outputs")}, run.device)
    run.last_group.losses, run.last_group.weights = held["losses"], held["weights"]
    run.batch, run.updated = held["batch"], suspended["updated"]
    run.outputs.update(held["outputs"] or {})
    for optimizer in run.optimizers:
        vars(optimizer)["_opt_called"] = True  # for torch's schedulers: the optimizer stepped before the resume
    for name, value in suspended["numbers"].items():
        run.book.add(name, value)


def _call(run: Run, listeners: list[Listener]) -> None:
    if listeners:
        moment = listeners[0].moment
        part_of(run.hooks, moment, [run.hooks.call_of(one) for one in listeners])(run)


def _from(hooks: Hooks, listener: Listener) -> list[Listener]:
    """Return a listener and the later listeners of the same moment."""
    present = hooks.heard[listener.moment]
    return present[present.index(listener) :]


def _key(hooks: Hooks, listener: Listener) -> tuple[str, int]:
    """Return the key of a listener in any process: the name of its callback, and its index in that callback."""
    own = [one for one in hooks.heard[listener.moment] if one.owner == listener.owner]
    return listener.owner, own.index(listener)


def _gate(hooks: Hooks, listener: Listener | None) -> Gate | None:
    call = None if listener is None else hooks.call_of(listener)
    call = call.func if isinstance(call, partial) else call
    return call if isinstance(call, Gate) else None


def _is_due(run: Run, listener: Listener) -> bool:
    gate = _gate(run.hooks, listener)
    return gate is not None and gate.due(run.progress)


def _is_storable(value: Any) -> bool:
    try:
        refuse_shards(value, "the checkpoint of an interrupted evaluation")
        encode(_detached(value))
    except StateError:
        return False
    return True


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detached(part) for key, part in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value

"""The states of metrics of torchmetrics in a module, which its weights and buffers do not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def state_of(metric: Any) -> dict[str, Any]:
    """Return a copy of the state of a metric."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    plain = {name: list(one) if isinstance(one, list) else one.detach().clone() for name, one in states.items()}
    return {"count": metric._update_count, "states": plain}


def put_state(metric: Any, kept: Mapping[str, Any], *, merge: bool) -> None:
    """Continue a metric with a state, or add it to those of other ranks."""
    states = {
        name: [part.to(metric.device) for part in one] if isinstance(one, list | tuple) else one.to(metric.device)
        for name, one in kept["states"].items()
    }
    if merge:
        metric.merge_state(states)
        metric._update_count += kept["count"] - 1
    else:
        for name, one in states.items():
            setattr(metric, name, one)
        metric._update_count = kept["count"]
    metric._computed = None

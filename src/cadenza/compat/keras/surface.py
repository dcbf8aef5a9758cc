"""The objects that Keras callbacks receive, for `cadenza.compat.adapter.surface`."""

from __future__ import annotations

from typing import Any

from cadenza.compat.adapter.description import Description
from cadenza.compat.keras.classes import check
from cadenza.compat.keras.events import EVENTS
from cadenza.compat.keras.model_view import ModelView
from cadenza.compat.keras.optimizer_view import OptimizerView
from cadenza.errors import AdapterError


def _refused(kind: type[Any]) -> str:
    try:
        check(kind)
    except AdapterError as error:
        return str(error)
    return ""


_ASKING = ("", "backend.", "keras.backend.", "keras.config.", "config.", "K.")
_BACKENDS = ("tensorflow", "jax", "numpy", "openvino")
_NEVER = frozenset(
    (
        *(f"{asking}backend() == {name!r}" for asking in _ASKING for name in _BACKENDS),
        "not self.model.built",
        "not self.model.optimizer.built",
    )
)
"""The backend of Keras is torch, and the model and the optimizer are built."""

DESCRIPTION = Description(
    events=EVENTS,
    arguments={"logs": None, "model": ModelView, "params": None},
    attributes={"model": ModelView, "_model": ModelView, "params": None},
    parts={"ModelView.optimizer": OptimizerView},
    never=_NEVER,
    state=(),
    refused=_refused,
)

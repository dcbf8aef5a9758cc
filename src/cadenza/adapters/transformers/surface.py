"""What a callback of transformers receives, for `cadenza.adapters.surface`."""

from __future__ import annotations

from cadenza.adapters.description import Description
from cadenza.adapters.transformers.arguments_view import ArgumentsView
from cadenza.adapters.transformers.events import EVENTS

DESCRIPTION = Description(
    events=EVENTS,
    state=("state",),
    arguments={"args": ArgumentsView, "state": None, "control": None, "model": None, "logs": None, "metrics": None},
)

"""The objects that transformers callbacks receive, for `cadenza.compat.adapter.surface`."""

from __future__ import annotations

from cadenza.compat.adapter.description import Description
from cadenza.compat.transformers.arguments_view import ArgumentsView
from cadenza.compat.transformers.events import EVENTS

DESCRIPTION = Description(
    events=EVENTS,
    state=("state",),
    arguments={"args": ArgumentsView, "state": None, "control": None, "model": None, "logs": None, "metrics": None},
)

"""The objects that Lightning callbacks receive, for `cadenza.compat.adapter.surface`."""

from __future__ import annotations

from typing import Any

from cadenza.compat.adapter.description import Description
from cadenza.compat.lightning.events import EVENTS
from cadenza.compat.lightning.refused import refusal
from cadenza.compat.lightning.trainer_view import TrainerView


def _refused(kind: type[Any]) -> str:
    found = refusal(kind)
    return "" if found is None else f"{found.why} Use {found.instead}."


DESCRIPTION = Description(events=EVENTS, arguments={"trainer": TrainerView, "pl_module": None}, refused=_refused)

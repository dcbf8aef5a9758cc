"""What a callback of Lightning receives, for `cadenza.adapters.surface`."""

from __future__ import annotations

from typing import Any

from cadenza.adapters.description import Description
from cadenza.adapters.lightning.events import EVENTS
from cadenza.adapters.lightning.refused import refusal
from cadenza.adapters.lightning.trainer_view import TrainerView


def _refused(kind: type[Any]) -> str:
    found = refusal(kind)
    return "" if found is None else f"{found.why} Use {found.instead}."


DESCRIPTION = Description(events=EVENTS, arguments={"trainer": TrainerView, "pl_module": None}, refused=_refused)

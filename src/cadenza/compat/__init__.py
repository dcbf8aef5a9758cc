"""Adapters: callbacks of other training systems, beside native ones in one list. `ForeignCallback` is the base of others."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.adapters.event import Event as Event
    from cadenza.adapters.foreign import ForeignCallback as ForeignCallback

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(
        __name__, {"cadenza.adapters.event": "Event", "cadenza.adapters.foreign": "ForeignCallback"}
    )

"""Adapters that run callbacks of other training systems alongside native ones. `ForeignCallback` is their base class."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.compat.adapter.event import Event as Event
    from cadenza.compat.adapter.foreign import ForeignCallback as ForeignCallback

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)

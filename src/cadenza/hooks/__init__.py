"""Moments, listeners, their order, and the dispatch that calls them."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Fault as Fault
    from cadenza.hooks.dispatch import Hooks as Hooks
    from cadenza.hooks.listener import Listener as Listener
    from cadenza.hooks.moments import HeldWeights as HeldWeights
    from cadenza.hooks.moments import HoldsWeights as HoldsWeights
    from cadenza.hooks.order import Phase as Phase
    from cadenza.hooks.schedule import At as At
    from cadenza.hooks.schedule import Between as Between
    from cadenza.hooks.schedule import Every as Every
    from cadenza.hooks.schedule import First as First
    from cadenza.hooks.schedule import Last as Last
    from cadenza.hooks.schedule import Schedule as Schedule
    from cadenza.hooks.schedule import When as When
    from cadenza.hooks.subscription import on as on
    from cadenza.hooks.subscription import periodic as periodic

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)

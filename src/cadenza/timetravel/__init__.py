"""Past steps of a run: repeat them."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.timetravel.replaying import Difference as Difference
    from cadenza.timetravel.replaying import Replay as Replay
    from cadenza.timetravel.replaying import replay_step as replay_step

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__, {"cadenza.timetravel.replaying": "Difference Replay replay_step"})

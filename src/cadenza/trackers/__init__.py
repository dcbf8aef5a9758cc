"""Sinks and callbacks for experiment trackers, hyperparameter search and alerts.

`cadenza.sinks` and `cadenza.callbacks` have the public names, but for the targets of alerts that are built: `Email` and `Ntfy`.
"""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.trackers.alert_targets import Email as Email
    from cadenza.trackers.alert_targets import Ntfy as Ntfy

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)

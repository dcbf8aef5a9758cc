"""Cadenza trains PyTorch models: a loop you can read, and your own code at exact moments of it.

The public names, each where it lives; importing this does no work. Callbacks that come along are in `cadenza.callbacks`,
places for records in `cadenza.sinks`, loaders in `cadenza.loading`, drivers in `cadenza.drivers`, help for tests in
`cadenza.testing`, other frameworks' dialects in `cadenza.compat`.
"""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza import callbacks as callbacks
    from cadenza import compat as compat
    from cadenza import drivers as drivers
    from cadenza import loading as loading
    from cadenza import sinks as sinks
    from cadenza import testing as testing
    from cadenza.cadence import Cadence as Cadence
    from cadenza.decisions import Decision as Decision
    from cadenza.decisions import Outcome as Outcome
    from cadenza.drivers import Driver as Driver
    from cadenza.drivers import SingleDriver as SingleDriver
    from cadenza.evaluation import Evaluation as Evaluation
    from cadenza.history import History as History
    from cadenza.hooks import Fault as Fault
    from cadenza.hooks import Hooks as Hooks
    from cadenza.hooks import on as on
    from cadenza.listener import Listener as Listener
    from cadenza.moments import Callback as Callback
    from cadenza.monitor import Monitor as Monitor
    from cadenza.objective import supervised as supervised
    from cadenza.outputs import Derive as Derive
    from cadenza.outputs import Outputs as Outputs
    from cadenza.plan import Plan as Plan
    from cadenza.progress import Counters as Counters
    from cadenza.progress import Progress as Progress
    from cadenza.records import Audio as Audio
    from cadenza.records import Figure as Figure
    from cadenza.records import Histogram as Histogram
    from cadenza.records import Image as Image
    from cadenza.records import Record as Record
    from cadenza.records import Text as Text
    from cadenza.run import Run as Run
    from cadenza.trainer import Trainer as Trainer
    from cadenza.version import __version__ as __version__
    from cadenza.weights import export_weights as export_weights
    from cadenza.weights import load_weights as load_weights
    from cadenza.weights import save_weights as save_weights

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(
        __name__,
        {
            "cadenza.cadence": "Cadence",
            "cadenza.decisions": "Decision Outcome",
            "cadenza.drivers": "Driver SingleDriver",
            "cadenza.evaluation": "Evaluation",
            "cadenza.history": "History",
            "cadenza.hooks": "Fault Hooks on",
            "cadenza.listener": "Listener",
            "cadenza.moments": "Callback",
            "cadenza.monitor": "Monitor",
            "cadenza.objective": "supervised",
            "cadenza.outputs": "Derive Outputs",
            "cadenza.plan": "Plan",
            "cadenza.progress": "Counters Progress",
            "cadenza.records": "Audio Figure Histogram Image Record Text",
            "cadenza.run": "Run",
            "cadenza.trainer": "Trainer",
            "cadenza.version": "__version__",
            "cadenza.weights": "export_weights load_weights save_weights",
        },
        inner="callbacks compat drivers loading sinks testing",
    )

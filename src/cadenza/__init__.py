"""Cadenza trains PyTorch models: a loop you can read, and your own code at exact moments of it.

The public names, each where it lives; importing this does no work. Callbacks that come along are in `cadenza.callbacks`,
places for records in `cadenza.sinks`, help for tests in `cadenza.testing`.
"""

from cadenza.cadence import Cadence
from cadenza.decisions import Decision, Outcome
from cadenza.drivers import Driver, SingleDriver
from cadenza.evaluation import Evaluation
from cadenza.history import History
from cadenza.hooks import Fault, Hooks, on
from cadenza.listener import Listener
from cadenza.moments import Callback
from cadenza.monitor import Monitor
from cadenza.objective import supervised
from cadenza.outputs import Derive, Outputs
from cadenza.plan import Plan
from cadenza.progress import Counters, Progress
from cadenza.records import Audio, Figure, Histogram, Image, Record, Text
from cadenza.run import Run
from cadenza.trainer import Trainer
from cadenza.version import __version__
from cadenza.weights import export_weights, load_weights, save_weights

__all__ = [
    "Audio",
    "Cadence",
    "Callback",
    "Counters",
    "Decision",
    "Derive",
    "Driver",
    "Evaluation",
    "Fault",
    "Figure",
    "Histogram",
    "History",
    "Hooks",
    "Image",
    "Listener",
    "Monitor",
    "Outcome",
    "Outputs",
    "Plan",
    "Progress",
    "Record",
    "Run",
    "SingleDriver",
    "Text",
    "Trainer",
    "__version__",
    "export_weights",
    "load_weights",
    "on",
    "save_weights",
    "supervised",
]

"""Cadenza trains PyTorch models: a loop you can read, and your own code at exact moments of it.

Each public name stands where it is defined; importing this package does no work. `cadenza.callbacks` holds callbacks,
`cadenza.sinks` the sinks for records, `cadenza.records` functions that read a run directory, `cadenza.loading` loaders,
`cadenza.drivers` drivers, `cadenza.testing` help for tests, `cadenza.steering` questions to a run and acts on it,
`cadenza.timetravel` functions that repeat past steps of a run, `cadenza.compat` adapters for other systems' callbacks,
`cadenza.parallel` checkpoints of torch's distributed checkpoint (DCP).
"""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza import callbacks as callbacks
    from cadenza import compat as compat
    from cadenza import drivers as drivers
    from cadenza import errors as errors
    from cadenza import hooks as hooks
    from cadenza import loading as loading
    from cadenza import parallel as parallel
    from cadenza import records as records
    from cadenza import sinks as sinks
    from cadenza import steering as steering
    from cadenza import testing as testing
    from cadenza import timetravel as timetravel
    from cadenza.attaching import Loop as Loop
    from cadenza.attaching import attach as attach
    from cadenza.callbacks.derive import Derive as Derive
    from cadenza.checkpoint.keep_rules import Best as Best
    from cadenza.checkpoint.weights import export_weights as export_weights
    from cadenza.checkpoint.weights import load_weights as load_weights
    from cadenza.checkpoint.weights import save_weights as save_weights
    from cadenza.drivers import Driver as Driver
    from cadenza.drivers import SingleDriver as SingleDriver
    from cadenza.engine.dry_run import Calendar as Calendar
    from cadenza.engine.monitor import Monitor as Monitor
    from cadenza.engine.objective import supervised as supervised
    from cadenza.engine.plan import Plan as Plan
    from cadenza.files.new_directory import new_directory as new_directory
    from cadenza.hooks.dispatch import Fault as Fault
    from cadenza.hooks.dispatch import Hooks as Hooks
    from cadenza.hooks.listener import Listener as Listener
    from cadenza.hooks.moments import Callback as Callback
    from cadenza.hooks.schedule import At as At
    from cadenza.hooks.schedule import Between as Between
    from cadenza.hooks.schedule import Every as Every
    from cadenza.hooks.schedule import First as First
    from cadenza.hooks.schedule import Last as Last
    from cadenza.hooks.schedule import Schedule as Schedule
    from cadenza.hooks.schedule import When as When
    from cadenza.hooks.subscription import on as on
    from cadenza.loading.evaluation import Evaluation as Evaluation
    from cadenza.loops.handle import Handle as Handle
    from cadenza.loops.steps import Step as Step
    from cadenza.loops.steps import Steps as Steps
    from cadenza.records.history import History as History
    from cadenza.records.record import Audio as Audio
    from cadenza.records.record import Figure as Figure
    from cadenza.records.record import Histogram as Histogram
    from cadenza.records.record import Image as Image
    from cadenza.records.record import Record as Record
    from cadenza.records.record import Text as Text
    from cadenza.run import Run as Run
    from cadenza.status.decisions import Decision as Decision
    from cadenza.status.decisions import Outcome as Outcome
    from cadenza.status.outputs import Outputs as Outputs
    from cadenza.status.progress import Counters as Counters
    from cadenza.status.progress import Progress as Progress
    from cadenza.steering.run_reader import read_run as read_run
    from cadenza.trainer import Trainer as Trainer
    from cadenza.version import __version__ as __version__

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)

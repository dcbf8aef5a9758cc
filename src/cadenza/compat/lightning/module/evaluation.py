"""``validation_step`` in the list of a native run, and the hooks of the module around evaluations."""

from __future__ import annotations

from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.lightning.conductor import Conductor
from cadenza.compat.lightning.module import passes
from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.logging import LogStep
from cadenza.compat.lightning.module.module_evaluation import HOOK_NAMES, NAMES, ModuleEvaluation
from cadenza.compat.lightning.module.schedules import PlateauSchedules
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.compat.lightning.trainer_view import trainer_view
from cadenza.engine.session import session_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Interval
from cadenza.hooks.subscription import periodic
from cadenza.records.record import RESERVED
from cadenza.run import Run


class ModuleEvaluate(Evaluate):
    """Evaluate with ``validation_step`` at an interval and log the results under their names.

    Args:
        attached: The LightningModule.
        every: The interval.
        sanity_batches: The number of batches of each loader to try before the first epoch.
    """

    def __init__(self, attached: Attached, every: Interval = "1 epoch", sanity_batches: int = 0) -> None:
        loader = attached.loaders.val
        if loader is None:
            raise ValueError("ModuleEvaluate needs a validation loader; the data has none.")
        super().__init__(loader, every, name=NAMES["validate"], sanity_batches=sanity_batches)
        self.evaluation: ModuleEvaluation = ModuleEvaluation(attached, "validate", loader)
        if periodic(self.every, self.evaluate).moment is Callback.on_step_end:
            # Inside an epoch it follows on_train_batch_end; at the end of one it comes before on_train_epoch_end.
            self.phase: Phase | None = None
            self.after: Relation = (Conductor, LogStep)
            self.before: Relation = (Phase.SAVE, PlateauSchedules)

    def on_fit_start(self, run: Run) -> None:
        if self.sanity_batches and not run.progress.step:
            passes.rehearse(session_of(run), self.evaluation, self.sanity_batches)

    def evaluate(self, run: Run) -> None:
        evaluation = self.evaluation
        for values in passes.evaluate(session_of(run), evaluation):
            run.log({name: value for name, value in values.items() if name not in RESERVED})


def evaluating(attached: Attached, every: Interval | None, sanity_batches: int) -> list[ModuleEvaluate]:
    """Return the evaluation for the list; empty if the module has no ``validation_step`` or the data no validation loader.

    Args:
        attached: The LightningModule.
        every: The interval; None: no evaluation.
        sanity_batches: The number of batches to try before the first epoch.
    """
    if every is None or attached.loaders.val is None or not attached.overrides("validation_step"):
        return []
    return [ModuleEvaluate(attached, every, sanity_batches)]


class EvaluationHooks(Conductor):
    """Call the hooks of the module around an evaluation, after those of the callbacks in the list.

    Args:
        attached: The LightningModule.
    """

    name: str | None = "evaluation hooks of the LightningModule"

    def __init__(self, attached: Attached) -> None:
        self.attached: Attached = attached

    def __repr__(self) -> str:
        return f"evaluation hooks of {type(self.attached.module).__name__}"

    def listeners(self) -> list[Listener]:
        names = [f"on_{hook}_{point}" for hook in HOOK_NAMES.values() for point in ("start", "epoch_start", "epoch_end", "end")]
        own = [self._listener(name) for name in names if self.attached.overrides(name)]
        return [*self.conducting(), *own]

    def _listener(self, name: str) -> Listener:
        moment: Moment = getattr(LightningMoments, name)

        def call(run: Run) -> None:
            if isinstance(trainer_view(run)._evaluation, ModuleEvaluation):  # not of another Evaluate
                self.attached.call(name)

        return Listener(moment, call)

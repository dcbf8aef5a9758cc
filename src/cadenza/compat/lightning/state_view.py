"""``trainer.state``: the function of the trainer that runs, and its stage."""

from __future__ import annotations

from typing import Any, ClassVar

from cadenza.compat.lightning.library import imported
from cadenza.compat.lightning.part_view import PartView
from cadenza.hooks.dispatch import hooks_of


class StateView(PartView):
    """The state of a run as Lightning's ``TrainerState``."""

    title: ClassVar[str] = "trainer.state"

    @property
    def fn(self) -> Any:
        """``TrainerFn``: FITTING in a fit; VALIDATING, TESTING or PREDICTING outside."""
        return imported("trainer.states", "TrainerFn")("fit" if self._trainer._fits else self._trainer._stage)

    @property
    def stage(self) -> Any:
        """``RunningStage``: TRAINING, SANITY_CHECKING, VALIDATING, TESTING or PREDICTING."""
        return imported("trainer.states", "RunningStage")(self._trainer._stage)

    @property
    def status(self) -> Any:
        """``TrainerStatus``: RUNNING, FINISHED or INTERRUPTED."""
        name = "interrupted" if self._trainer._interrupted else "finished" if self.finished else "running"
        return imported("trainer.states", "TrainerStatus")(name)

    @property
    def finished(self) -> bool:
        """Whether the run has ended without an error, and its last hook has returned."""
        outcome = self._run.outcome
        inside = hooks_of(self._run).here().listener is not None
        return outcome is not None and outcome.kind != "failed" and not inside

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._trainer._interrupted or self.finished

"""The ``trainer`` argument of hooks in a native run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.compat.adapter.view import OfRun
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.utils.state import TrainerState
from cadenza.compat.fastnlp.core.controllers.view import TrainerView, epochs_for
from cadenza.compat.fastnlp.core.drivers.choose_driver import around
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.loading.loaders import length_of
from cadenza.status.encoding import State

if TYPE_CHECKING:
    from cadenza.run import Run


class NativeRunView(TrainerView):
    """A native run with fastNLP's names. ``state`` is ``run.state``, so native checkpoints hold it."""

    train_dataloader: Any
    dataloader: Any

    def __init__(self, run: Run) -> None:
        session = session_of(run)
        self._of_run = OfRun(run)
        self.model: nn.Module = run.model
        self.optimizers: Any = run.optimizers[0] if len(run.optimizers) == 1 else run.optimizers
        self.driver: Driver = around(run.driver, self.model, self.optimizers, fp16=session.precision.name == "fp16")
        self.driver.precision = session.precision
        self.train_dataloader = self.dataloader = run.loader
        self.accumulation_steps: int = run.info.accumulate
        self.state: State = run.state
        self.kwargs: dict[str, Any] = {}
        self.evaluator_arguments: dict[str, Any] = {
            "driver": run.driver,
            "fp16": session.precision.name == "fp16",
            "verbose": 0,
        }
        self.evaluates = True  # a later callback in the list may evaluate
        per_epoch, total = length_of(run.loader), run.progress.total("batch")
        epochs = run.progress.max_epochs if total is None else epochs_for(total, per_epoch)
        self.trainer_state: TrainerState = TrainerState(n_epochs=epochs, num_batches_per_epoch=per_epoch, n_batches=total)

    @property
    def live(self) -> Run:  # type: ignore[override]  # an attribute in the base class
        """The native run."""
        return self._of_run.run

    @property
    def callback_manager(self) -> CallbackManager:  # type: ignore[override]  # as above
        """The callbacks of fastNLP in the list. Each refers to this view."""
        return CallbackManager(
            callback for callback in hooks_of(self.live).callbacks.values() if isinstance(callback, ManagedCallback)
        )

    def carrying(self) -> Carried:
        return Carried.of(self.live)

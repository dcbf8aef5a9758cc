"""``module.trainer`` during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.compat.adapter.view import Weak
from cadenza.compat.lightning.connectors import LoggerConnectorView
from cadenza.compat.lightning.strategy_view import StrategyView
from cadenza.compat.lightning.trainer_view import KEY, TrainerView
from cadenza.engine import weight_update
from cadenza.engine.session import session_of
from cadenza.optim.parameters import parameters_of
from cadenza.status.outputs import scalar

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.run import Run


class ModuleTrainer(TrainerView):
    """The trainer of a LightningModule in a run."""

    _attached: Weak[Attached] = Weak()

    def __init__(self, run: Run, attached: Attached) -> None:
        super().__init__(run)
        self._attached, self._log, self._owner = attached, attached.log, type(attached.module).__name__
        self._strategy: StrategyView = ModuleStrategy(self, attached)
        loaders, schedules = attached.loaders, attached.schedules  # the list itself, which a callback may change
        self.provide(datamodule=loaders.datamodule, train_dataloader=loaders.train, lr_scheduler_configs=schedules)
        if not attached.automatic:
            manual = attached.manual
            self.provide(global_step=lambda: manual.count)
        self._connector = ModuleConnector(self, attached)

    # -- the values of self.log ---------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name of ``self.log``."""
        return self._log.callback_metrics  # type: ignore[no-any-return]

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name with ``logger=True``."""
        return self._log.logged_metrics  # type: ignore[no-any-return]

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest value of each name with ``prog_bar=True``."""
        return self._log.progress_bar_metrics  # type: ignore[no-any-return]

    def _reader(self) -> str:
        return super()._reader() if self._hook_of_a_callback() else self._owner

    @property
    def _results(self) -> Any:
        # LightningModule.log reads this first. In a hook of a callback, the module does not know the hook's name yet.
        if (name := self._hook_of_a_callback()) is not None:
            self._attached.module._current_fx_name = name
        return self._log.active

    def _hook_of_a_callback(self) -> str | None:
        """Return the name of the running hook of a Lightning callback."""
        session = self._of_run.held()
        listener = None if session is None else session.hooks.here().listener
        owner = None if session is None or listener is None else session.hooks.callbacks.get(listener.owner)
        return listener.event or None if listener is not None and isinstance(owner, ForeignCallback) else None

    @property
    def gradient_clip_val(self) -> float | None:
        """The bound of `ClipGradients` if the module overrides clipping, otherwise None. ``module.clip_gradients`` reads it."""
        return self._attached.clip[0]

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """``"norm"`` or ``"value"``; None: see `gradient_clip_val`."""
        return self._attached.clip[1]


class ModuleConnector(LoggerConnectorView):
    """The part of ``trainer._logger_connector`` used by ``LightningModule.log``."""

    def __init__(self, trainer: TrainerView, attached: Attached) -> None:
        super().__init__(trainer, trainer._logger)
        self._log = attached.log

    def should_reset_tensors(self, fx: str) -> bool:
        """Return whether the first value of a hook in an epoch resets those of the previous epoch."""
        reset: bool = self._log.should_reset_tensors(fx)
        return reset

    @property
    def _current_fx(self) -> str | None:
        current: str | None = self._log.current_fx
        return current

    @_current_fx.setter
    def _current_fx(self, value: str | None) -> None:
        self._log.current_fx = value


class ModuleStrategy(StrategyView):
    """``trainer.strategy`` with the methods that a LightningModule calls for the backward pass and the update."""

    absent: ClassVar[Mapping[str, str]] = {
        name: advice for name, advice in StrategyView.absent.items() if name not in ("backward", "optimizer_step")
    }

    _attached: Weak[Attached] = Weak()

    def __init__(self, trainer: TrainerView, attached: Attached) -> None:
        super().__init__(trainer)
        self._attached = attached

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return [self._attached.wrapped(optimizer, self) for optimizer in self._attached.optimizers]

    def backward(self, loss: Tensor, optimizer: object, *arguments: Any, **keywords: Any) -> None:
        """Add the gradients of `loss`, with the moments around it."""
        self._attached.backward_arguments = (arguments, keywords)
        self._attached.backward_losses.append(scalar(loss.detach().float()))
        try:
            self._run.backward(loss)
        finally:
            self._attached.backward_arguments = ((), {})

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **keywords: Any) -> Any:
        """Call the closure, then update the weights with `optimizer`. Gradients are kept, as in Lightning."""
        output = closure()
        session = session_of(self._run)
        if session.driver.reduces:
            held = {id(parameter) for parameter in parameters_of([optimizer])}
            session.driver.average_gradients([parameter for parameter in session.module.parameters() if id(parameter) in held])
        with session.precision.disabled():
            weight_update.update_weights(session, [optimizer])
        self._attached.manual.count += 1
        return output


def attach(attached: Attached, run: Run) -> None:
    """Set the module's trainer for a new run."""
    attached.begin(run)
    view = session_of(run).adapters[KEY] = ModuleTrainer(run, attached)
    attached.attach(view)

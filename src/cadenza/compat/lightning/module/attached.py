"""State shared by the parts of a LightningModule's run: the module, its data and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.compat.lightning.library import classes_of_lightning
from cadenza.compat.lightning.module.parts import Loaders, ManualSteps, ScheduleConfig
from cadenza.drivers import Driver
from cadenza.engine.session import Session, session_of
from cadenza.optim.rates import SetsRates

if TYPE_CHECKING:
    from cadenza.hooks.listener import Listener
    from cadenza.run import Run

KEY = "lightning module"
"""The key in ``Session.adapters``."""


class Attached:
    """A LightningModule that a native trainer trains.

    Args:
        module: The LightningModule.
        driver: The driver of the trainer.
        arguments: The arguments of the trainer.
    """

    def __init__(self, module: Any, driver: Driver, arguments: Mapping[str, Any]) -> None:
        self.module: Any = module
        self.base: type[Any] = base_of_module(module)
        self.driver: Driver = driver
        self.arguments: Mapping[str, Any] = arguments
        self.loaders: Loaders
        """The loaders, created after ``setup``."""
        self.log: Any = None
        """The `ModuleLog`: the values of ``self.log``."""
        self._session: Callable[[], Session | None] = lambda: None
        self.optimizers: Sequence[Optimizer] = ()
        self.schedules: list[ScheduleConfig] = []
        """The schedules of the run, which callbacks may replace: ``trainer.lr_scheduler_configs``."""
        self.configured: Sequence[ScheduleConfig] = ()
        """The schedules of ``configure_optimizers``."""
        self.limit: int | None = None
        """The number of batches in an epoch that `Limit` sets."""
        self.plateau_listeners: list[Listener] = []
        """The listeners for plateau schedules, shown in plans if such a schedule exists."""
        self.rate_setters: Sequence[SetsRates] = ()
        """The callbacks of the list that set learning rates."""
        self.doubts: list[str] = []
        """Warnings about likely mistakes, such as methods that are never called."""
        self.clip: tuple[float | None, str | None] = (None, None)
        """The arguments of ``configure_gradient_clipping``: the bound of `ClipGradients`, and ``"norm"`` or ``"value"``."""
        self.left: int | None = None
        """The epoch ended by ``on_train_batch_start``."""
        self.manual: ManualSteps = ManualSteps()
        self.output: Any = None
        """The result of ``training_step`` for the current batch."""
        self.backward_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """The extra arguments of ``manual_backward``."""
        self.backward_losses: list[Tensor] = []
        """The losses passed to ``manual_backward`` for the current batch, without graph."""
        self.again: bool = False
        """Whether ``training_step`` is being called again for a counted batch."""
        self._wrapped: dict[int, Any] = {}
        self._is_set_up = True

    @property
    def run(self) -> Run | None:
        """The run; None before ``on_setup``."""
        session = self._session()
        return None if session is None else session.run

    def attach(self, trainer: Any) -> None:
        """Set ``trainer`` and ``device`` of the module and of nested LightningModules, and the trainer of its data."""
        for module in self.module.modules():
            if isinstance(module, self.base):
                module._trainer, module._device = trainer, self.driver.device
        if self.loaders.datamodule is not None:
            self.loaders.datamodule.trainer = trainer

    def configure_model(self) -> None:
        """Call the hook that builds the model, if defined."""
        for name in ("configure_sharded_model", "configure_model"):
            if self.overrides(name):
                self.call(name)

    def configure(self, optimizers: Sequence[Optimizer], schedules: Sequence[ScheduleConfig]) -> None:
        """Store the result of ``configure_optimizers``."""
        self.optimizers, self.schedules, self.configured = optimizers, list(schedules), schedules
        self.show_plateaus(self.plateau_listeners)

    def show_plateaus(self, listeners: list[Listener]) -> None:
        """Show the listeners for plateau schedules in plans if such a schedule exists."""
        self.plateau_listeners = listeners
        for listener in listeners:
            listener.inner = not any(config.reduce_on_plateau for config in self.configured)

    def begin(self, run: Run) -> None:
        """Attach to a run that starts."""
        session = session_of(run)
        self._session = ref(session)
        self.output, self.left, self.manual, self._wrapped = None, None, ManualSteps(), {}
        session.adapters[KEY] = self

    def tear_down(self, stage: str) -> None:
        """Call ``teardown`` of the datamodule and of the module. The next fit calls ``setup`` again."""
        self._is_set_up = False
        for holder in (self.loaders.datamodule, self.module):
            if holder is not None:
                holder.teardown(self.fn(stage))

    def set_up(self, stage: str) -> None:
        """Call ``setup`` of the datamodule and of the module, unless already called."""
        if not self._is_set_up:
            self._is_set_up = True
            for holder in (self.loaders.datamodule, self.module):
                if holder is not None:
                    holder.setup(self.fn(stage))

    def fn(self, stage: str) -> Any:
        """Return a stage as passed to ``setup`` and ``teardown`` by Lightning: a ``TrainerFn``, which equals its name."""
        return self.home("trainer.states").TrainerFn(stage)

    def wrapped(self, optimizer: Optimizer, strategy: Any) -> Any:
        """Return an optimizer as a ``LightningOptimizer``. Its ``step`` calls ``strategy.optimizer_step``."""
        if id(optimizer) not in self._wrapped:
            self._wrapped[id(optimizer)] = self.home("core.optimizer").LightningOptimizer(optimizer)
        own = self._wrapped[id(optimizer)]
        own._strategy = strategy
        return own

    @property
    def last_batch(self) -> bool:
        """Whether the last batch of the epoch is counted. False if the loader has no length."""
        progress = session_of(self.run).progress if self.run is not None else None
        return progress is not None and progress.batch_in_epoch == progress.batches_per_epoch

    @property
    def leaves(self) -> bool:
        """Whether ``on_train_batch_start`` has ended the current epoch."""
        return self.run is not None and self.left == self.run.progress.epoch

    @property
    def automatic(self) -> bool:
        """Whether the loop performs the backward pass and the update."""
        return bool(self.module.automatic_optimization)

    @property
    def accumulate(self) -> int:
        """The number of batches in the current step."""
        return 1 if self.run is None else session_of(self.run).step.window.size

    @property
    def batch_idx(self) -> int:
        """The index of the current batch in its epoch, from 0, until the batch is counted."""
        return 0 if self.run is None else self.run.progress.batch_in_epoch

    def overrides(self, name: str) -> bool:
        """Return whether the module overrides a hook or method, in its class or in the instance."""
        own = getattr(self.module, name, None)
        return own is not None and getattr(own, "__func__", own) is not getattr(self.base, name, None)

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a hook of the module, recording its name for ``self.log``."""
        module = self.module
        before, module._current_fx_name = module._current_fx_name, name
        try:
            return getattr(module, name)(*arguments, **keywords)
        finally:
            module._current_fx_name = before

    def home(self, name: str) -> ModuleType:
        """Return a module of the package that the LightningModule comes from, such as ``core.optimizer``."""
        return import_module(f"{self.base.__module__.removesuffix('.core.module')}.{name}")


def attached_to(run: Run) -> Attached | None:
    """Return the LightningModule of a run; None if the run was not created by ``Trainer.from_lightning``."""
    found: Attached | None = session_of(run).adapters.get(KEY)
    return found


def base_of_module(module: object) -> type[Any]:
    """Return the class LightningModule of `module`.

    Raises:
        TypeError: `module` is not a LightningModule.
    """
    for base in classes_of_lightning(type(module)):
        if base.__name__ == "LightningModule":
            return base
    if isinstance(module, type):
        name = module.__name__
        raise TypeError(f"Trainer.from_lightning takes a LightningModule; got the class {name}. Give an instance: {name}(...)")
    if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        raise TypeError(
            f"Trainer.from_lightning takes a LightningModule; got {type(module).__name__}, made by torch.compile. Give the "
            f"{type(inner).__name__} itself, and compile in place: module.compile()."
        )
    raise TypeError(
        f"Trainer.from_lightning takes a LightningModule of lightning or pytorch_lightning; got {type(module).__name__}. For "
        "another model use Trainer(model, optimizer, loader, compute_loss)."
    )

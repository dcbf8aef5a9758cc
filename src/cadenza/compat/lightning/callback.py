"""The adapter of Lightning's callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from cadenza.checkpoint.parts import placed
from cadenza.compat.adapter.attributes import plain_attributes
from cadenza.compat.adapter.event import Event
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.compat.adapter.gradients import Gradients, reads_gradients
from cadenza.compat.adapter.packing import packed, unpacked
from cadenza.compat.lightning.before_fit import freeze_early, is_scheduler, scheduled
from cadenza.compat.lightning.changing import around_hooks, saved_changes
from cadenza.compat.lightning.conductor import Conductor
from cadenza.compat.lightning.events import EVENTS, REMOVED
from cadenza.compat.lightning.library import is_lightning
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.compat.lightning.refused import check_runs, check_sharding
from cadenza.compat.lightning.saving import content_of
from cadenza.compat.lightning.trainer_view import TrainerView
from cadenza.engine.session import session_of
from cadenza.engine.step_state import StepState
from cadenza.errors import StateError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.fan_out import DispatchState
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment

if TYPE_CHECKING:
    from cadenza.run import Run


AFTER_UPDATE = frozenset({"on_train_batch_end", "on_train_epoch_end"})
"""The events in which Lightning still provides the gradients of the last update."""

MONITORING = ("EarlyStopping", "Checkpoint")
"""The classes with an ``on_train_epoch_end`` that Lightning calls after all others and the LightningModule."""


class LightningCallback(ForeignCallback, Conductor):
    """A callback of Lightning."""

    system: ClassVar[str] = "lightning"
    events: ClassVar[Mapping[str, Event]] = EVENTS
    removed: ClassVar[Mapping[str, str]] = REMOVED

    trainer: TrainerView
    """The ``trainer`` of the current run."""
    module: Any
    """The ``pl_module`` of the current run."""
    scene: DispatchState
    step: StepState

    def __init__(self, callback: Any, base: type[Any]) -> None:
        super().__init__(callback, base)
        check_runs(callback)
        self.shows_progress: bool = is_lightning(callback, "ProgressBar") and bool(getattr(callback, "is_enabled", True))
        self._monitors = any(is_lightning(callback, name) for name in MONITORING)
        self.each_rank: bool = self._monitors  # each rank compares its monitored values unless they are reduced
        self.owed: tuple[int, int] | None = None
        """The completed steps, and the batches in a step, when the last batch of a step ended, until its
        ``on_train_batch_end`` is called."""
        self._waiting: Mapping[str, Any] | None = None

    @classmethod
    def companions(cls, callbacks: list[Any]) -> list[Any]:
        """Move callbacks that write checkpoints after the other Lightning callbacks, as Lightning does."""
        slots = [index for index, callback in enumerate(callbacks) if isinstance(callback, cls)]
        ordered = list(callbacks)
        for index, other in zip(slots, sorted(slots, key=lambda slot: _writes(callbacks[slot])), strict=True):
            ordered[index] = callbacks[other]
        return ordered

    def before_trainer(self, arguments: dict[str, Any]) -> None:
        if is_scheduler(self.callback):
            arguments["accumulate"] = scheduled(self.callback, arguments["accumulate"])

    def before_fit(self, model: Any) -> None:
        freeze_early(self.callback, model)

    def conducts(self) -> bool:
        return bool(self.overridden())

    def overridden(self) -> list[str]:
        return [] if is_scheduler(self.callback) else super().overridden()

    def listeners(self) -> list[Listener]:
        own = list[Listener]()
        gradients = Gradients() if reads_gradients(self.callback, self.base) else None
        for name in self.overridden():
            event, hook = self.events[name], getattr(self.callback, name)
            if gradients is not None and name in AFTER_UPDATE:
                hook = gradients.shown(hook)
            if (moment := self._moment_of(name)) is not None and event.make is not None:
                own.append(Listener(moment, event.make(self, hook), event=name, on_error=self._mark))
            if name == "on_train_batch_end":
                own.append(Listener(Callback.on_step_end, own[-1].function, event=name, on_error=self._mark))
        keep = [] if gradients is None or AFTER_UPDATE.isdisjoint(self.overridden()) else gradients.listeners()
        return [*self.conducting(), *keep, *own, *around_hooks(self)] if own else []

    def _moment_of(self, event: str) -> Moment | None:
        """Return the native hook of an event.

        Monitoring callbacks see the values that the module logs in ``on_train_epoch_end``.
        """
        if event == "on_train_epoch_end" and self._monitors:
            return LightningMoments.on_train_epoch_end_monitoring
        return self.events[event].moment

    def owes(self, run: Run) -> Listener | None:
        if self.owed is None or run.progress.step <= self.owed[0]:
            return None
        hooks = hooks_of(run)
        own = [hook for hook in hooks.by_moment.get(Callback.on_step_end, ()) if hook.owner == hooks.name_of(self)]
        return next((listener for listener in own if listener.event == "on_train_batch_end"), None)

    def _mark(self, error: BaseException) -> None:
        """Skip all later hooks of Lightning callbacks, since native hooks at the end still reach all callbacks."""
        self.trainer._broken = True

    def take(self, run: Run, view: TrainerView) -> None:
        session = session_of(run)
        check_sharding(self.callback, shards=run.driver.shards)
        self.trainer, self.module = view, view._module_for(self.base)
        self.scene, self.step = session.hooks.scene, session.step
        self.owed, self._waiting = None, None
        self._attach_log(run)
        self._at_start = plain_attributes(self.callback)

    def _attach_log(self, run: Run) -> None:
        """Provide ``self.log`` and ``self.log_dict`` on the callback until the end of the run, as Lightning does."""
        own = vars(self.callback)
        for name in ("log", "log_dict"):
            if not hasattr(type(self.callback), name):
                own[name] = getattr(self.module, name)
                run.at_end(partial(own.pop, name, None))

    # -- state ---------------------------------------------------------------------------------------

    def collect(self, hook: Callable[..., Any], snapshot: Any) -> None:
        """Call ``on_save_checkpoint`` and save the entries for ``on_load_checkpoint``."""
        checkpoint = content_of(self.trainer._run, self.trainer)
        before = dict(checkpoint)
        hook(self.trainer, self.module, checkpoint)
        if "on_load_checkpoint" in self.overridden():
            snapshot.extra[self._key] = _for_checkpoint(added(before, checkpoint))

    def hand_back(self, hook: Callable[..., Any], loaded: Any) -> None:
        """Call ``on_load_checkpoint`` with the entries, then ``load_state_dict``, in the order of Lightning."""
        entries = placed(session_of(self.trainer._run), loaded.state.get("extra", {}).get(self._key, {}))
        hook(self.trainer, self.module, put_together(content_of(self.trainer._run, self.trainer), unpacked(entries)))
        if self._waiting is not None:
            self._load(self._waiting)
            self._waiting = None

    def state_dict(self) -> dict[str, Any]:
        own = _for_checkpoint(self.callback.state_dict()) if self._has_state() else super().state_dict()
        state: dict[str, Any] = {"states": {self.callback.state_key: own}} if own else {}
        state |= {"kept": kept} if (kept := unsaved_state(self.callback)) else {}
        return state | ({"run": changes} if (changes := saved_changes(self)) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_kept(self.callback, state.get("kept", {}))
        if "run" in state:
            self.trainer._changes.restore(state["run"])
        if "on_load_checkpoint" in self.overridden():
            self._waiting = state.get("states", {})
        else:
            self._load(state.get("states", {}))

    def _load(self, states: Mapping[str, Any]) -> None:
        key = self.callback.state_key
        if key not in states:
            if states:
                warnings.warn(
                    f"the checkpoint has the state of {', '.join(states)}, but the callback is {key}: it starts without state. "
                    "Give it the arguments that it had.",
                    stacklevel=2,
                )
        elif self._has_state():
            self.callback.load_state_dict(unpacked(states[key]))
            if hasattr(self.callback, "_restarting"):
                self.callback._restarting = False  # a BaseFinetuning; the parameter groups already exist
        else:
            super().load_state_dict(states[key])

    @property
    def _key(self) -> str:
        return f"lightning: {hooks_of(self.trainer._run).name_of(self)}"

    def _has_state(self) -> bool:
        return bool(type(self.callback).state_dict is not vars(self.base)["state_dict"])


def _for_checkpoint(state: Any) -> Any:
    """Return a Lightning callback's entries for a checkpoint, encoded for Cadenza where possible."""
    try:
        return packed(state)
    except StateError:  # the error on writing the checkpoint names the value
        return state


def _writes(adapter: LightningCallback) -> bool:
    return is_lightning(adapter.callback, "Checkpoint")


KEPT: Mapping[str, tuple[str, ...]] = {
    "ModelCheckpoint": ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
    "WeightAveraging": ("_latest_update_epoch",),
}
"""Attributes that Lightning loses on resume, by class."""


def unsaved_state(callback: Any) -> dict[str, Any]:
    """Return the state of a callback that is missing in its ``state_dict``."""
    names = [name for kind, kept in KEPT.items() if is_lightning(callback, kind) for name in kept]
    state = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    if is_lightning(callback, "ModelPruning") and callback._original_layers:
        state["layers"] = [layer["data"].state_dict() for layer in callback._original_layers.values()]
        pairs = enumerate(_copies(callback))
        state["shared"] = [index for index, (copied, present) in pairs if copied.data_ptr() == present.data_ptr()]
    return state


def put_kept(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore what `unsaved_state` returned."""
    for name, value in state.items():
        if name not in ("layers", "shared"):
            setattr(callback, name, value)
    if "layers" in state and callback._original_layers:
        for layer, weights in zip(callback._original_layers.values(), state["layers"], strict=True):
            layer["data"].load_state_dict(weights)
        for index, (copied, present) in enumerate(_copies(callback)):
            if index in state["shared"]:  # Lightning's lottery ticket makes them share memory
                copied.data = present.data


def _copies(callback: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each original value kept by ``ModelPruning`` with the parameter to restore."""
    for layer in callback._original_layers.values():
        for index, name in layer["names"]:
            module = callback._parameters_to_prune[index][0]
            yield getattr(layer["data"], name), getattr(module, f"{name}_orig", getattr(module, name))


_SAME = "same as state_dict"


def added(before: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that ``on_save_checkpoint`` changed. Weights that are already in the run's checkpoint are left out."""
    changed = {name: value for name, value in checkpoint.items() if name not in before or value is not before[name]}
    weights = before["state_dict"]
    same = [name for name, value in changed.items() if value is weights]
    return {**{name: value for name, value in changed.items() if value is not weights}, **({_SAME: same} if same else {})}


def put_together(checkpoint: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint created by ``on_save_checkpoint`` for ``on_load_checkpoint``."""
    whole = {**checkpoint, **entries}
    return whole | dict.fromkeys(whole.pop(_SAME, ()), checkpoint["state_dict"])

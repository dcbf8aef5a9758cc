"""The adapter of Keras's callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cadenza.compat.adapter.attributes import differing, plain_attributes, put_back
from cadenza.compat.adapter.event import Event
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.compat.adapter.gradients import Gradients, reads_gradients
from cadenza.compat.keras import classes, saving
from cadenza.compat.keras.events import ALIASES, BATCH_ENDS, EVENTS, TRACKED
from cadenza.compat.keras.optimizer_view import rate_setter
from cadenza.compat.keras.shared import KerasRun
from cadenza.compat.keras.variables import plain_inside
from cadenza.drivers.sharding import is_sharded
from cadenza.errors import AdapterError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.outputs import Outputs


@dataclass(slots=True, eq=False, repr=False)
class EventListener(Listener):
    """A listener that calls an event of Keras."""


class KerasCallback(ForeignCallback):
    """A callback of Keras."""

    system: ClassVar[str] = "keras"
    events: ClassVar[Mapping[str, Event]] = EVENTS

    after: Relation = (Phase.EVALUATE, Phase.SAVE)  # so that the last checkpoint precedes the effects of on_train_end

    def __init__(self, callback: Any, base: type[Any]) -> None:
        super().__init__(callback, base)
        own = classes.names(callback)
        self.shows_progress: bool = "ProgbarLogger" in own or "tqdm.TqdmCallback" in classes.titles(callback)
        self.keras: KerasRun | Any = None
        """The state shared by the callbacks of the current run."""
        self._loaded: Mapping[str, Any] | None = None
        self._kept: set[str] = set()

    @classmethod
    def companions(cls, callbacks: list[Any]) -> list[Any]:
        """Replace each `keras.callbacks.CallbackList` in the list with its members."""
        found: list[Any] = []
        for callback in callbacks:
            if isinstance(callback, cls) and classes.titles(callback.callback)[0].endswith("keras.CallbackList"):
                found += cls.companions([cls(member, callback.base) for member in callback.callback.callbacks])
            else:
                found.append(callback)
        return found

    def plain(self) -> dict[str, Any]:
        return _attributes(self.callback)

    def bare(self) -> Any:
        bare = copy(self.callback)
        bare._model = None
        return bare

    def overridden(self) -> list[str]:
        found = super().overridden()
        return [name for name in found if ALIASES.get(name) not in found]

    @property
    def tracks(self) -> bool:
        """Whether it needs the means of batches."""
        return not TRACKED.isdisjoint(self.overridden())

    @property
    def ends_batches(self) -> bool:
        """Whether it has an event at the end of batches."""
        return not BATCH_ENDS.isdisjoint(self.overridden())

    # -- listeners ----------------------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        names = self.overridden()
        if not names:
            return []
        found = {name: EVENTS[name] for name in names if name != "on_train_begin"}
        gradients = Gradients() if reads_gradients(self.callback, self.base) and self.tracks else None
        called = [
            EventListener(event.moment, event.make(self, self._event(name, gradients)), event=name)
            for name, event in found.items()
            if event.moment and event.make
        ]
        called += [
            EventListener(Callback.on_batch_end, each.function, event=each.event) for each in called if each.event in BATCH_ENDS
        ]
        setup = [
            Listener(Callback.on_setup, self._set_up),
            Listener(Callback.on_fit_start, self._start, event="on_train_begin"),
        ]
        outside = any(name.startswith(("on_test", "on_predict")) for name in names)
        attach = [Listener(Callback.on_eval_start, self._attach)] if outside else []
        close = [Listener(Callback.on_fit_end, self._close)] if "CSVLogger" in classes.names(self.callback) else []
        keep = [] if gradients is None else gradients.listeners()
        return [*setup, *attach, *keep, *(self._tracking() if self.tracks else []), *called, *close]

    def _event(self, name: str, gradients: Gradients | None) -> Any:
        event = getattr(self.callback, name)
        after_update = name in BATCH_ENDS or name == "on_epoch_end"
        return event if gradients is None or not after_update else gradients.shown(event)

    def _tracking(self) -> list[Listener]:
        """Return the listeners that act for all callbacks of the run. Only the first callback's are used."""
        listeners = [
            Listener(Callback.on_epoch_start, partial(_first, self, KerasRun.begin_epoch)),
            Listener(Callback.on_batch_end, self._add_batch),
            Listener(Callback.on_eval_end, partial(_first, self, KerasRun.add_results)),
            Listener(Callback.on_epoch_end, partial(_first, self, KerasRun.evaluate_cut_epoch)),
            Listener(Callback.on_epoch_end, partial(_first, self, KerasRun.end_epoch)),
            Listener(Callback.on_fit_end, partial(_first, self, KerasRun.end_cut_epoch)),
            Listener(Callback.on_save, partial(_first, self, KerasRun.save)),
            Listener(Callback.on_load, partial(_first, self, KerasRun.load)),
        ]
        for listener in listeners:
            listener.shared = True
        return listeners

    def _add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        """Do nothing. `_set_up` replaces this in the first callback's listener and removes the other listeners."""

    # -- the start of a run -------------------------------------------------------------------------------

    def _set_up(self, run: Run) -> None:
        classes.check(self.callback)
        self._loaded, self._kept = None, set()
        keras = self.keras = KerasRun.of(run)
        hooks = hooks_of(run)
        if self.tracks and self is not keras.first():
            hooks.remove(Callback.on_batch_end, self._add_batch)
        elif self.tracks:
            for listener in hooks.by_moment[Callback.on_batch_end]:
                if listener.function == self._add_batch:
                    listener.call = listener.function = keras.add_batch
        if "SwapEMAWeights" in classes.names(self.callback) and not keras.view.optimizer.use_ema:
            raise AdapterError(f"{self.name} needs averaged weights, and no callback keeps them. Add Ema(...) to callbacks.")
        if classes.names(self.callback) & {"LearningRateScheduler", "ReduceLROnPlateau"}:
            self._check_rates(run)
        self._introduce(run, keras.params())

    def _check_rates(self, run: Run) -> None:
        others = [name for optimizer in run.optimizers if (name := rate_setter(run, optimizer)) is not None]
        if others:
            raise AdapterError(
                f"{self.name} and {others[0]} set the learning rate of the same optimizer. Keep one of the two. A Warmup(...) "
                "may be combined with either."
            )

    def _introduce(self, run: Run, params: dict[str, Any]) -> None:
        """Set the callback's model and parameters, or disable its events if only the main process calls it."""
        own = classes.names(self.callback)
        sharded = any(map(is_sharded, run.model.parameters())) and bool(own & classes.WRITES_WEIGHTS)
        if sharded:
            saving.make_folder(run, self.callback)
        if not run.is_main and classes.is_main_only(self.callback):
            left = set().union(*(classes.EVERYWHERE.get(name, ()) for name in own))
            for listener in self._event_listeners(run):
                if sharded and listener.event != "on_train_end":
                    listener.call = partial(_joining, listener.function)
                elif listener.event not in left:
                    listener.call = _nothing
        self.callback.set_model(self.keras.view)
        self.callback.set_params(params)

    def _event_listeners(self, run: Run) -> list[EventListener]:
        hooks = hooks_of(run)
        listeners = [listener for listeners in hooks.by_moment.values() for listener in listeners]
        return [each for each in listeners if isinstance(each, EventListener) and each.owner == hooks.name_of(self)]

    def _is_silent(self, run: Run) -> bool:
        return not run.is_main and classes.is_main_only(self.callback)

    def _attach(self, run: Run, evaluation: Evaluation) -> None:
        """Begin an evaluation, which may be a separate run."""
        if self.keras is None or not self.keras.is_of(run):
            self.keras = KerasRun.of(run)
            self._introduce(run, self.keras.params(evaluation))
        self.keras.begin_evaluation(evaluation)

    def _start(self, run: Run) -> None:
        """Call ``on_train_begin``, then restore the state of a checkpoint, which Keras's callbacks reset in that event."""
        self._leave_batches(run)
        state = self._loaded
        resumed = state is not None or run.progress.step > 0
        silent = self._is_silent(run)
        called = "on_train_begin" in self.overridden() and (not silent or "BackupAndRestore" in classes.names(self.callback))
        if state is not None:
            put_back(state["attributes"], self.callback)
        if called:
            continued = classes.continued_file(self.callback, None if state is None else state.get("file"))
            with self.keras.repeating() if resumed else nullcontext(), continued:
                self.callback.on_train_begin({})
        if state is not None and called:
            put_back(state["attributes"], self.callback)
        self._at_start = _attributes(self.callback)

    def _leave_batches(self, run: Run) -> None:
        """Remove the listeners for batches inside accumulation windows if each step of the run has one batch."""
        session = self.keras.session
        if session.step.most == 1 and "lightning" not in session.adapters:  # in which callbacks may change the windows
            for listener in self._event_listeners(run):
                if listener.moment is Callback.on_batch_end:
                    session.hooks.remove(listener.moment, listener.function)

    def _close(self, run: Run) -> None:
        classes.close_file(self.callback)

    def repeat(self, event: Any, *arguments: Any) -> None:
        """Repeat an event that preceded the checkpoint, since callbacks create objects in it that no checkpoint holds."""
        with self.keras.repeating():
            before = _attributes(self.callback)
            event(*arguments)
            put_back(differing(_attributes(self.callback), before), self.callback)

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self.overridden():
            return {}
        self.warn_of_left_out()
        now = _attributes(self.callback)
        changed = {*differing(self._at_start, now), *(self._loaded or {}).get("attributes", {})}
        kept = {name: value for name, value in now.items() if name in changed and name not in classes.NOT_STATE}
        size = classes.file_size(self.callback)
        return {"attributes": kept, **({} if size is None else {"file": size})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state


def _attributes(callback: Any) -> dict[str, Any]:
    """Return copies of the attributes that a checkpoint can hold. Events at the start recreate learning rates as objects."""
    return plain_attributes(_Plain({name: plain_inside(value) for name, value in vars(callback).items()}))


class _Plain:
    """An object with given attributes."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self).update(attributes)


def _nothing(*_: Any) -> None:
    pass


def _joining(event: Any, run: Run, *arguments: Any) -> None:
    """Call an event of a callback that saves a sharded model, on a rank other than the main process."""
    try:
        event(run, *arguments)
    except FileExistsError:  # the main process created the folder concurrently and waits for the weights
        saving.whole_weights(run)


def _first(adapter: KerasCallback, act: Any, run: Run, *arguments: Any) -> None:
    keras = adapter.keras
    if keras is not None and keras.is_of(run) and adapter is keras.first():
        act(keras, *arguments)

"""The adapter of Hugging Face's transformers's callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from cadenza.compat.adapter.attributes import changed_since, plain_attributes, put_back
from cadenza.compat.adapter.event import Event
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.compat.transformers.companions import Control, State
from cadenza.compat.transformers.events import EVENTS
from cadenza.compat.transformers.fixed_arguments import FixedArguments
from cadenza.compat.transformers.flags import COLLECTIVE, flags_of
from cadenza.compat.transformers.flow import Flow, exports
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.compat.adapter.surface.surface import Surface
    from cadenza.hooks.dispatch import Hooks
    from cadenza.run import Run

_PROGRESS = ("ProgressCallback", "NotebookProgressCallback", "RichProgressCallback")


class TransformersCallback(ForeignCallback):
    """A callback of Hugging Face's transformers."""

    system: ClassVar[str] = "transformers"
    events: ClassVar[Mapping[str, Event]] = EVENTS

    flow: Flow
    """The state shared by all transformers callbacks in a list; see `companions`."""

    def __init__(self, callback: Any, base: type[Any]) -> None:
        super().__init__(callback, base)
        self.flow = Flow()
        self._restored: dict[str, tuple[Any, Any]] = {}
        events = self.overridden()
        self.shows_progress: bool = any(base.__name__ in _PROGRESS for base in type(callback).__mro__)
        self.after: Relation = (Phase.CLIP,) if "on_pre_optimizer_step" in events else ()
        early = {Phase.SCHEDULE: {"on_optimizer_step"}, Phase.EVALUATE: {"on_step_end", "on_epoch_end"}}
        self.before: Relation = tuple(phase for phase, names in early.items() if names.intersection(events))

    def surface(self, hooks: Hooks) -> Surface | None:
        """Return the callback's surface, with the ``args`` that the list provides."""
        found = super().surface(hooks)
        given = next((callback for callback in hooks.callbacks.values() if isinstance(callback, FixedArguments)), None)
        if found is None or given is None:
            return found
        values = getattr(given, "values", {})
        return found.providing("args", lambda name: name in values or hasattr(given.arguments, name))

    @classmethod
    def companions(cls, callbacks: list[Any]) -> list[Any]:
        """Return the list with the two shared callbacks added, if any of its transformers callbacks has a hook."""
        members = [callback for callback in callbacks if isinstance(callback, cls)]
        present = next((callback for callback in callbacks if isinstance(callback, State)), None)
        flow = Flow() if present is None else present.flow
        for member in members:
            member.flow = flow
        flow.members = members
        flags = {id(member): flags_of(member) for member in members}
        flow.asks = any(flags.values())
        flow.reads = any(not named.isdisjoint(("should_evaluate", "should_save")) for named in flags.values())
        # its flags are equal on all ranks
        alike = [member for member in members if type(member.callback).__name__ == "DefaultFlowCallback"]
        flow.may_differ = any(flags[id(member)].intersection(COLLECTIVE) for member in members if member not in alike)
        if present is not None:  # from the list of another trainer, to which callbacks were added
            return [*(callback for callback in callbacks if not isinstance(callback, Control)), Control(flow)]
        return [State(flow), *callbacks, Control(flow)] if any(map(_has_hook, members)) else callbacks

    def listeners(self) -> list[Listener]:
        return silent(super().listeners())  # `Control` makes the requests

    def own_listeners(self) -> list[Listener]:
        return [Listener(Callback.on_fit_start, self._trained_from)] if self.overridden() else []

    def _trained_from(self, run: Run) -> None:
        # What on_train_begin sets, such as the flag of an open tracker, must be set again in the process that continues. What
        # it adds to restored lists is there already.
        own = vars(self.callback)
        again = {name: value for name, (value, put) in self._restored.items() if own.get(name) is put}
        put_back(deepcopy(again), self.callback)
        self._at_start = plain_attributes(self.callback)

    def begin(self, run: Run) -> None:
        self._restored = {}

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if exports(self.callback):
            return dict(self.callback.state())
        self.warn_of_left_out()
        changed = changed_since(self._at_start, self.callback).keys() | self._restored.keys()
        now = {name: value for name, value in vars(self.callback).items() if name in changed and not _is_of_model(value)}
        return {name: attribute for name, attribute in plain_attributes(self.callback).items() if name in now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if exports(self.callback):
            put_back(state.get("attributes", {}), self.callback)
            return
        put_back(deepcopy(dict(state)), self.callback)
        self._restored = {name: (value, getattr(self.callback, name)) for name, value in state.items()}


def _is_of_model(value: object) -> bool:
    """Return whether an attribute holds parameters of the model, which the new process recreates."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, nn.Parameter) for part in parts)


def _has_hook(adapter: TransformersCallback) -> bool:
    return any(EVENTS[name].moment for name in adapter.overridden())

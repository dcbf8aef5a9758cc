"""Callbacks of other systems in a list. They are recognized by a base class; no other system is imported for this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Protocol

from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import BaseCallback

ADAPTERS: Mapping[str, str] = {
    "transformers.TrainerCallback": "cadenza.compat.transformers.callback:TransformersCallback",
    "lightning.Callback": "cadenza.compat.lightning.callback:LightningCallback",
    "pytorch_lightning.Callback": "cadenza.compat.lightning.callback:LightningCallback",
    "keras.Callback": "cadenza.compat.keras.callback:KerasCallback",
    "tf_keras.Callback": "cadenza.compat.keras.callback:KerasCallback",
}
"""Cadenza's own adapters: the package and the name of the base class, and the class of the adapter. Those of other packages are
entry points of the group ``cadenza.adapters`` with the same names and values."""


class HasTrainBegin(Protocol):
    """What type checkers know of a callback of transformers or Keras."""

    @property
    def on_train_begin(self) -> Callable[..., Any]: ...


class HasTrainStart(Protocol):
    """What type checkers know of a callback of Lightning."""

    @property
    def on_train_start(self) -> Callable[..., Any]: ...


AnyCallback = BaseCallback | HasTrainBegin | HasTrainStart
"""A native callback, or one of another system."""


class AdaptedCallback(BaseCallback):
    """A callback of another system in a native run. The adapter of a system is a subclass.

    Args:
        callback: The callback.
        base: The base class of the other system.
    """

    logs_training = True  # it sees the logs that its own trainer would give
    system: ClassVar[str]
    """The name of the other system."""

    def __init__(self, callback: Any, base: type[Any]) -> None:
        self.callback: Any = callback
        self.base: type[Any] = base
        self.name: str | None = type(callback).__name__
        self.on_fault: Literal["raise", "disable", "retry"] = getattr(callback, "on_fault", type(self).on_fault)

    def __repr__(self) -> str:
        return f"{type(self.callback).__name__} ({self.system})"

    def __eq__(self, other: object) -> bool:
        """An adapter equals its callback, so that ``in``, ``index`` and ``remove`` of a list take the callback."""
        return other is self or other is self.callback

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are new adapters of a copy of the callback, without the run that the adapter was in."""
        return type(self), (self.bare(), self.base)

    def bare(self) -> Any:
        """Return the callback to copy and to pickle. Override this if the adapter gives it parts of a run."""
        return self.callback

    @classmethod
    def companions(cls, callbacks: list[Any]) -> list[Any]:
        """Return the list of a trainer with the native callbacks that the adapters in it share. Override this."""
        return callbacks

    def before_trainer(self, arguments: dict[str, Any]) -> None:
        """Change arguments of the trainer that the callback decides: ``accumulate``. Override this."""

    def before_fit(self, model: Any) -> None:
        """Prepare the model before the optimizers are made. Override this."""

    def beforehand(self, name: str, hooks: Hooks) -> tuple[list[str], list[str]]:
        """Return lines for the plan, and warnings for the start of a run. `name` is its name in the run. Override this."""
        return [], []


def adapted(callbacks: object) -> Any:
    """Return a list in which each callback of another system is replaced by its adapter; anything but an iterable as given.

    Callbacks that the adapters of a system share are added.

    Raises:
        CallbackError: An element is a class of another system, or is in the list twice; or `callbacks` is such a callback.
    """
    if base_of(callbacks) is not None:
        raise not_a_list(callbacks)
    if isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        return callbacks
    given, seen = list(callbacks), set[int]()
    for index, item in enumerate(given):
        if isinstance(item, AdaptedCallback):
            _check_once(item.callback, index, seen)
        elif base_of(item) is not None:
            if isinstance(item, type):
                raise CallbackError(
                    f"callbacks[{index}] is the class {item.__name__}; expected an instance: {item.__name__}(...)"
                )
            _check_once(item, index, seen)
            given[index] = adapt(item)
    kinds = dict.fromkeys(type(item) for item in given if isinstance(item, AdaptedCallback))
    if kinds:
        _tell_apart(given)
    for kind in kinds:
        given = kind.companions(given)
    return given


def adapted_list(callbacks: Any) -> Any:
    """Do the same as `adapted`, in place if it is a list; return the list."""
    given = adapted(callbacks)
    if not isinstance(callbacks, list):
        return given
    callbacks[:] = given
    return callbacks


def _check_once(callback: object, index: int, seen: set[int]) -> None:
    if id(callback) in seen:
        raise CallbackError(f"callbacks[{index}] is in the list twice: {_shown(callback)}. Make a second instance.")
    seen.add(id(callback))


def _tell_apart(callbacks: list[Any]) -> None:
    """Add the name of the system to callbacks that share theirs with one of another system, such as ``EarlyStopping (keras)``.

    So states and decisions belong to the same callback when the order of the list changes.
    """
    systems: dict[str, set[str]] = {}
    for callback in callbacks:
        foreign = isinstance(callback, AdaptedCallback)
        name = type(callback.callback).__name__ if foreign else getattr(callback, "name", None) or type(callback).__name__
        systems.setdefault(name, set()).add(callback.system if foreign else "")
    for callback in callbacks:
        if isinstance(callback, AdaptedCallback) and len(systems[type(callback.callback).__name__]) > 1:
            callback.name = f"{type(callback.callback).__name__} ({callback.system})"


def not_a_list(callbacks: object) -> CallbackError:
    """Return the error for a single callback where a list is expected."""
    return CallbackError(f"callbacks must be a list of callbacks; got {_shown(callbacks)}. Write callbacks=[...]")


def _shown(callback: object) -> str:
    return callback.__name__ if isinstance(callback, type) else f"{type(callback).__name__}(...)"


# -- which adapter ---------------------------------------------------------------------------------


def adapt(callback: object) -> AdaptedCallback:
    """Return the adapter of a callback of another system.

    Raises:
        TypeError: It has no base class for which there is an adapter.
        CallbackError: It has base classes of two systems, or its adapter cannot be imported.
    """
    base = base_of(callback)
    if base is None or isinstance(callback, type):
        titles = ", ".join({**ADAPTERS, **_of_others()})
        raise TypeError(f"expected a callback of another system, with one of the bases {titles}; got {callback!r}")
    kinds = list(dict.fromkeys(_adapter(base) for base in type(callback).__mro__ if _target(base) is not None))
    if len(kinds) > 1:
        raise CallbackError(
            f"{type(callback).__name__} is derived from callbacks of two systems, {' and '.join(kind.system for kind in kinds)}"
            ". Make one class for each."
        )
    return kinds[0](callback, base)


def base_of(callback: object) -> type[Any] | None:
    """Return the base class of another system that a callback, or a callback class, is derived from; None if there is none."""
    kind = callback if isinstance(callback, type) else type(callback)
    if issubclass(kind, BaseCallback):
        return None
    return next((base for base in kind.__mro__ if _target(base) is not None), None)


def title_of(kind: type[Any]) -> str:
    """Return the package and the name of a class, as in `ADAPTERS`."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _target(kind: type[Any]) -> str | None:
    if kind.__module__ == "builtins":
        return None
    title = title_of(kind)
    return ADAPTERS.get(title) or _of_others().get(title)


@cache
def _of_others() -> Mapping[str, str]:
    """Return the adapters of other packages. They are read when a list has an element that is no native callback."""
    return {point.name: point.value for point in entry_points(group="cadenza.adapters")}


@cache
def _adapter(kind: type[Any]) -> type[AdaptedCallback]:
    target = _target(kind)
    assert target is not None, "a base class of another system"
    module, _, name = target.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CallbackError(f"the adapter {target!r} of {title_of(kind)} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, AdaptedCallback)):
        raise CallbackError(f"the adapter {target!r} of {title_of(kind)} must be a subclass of AdaptedCallback; got {found!r}")
    return found


# -- what they have to say before a run ------------------------------------------------------------


def before_trainer(callbacks: Iterable[object], **arguments: Any) -> dict[str, Any]:
    """Return arguments of a trainer, changed by the adapters in its list."""
    for callback in callbacks:
        if isinstance(callback, AdaptedCallback):
            callback.before_trainer(arguments)
    return arguments


def before_fit(callbacks: Iterable[object], model: Any) -> None:
    """Let the adapters in a list prepare the model."""
    for callback in callbacks:
        if isinstance(callback, AdaptedCallback):
            callback.before_fit(model)


def beforehand(hooks: Hooks) -> tuple[list[str], list[str]]:
    """Return lines of all adapters for the plan, warnings with ``!``, and warnings for the start of a run."""
    foreign = {name: callback for name, callback in hooks.callbacks.items() if isinstance(callback, AdaptedCallback)}
    if not foreign:
        return [], []
    shown = [name if name.endswith(f"({value.system})") else f"{name} ({value.system})" for name, value in foreign.items()]
    notes, warnings = [f"of other systems: {', '.join(shown)}"], list[str]()
    for name, value in foreign.items():
        lines, doubts = value.beforehand(name, hooks)
        notes, warnings = notes + lines, warnings + doubts
    return notes, warnings

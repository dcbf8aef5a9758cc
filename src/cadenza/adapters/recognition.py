"""Callbacks of other systems are recognized by a base class. No other system is imported for this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from cadenza.adapters.foreign import ForeignCallback
from cadenza.errors import CallbackError
from cadenza.hooks.moments import BaseCallback

BASES: Mapping[str, str] = {
    "transformers.TrainerCallback": "transformers",
    "lightning.Callback": "lightning",
    "pytorch_lightning.Callback": "lightning",
    "keras.Callback": "keras",
    "tf_keras.Callback": "keras",
}
"""The package and the name of each base class, and the adapter for its subclasses."""


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


def adapted(callbacks: object) -> Any:
    """Return a list in which each callback of another system is replaced by its adapter; anything but an iterable as given.

    Callbacks that the adapters of a system share are added.

    Raises:
        CallbackError: An element is a class of another system, or is in the list twice; or `callbacks` is such a callback.
    """
    if base_of(callbacks) is not None:
        raise _no_list(callbacks)
    if isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        return callbacks
    given, seen = list(callbacks), set[int]()
    for index, one in enumerate(given):
        if isinstance(one, ForeignCallback):
            _check_once(one.callback, index, seen)
        elif base_of(one) is not None:
            if isinstance(one, type):
                raise CallbackError(
                    f"callbacks[{index}] is the class {one.__name__}; expected an instance: {one.__name__}(...)"
                )
            _check_once(one, index, seen)
            given[index] = adapt(one)
    kinds = dict.fromkeys(type(one) for one in given if isinstance(one, ForeignCallback))
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
    for one in callbacks:
        foreign = isinstance(one, ForeignCallback)
        name = type(one.callback).__name__ if foreign else getattr(one, "name", None) or type(one).__name__
        systems.setdefault(name, set()).add(one.system if foreign else "")
    for one in callbacks:
        if isinstance(one, ForeignCallback) and len(systems[type(one.callback).__name__]) > 1:
            one.name = f"{type(one.callback).__name__} ({one.system})"


def listed(callbacks: object) -> list[Any]:
    """Return `callbacks` as a list.

    Raises:
        CallbackError: They are no iterable, such as a single callback.
    """
    if base_of(callbacks) is not None or isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise _no_list(callbacks)
    return [*callbacks]


def _no_list(callbacks: object) -> CallbackError:
    return CallbackError(f"callbacks must be a list of callbacks; got {_shown(callbacks)}. Write callbacks=[...]")


def adapt(callback: object) -> ForeignCallback:
    """Return the adapter of a callback of another system.

    Raises:
        TypeError: It has none of the base classes in `BASES`.
        CallbackError: It has base classes of two systems.
    """
    base = base_of(callback)
    if base is None or isinstance(callback, type):
        raise TypeError(f"expected a callback of another system, with one of the bases {', '.join(BASES)}; got {callback!r}")
    systems = list(dict.fromkeys(BASES[title] for one in type(callback).__mro__ if (title := title_of(one)) in BASES))
    if len(systems) > 1:
        raise CallbackError(
            f"{type(callback).__name__} is derived from callbacks of two systems, {' and '.join(systems)}. Make one class for "
            "each."
        )
    return _ADAPTERS[BASES[title_of(base)]](callback, base)


def base_of(callback: object) -> type[Any] | None:
    """Return the base class of another system that a callback, or a callback class, is derived from; None if there is none."""
    kind = callback if isinstance(callback, type) else type(callback)
    if issubclass(kind, BaseCallback):
        return None
    return next((one for one in kind.__mro__ if title_of(one) in BASES), None)


def title_of(kind: type[Any]) -> str:
    """Return the package and the name of a class, as in `BASES`."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _shown(callback: object) -> str:
    return callback.__name__ if isinstance(callback, type) else f"{type(callback).__name__}(...)"


def _transformers(callback: object, base: type[Any]) -> ForeignCallback:
    from cadenza.adapters.transformers.callback import TransformersCallback  # imported here: few runs need it

    return TransformersCallback(callback, base)


def _lightning(callback: object, base: type[Any]) -> ForeignCallback:
    from cadenza.adapters.lightning.callback import LightningCallback

    return LightningCallback(callback, base)


def _keras(callback: object, base: type[Any]) -> ForeignCallback:
    from cadenza.adapters.keras.callback import KerasCallback

    return KerasCallback(callback, base)


_ADAPTERS: Mapping[str, Callable[[object, type[Any]], ForeignCallback]] = {
    "transformers": _transformers,
    "lightning": _lightning,
    "keras": _keras,
}

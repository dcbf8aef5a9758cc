"""Facts about the callbacks of other systems before a run: lines for its plan, and warnings of certain errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.adapters.foreign import ForeignCallback, never_called
from cadenza.adapters.transformers.given import Given
from cadenza.hooks.dispatch import Hooks

if TYPE_CHECKING:
    from cadenza.adapters.surface.surface import Surface


def beforehand(hooks: Hooks) -> tuple[list[str], list[str]]:
    """Return lines for the plan, warnings with ``!``, and warnings for the start of a run.

    The source of the classes is read; nothing of them is called. The warnings for the start name only what fails whenever a
    certain event is called.
    """
    adapters = {name: one for name, one in hooks.callbacks.items() if isinstance(one, ForeignCallback)}
    foreign = {name: one.callback for name, one in adapters.items()}
    if not foreign:
        return [], []
    from cadenza.adapters.surface.surface import surface_of  # imported here: few runs need it

    surfaces = {name: _given(surface, hooks) for name, one in foreign.items() if (surface := surface_of(one)) is not None}
    shown = [name if name.endswith(f"({one.system})") else f"{name} ({one.system})" for name, one in surfaces.items()]
    notes = [f"of other systems: {', '.join(shown)}"]
    warnings = [text for name, adapter in adapters.items() for text in _never_called(name, adapter)]
    notes += [f"! {text}" for text in warnings]
    for name, one in surfaces.items():
        notes += one.notes(name)
        if one.refused:
            warnings.append(f"{name} does not work in a native run: {one.refused}")
        warnings += (f"{name} will fail: it {error}" for error in one.certain_errors())
    return notes, warnings


def _given(surface: Surface, hooks: Hooks) -> Surface:
    """Return a surface with the ``args`` that the list of callbacks gives to those of transformers."""
    given = next((one for one in hooks.callbacks.values() if isinstance(one, Given)), None)
    if given is None or surface.system != "transformers":
        return surface
    values = getattr(given, "values", {})
    return surface.providing("args", lambda name: name in values or hasattr(given.arguments, name))


def _never_called(name: str, adapter: ForeignCallback) -> list[str]:
    """Return a warning for each method that is named almost like an event, or was one, and is none."""
    kind = type(adapter.callback)
    own = kind.__mro__[: kind.__mro__.index(adapter.base)]
    methods = {method for one in own for method, value in vars(one).items() if method.startswith("on_") and callable(value)}
    unknown = sorted(methods - {*adapter.events, *dir(adapter.base)})
    return [told for method in unknown if (told := never_called(name, method, adapter.system, adapter.events, adapter.removed))]

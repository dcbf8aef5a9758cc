"""The requirements on an adapter of callbacks of another system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cadenza.hooks.dispatch import Hooks
from cadenza.loops.foreign import AdaptedCallback, adapt, base_of, title_of
from cadenza.testing.contracts import check_callback
from cadenza.testing.differing import evaluated
from cadenza.testing.recorder import Recorder
from cadenza.testing.results import CLOCKS
from cadenza.testing.tiny import tiny_run


def check_adapter(factory: Callable[[], Any], *, ignore: Sequence[str] = CLOCKS, reads: bool = False) -> None:
    """Check the requirements on the adapter of a callback of another system.

    - The base class of the callback is recognized: an entry point of the group ``cadenza.adapters`` names its adapter.
    - The adapter names the system, and equals its callback.
    - A callback that overrides no event has no listeners.
    - Each event with a moment is called in a run in which the moment fires.
    - An error in an event names the callback and the event.
    - The requirements of `check_callback`.

    Args:
        factory: Returns a new callback of the other system.
        ignore: As in `check_callback`.
        reads: As in `check_callback`.

    Raises:
        AssertionError: A requirement is not met. The message says which.
        Exception: An error that the callback raises in a run.

    >>> import transformers
    >>> class Watch(transformers.TrainerCallback):
    ...     def on_step_end(self, args, state, control, **objects):
    ...         control.should_training_stop = state.global_step == 7
    >>> check_adapter(Watch)
    """
    callback = factory()
    base = base_of(callback)
    assert base is not None, (
        f"{type(callback).__name__} has no base class with an adapter. Expected an entry point of the group cadenza.adapters "
        f"with the name of a base class, such as {title_of(type(callback).__mro__[-2])!r}"
    )
    adapter = adapt(callback)
    kind = type(adapter)
    assert getattr(kind, "system", ""), f"{kind.__name__}.system is the name of the other system; it is missing"
    assert kind.system in repr(adapter), f"repr() of the adapter names its system {kind.system!r}; it is {adapter!r}"
    assert adapter == callback, "an adapter equals its callback"
    assert callback in [adapter], "an adapter equals its callback"
    events = getattr(kind, "events", {})
    assert Hooks([_adapter_of(kind, base, callback, {})]).by_moment == {}, "a callback without events has no listeners"
    _check_called(kind, base, factory, [name for name, event in events.items() if event.moment is not None and event.make])
    check_callback(factory, ignore=ignore, reads=reads)


def _adapter_of(kind: type[AdaptedCallback], base: type[Any], callback: Any, methods: dict[str, Any]) -> AdaptedCallback:
    """Return the adapter of a callback with the attributes of another one, and with these methods alone."""
    made: Any = object.__new__(type("Overriding", (base,), methods))
    vars(made).update(vars(callback))
    return kind(made, base)


def _check_called(kind: type[AdaptedCallback], base: type[Any], factory: Callable[[], Any], names: Sequence[str]) -> None:
    called: list[str] = []

    def recording(name: str) -> Callable[..., None]:
        return lambda *values, **named: called.append(name)

    def breaking(*values: Any, **named: Any) -> None:
        raise RuntimeError("broken on purpose")

    events, recorder = getattr(kind, "events", {}), Recorder()
    adapter = _adapter_of(kind, base, factory(), {name: recording(name) for name in names})
    tiny_run(callbacks=[evaluated(), *kind.companions([adapter]), recorder], epochs=2, accumulate=2)
    fired = {seen.moment for seen in recorder.seen}
    missing = [name for name in names if events[name].moment.__name__ in fired and name not in called]
    assert not missing, f"events that a run never called, though their moments fired: {', '.join(missing)}"
    if not called:
        return
    broken = _adapter_of(kind, base, factory(), {called[0]: breaking})
    try:
        tiny_run(callbacks=[evaluated(), *kind.companions([broken])], epochs=2, accumulate=2)
    except RuntimeError as error:
        notes = " ".join(getattr(error, "__notes__", []))
        assert f"Overriding.{called[0]}" in notes, f"an error names the callback and the event; its notes are {notes!r}"
    else:
        raise AssertionError(f"an error in {called[0]} did not end the run")

"""Errors in hooks, and functions that callbacks register for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.hooks.fan_out import Scene
    from cadenza.hooks.listener import Listener


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a hook that disabled its callback, or in a sink that is tried again. The run continued.

    ``run.faults`` lists it.

    >>> from cadenza import Callback
    >>> from cadenza.testing import tiny_run
    >>> class Broken(Callback):
    ...     on_fault = "disable"
    ...     def on_step_end(self, run):
    ...         raise OSError("the disk is full")
    >>> [fault] = tiny_run(callbacks=[Broken()]).faults
    >>> fault.callback, fault.moment, fault.at.step, fault.error
    ('Broken', 'on_step_end', 1, OSError('the disk is full'))
    """

    callback: str
    """The name of the callback in the run."""
    moment: str
    """The name of the moment, such as ``on_step_end``."""
    error: Exception
    """The error. Its traceback is in the warning and in ``console.log``: frames would keep the model in memory."""
    at: Counters
    """The counters at the time of the error."""
    retried: bool = False
    """Whether it is a sink that is tried again. Otherwise the callback is disabled."""

    def __str__(self) -> str:
        effect = "is tried again" if self.retried else "is disabled"
        return f"{self.callback} failed in {self.moment} at {self.at} and {effect}: {self.error!r}"


@dataclass(frozen=True, slots=True)
class Closer:
    """A function that a hook registered for the next step boundary, or for the end of the run."""

    listener: Listener | None
    """The hook that registered it; None: the run itself."""
    close: Callable[[], object]

    def __call__(self) -> None:
        self.close()


class Unwinding:
    """A context in which an error is being raised out of a run. With None it changes nothing.

    This and `Ending` are classes, because a generator would replace a StopIteration in the block by another error.
    """

    __slots__ = ("_error", "_outer", "_scene")

    def __init__(self, scene: Scene, error: BaseException | None) -> None:
        self._scene, self._error = scene, error

    def __enter__(self) -> None:
        self._outer = self._scene.unwinding
        self._scene.unwinding = self._error or self._outer

    def __exit__(self, *_: object) -> None:
        self._scene.unwinding = self._outer


class Ending:
    """Fires a moment when its block ends, also after an error in it."""

    __slots__ = ("_arguments", "_end")

    def __init__(self, end: Callable[..., object], *arguments: Any) -> None:
        self._end, self._arguments = end, arguments

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error, *self._arguments)

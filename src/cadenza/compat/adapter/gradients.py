"""Gradients of the last update for hooks that run after it. Keras and Lightning drop them at the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any

from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cadenza.run import Run


class Gradients:
    """Keeps the gradients of the last update and restores them for later events."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def listeners(self) -> list[Listener]:
        """Return the listeners that keep the gradients and drop them at the next batch."""
        return inner([Listener(Callback.on_before_zero_grad, self._keep), Listener(Callback.on_batch_start, self._drop)])

    def _keep(self, run: Run) -> None:
        self._kept = [(parameter, parameter.grad) for parameter in run.model.parameters() if parameter.grad is not None]

    def _drop(self, run: Run, batch: Any) -> None:
        self._kept = []

    def shown(self, event: Callable[..., Any]) -> Callable[..., Any]:
        """Return an event that is called while the parameters have these gradients."""

        @wraps(event)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for parameter, gradient in self._kept:
                parameter.grad = gradient
            try:
                return event(*arguments, **keywords)
            finally:
                for parameter, _ in self._kept:
                    parameter.grad = None

        return call


def reads_gradients(foreign: object, base: type[Any]) -> bool:
    """Return whether code of an object mentions ``grad``, in its class up to `base` or in a function that it holds."""
    kinds = [kind for kind in type(foreign).__mro__ if issubclass(kind, base) and kind is not base]
    held = [value for namespace in (*map(vars, kinds), vars(foreign)) for value in namespace.values()]
    codes = (getattr(value, "__code__", None) for value in held)
    return any("grad" in (*inner.co_names, *inner.co_consts) for code in codes if code is not None for inner in _inner(code))


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inner(constant)

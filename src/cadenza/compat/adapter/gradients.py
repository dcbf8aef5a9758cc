"""Gradients of the last update, for hooks that read them after it: Keras and Lightning drop them at the next batch."""

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
    """Keeps the gradients of the last update, and shows them in events that come after it."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def listeners(self) -> list[Listener]:
        """Return the listeners that keep the gradients, and drop them at the next batch."""
        return inner([Listener(Callback.on_before_zero_grad, self._keep), Listener(Callback.on_batch_start, self._drop)])

    def _keep(self, run: Run) -> None:
        self._kept = [(one, one.grad) for one in run.model.parameters() if one.grad is not None]

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
    """Return whether code of an object names ``grad``: in its class, up to `base`, or in a function that it holds."""
    kinds = [one for one in type(foreign).__mro__ if issubclass(one, base) and one is not base]
    held = [value for one in (*map(vars, kinds), vars(foreign)) for value in one.values()]
    codes = (getattr(value, "__code__", None) for value in held)
    return any("grad" in (*one.co_names, *one.co_consts) for code in codes if code is not None for one in _inner(code))


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inner(one)

"""Other weights of the model that callbacks hold, such as averages: by name, in the run and in its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cadenza.drivers.sharding import local
from cadenza.errors import CallbackError, nearest
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import HeldWeights, HoldsWeights
from cadenza.optim.model_state import buffers_of, load_into, set_buffer, state_of

if TYPE_CHECKING:
    from cadenza.run import Run


class Holder(NamedTuple):
    """A callback that holds weights of one name."""

    callback: str
    """The name of the callback."""
    source: Any
    held: HeldWeights | None
    """None if it has no weights yet."""

    def lend(self, run: Run) -> AbstractContextManager[None]:
        """Return a context in which the model has these weights, or its own if there are none yet. Every rank must enter it."""
        own = getattr(self.source, "in_place", None)
        return self._lend(run.model) if own is None else own(run)

    @contextmanager
    def _lend(self, model: nn.Module) -> Iterator[None]:
        if self.held is None:
            yield
            return
        with in_place(model, self.held.tensors_in(self.source.state_dict())):
            yield


def holders_in(hooks: Hooks) -> dict[str, Holder]:
    """Return, by the name of the weights, the callbacks that hold weights.

    Raises:
        CallbackError: Two have the same name.
    """
    found: dict[str, Holder] = {}
    for name, callback in hooks.callbacks.items():
        for weights, held in callback.held_weights().items() if isinstance(callback, HoldsWeights) else ():
            if weights in found:
                raise _ambiguous(weights, found[weights].callback, name)
            found[weights] = Holder(name, callback, held)
    return found


def _ambiguous(weights: str, text: str, other: str) -> CallbackError:
    return CallbackError(
        f"two callbacks hold weights that are called {weights!r}, {text} and {other}, so Evaluate(weights={weights!r}) would "
        "be ambiguous. Leave one out, or give it another name, such as Ema(name='slow')."
    )


def no_such_weights(weights: str, there: Mapping[str, Any], who: str) -> str:
    """Return a message: a callback or a caller needs weights that no callback holds."""
    known = f"; available: {', '.join(map(repr, there))}" if there else ""
    ema = "Ema(...)" if weights == "ema" else f"Ema(name={weights!r})"
    return (
        f"{who} needs averaged weights, but no callback provides {weights!r}{known}. Add {ema} to callbacks."
        f"{nearest(weights, there)}"
    )


@contextmanager
def in_place(model: nn.Module, weights: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which a model has other weights. It then gets its own again, to the bit, also after an error.

    Every rank must enter it, of a sharded model.

    Args:
        model: The user's own module. Its tensors stay the same objects.
        weights: By the model's names, tensors or stored tensors of the same shapes, but for buffers. Others keep the model's
            values.
    """
    present = {name: value for name, value in state_of(model).items() if name in weights and isinstance(value, Tensor)}
    own, buffers = {name: local(value).clone() for name, value in present.items()}, buffers_of(model)
    held = {name: getattr(*buffers[name]) for name in weights if name in buffers}
    try:
        load_into(model, weights)
        yield
    finally:
        for name, buffer in held.items():
            set_buffer(*buffers[name], buffer)
        with torch.no_grad():
            now = state_of(model)
            for name, value in own.items():
                local(now[name]).copy_(value)

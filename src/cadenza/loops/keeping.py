"""State of the user's own in the checkpoints of a run: what `Loop.keep` and `Steps.keep` take."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cadenza.hooks.moments import Callback
from cadenza.run import Run
from cadenza.status.shown import brief

Pair = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns a state, and one that restores it."""


class Kept(Callback):
    """Holds the state of objects by name. A state that is restored waits for the object of its name."""

    each_rank: bool = True  # an environment has its own state on each rank

    def __init__(self) -> None:
        self.held: list[Any] = []
        """The objects that were given."""
        self._pairs: dict[str, Pair] = {}
        self._waiting: dict[str, Any] = {}

    def keep(self, name: str, held: Any) -> None:
        """Save the state of an object from now on, and restore it now if a checkpoint has it. See `Loop.keep`."""
        pair = pair_of(name, held)
        if name in self._pairs:
            raise ValueError(f"keep({name!r}, ...) was called twice. Give each object a name of its own.")
        self._pairs[name] = pair
        self.held.append(held)
        if name in self._waiting:
            pair[1](self._waiting.pop(name))

    def warn_of_missing(self, run: Run, call: str) -> None:
        """Warn of names in the checkpoint for which no object was kept. `call` is what the user writes: ``loop.keep``."""
        if self._waiting:
            run.warn(
                f"the checkpoint holds {[*self._waiting]}, which this loop does not keep. Call {call}(...) before the loop"
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: save() for name, (save, _) in self._pairs.items()} | self._waiting

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = dict(state)
        for name in self._pairs.keys() & state.keys():
            self._pairs[name][1](self._waiting.pop(name))


def pair_of(name: str, held: Any) -> Pair:
    """Return the functions that save and restore an object.

    Raises:
        TypeError: It has none.
    """
    if isinstance(held, torch.Generator):
        return held.get_state, held.set_state
    if isinstance(held, random.Random):
        return held.getstate, lambda state: held.setstate((state[0], tuple(state[1]), state[2]))
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(held, numpy.random.Generator):
        return lambda: _listed(held.bit_generator.state), lambda state: setattr(held.bit_generator, "state", state)
    if isinstance(held, tuple) and len(held) == 2 and all(map(callable, held)):
        return held
    if callable(getattr(held, "state_dict", None)) and callable(getattr(held, "load_state_dict", None)):
        return held.state_dict, held.load_state_dict
    raise TypeError(
        f"keep({name!r}, ...) expected an object with state_dict and load_state_dict, a random generator, or a pair of "
        f"functions (save, restore); got {brief(held)}"
    )


def _listed(state: Any) -> Any:
    """Return the state of a generator of numpy with lists for arrays."""
    if isinstance(state, Mapping):
        return {name: _listed(part) for name, part in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state

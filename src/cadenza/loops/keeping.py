"""State of the user's own in the checkpoints of a run: what `Loop.keep` and `Steps.keep` take."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from cadenza.errors import CheckpointMismatchError, add_note
from cadenza.hooks.moments import Callback
from cadenza.optim.optimizers import load_state
from cadenza.run import Run
from cadenza.status.plain import encode
from cadenza.status.shown import brief

Pair = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns a state, and one that restores it."""


class Kept(Callback):
    """Holds the state of objects by name. A state that is restored waits for the object of its name.

    Args:
        owner: What the user calls ``keep`` of: ``"loop"`` or ``"steps"``.
    """

    each_rank: bool = True  # an environment has its own state on each rank

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.held: list[Any] = []
        """The objects that were given."""
        self._pairs: dict[str, Pair] = {}
        self._waiting: dict[str, Any] = {}
        self._restored: set[str] = set()

    def keep(self, name: str, held: Any, *, check: bool = False) -> None:
        """Save the state of an object from now on, and restore it now if a checkpoint has it. See `Loop.keep`.

        Args:
            name: Its name.
            held: The object, or a pair of functions.
            check: Raise `StateError` now if the state cannot be saved, and not at the first checkpoint.
        """
        pair = _pair_of(self._call(name), name, held)
        if name in self._pairs:
            raise ValueError(f"{self._call(name)} was called twice. Give each object a name of its own.")
        self._pairs[name] = pair
        self.held.append(held)
        if name in self._waiting:
            self._restore(name)
        if check:
            encode({self._call(name): self._saved(name)}, copy=type)  # nothing is copied

    def compare(self, run: Run, *, strict: bool) -> None:
        """Warn of what a run that continues keeps otherwise than its checkpoint; raise an error with `strict`."""
        differences = self._differences()
        if differences and strict:
            raise CheckpointMismatchError(f"{'; '.join(differences)}, or continue with strict=False.")
        for text in differences:
            run.warn(text)

    def _differences(self) -> list[str]:
        """Return how a run that continues differs from its checkpoint: a sentence each, without its period."""
        texts = []
        if self._waiting:
            texts.append(
                f"the checkpoint holds {[*self._waiting]}, which this loop does not keep. Call {self._owner}.keep(...) "
                "before the loop"
            )
        if missing := [name for name in self._pairs if name not in self._restored]:
            texts.append(
                f"this loop keeps {missing}, which the checkpoint does not hold, so nothing was restored. Use the name "
                "that was saved"
            )
        return texts

    def state_dict(self) -> dict[str, Any]:
        return {name: self._saved(name) for name in self._pairs} | self._waiting

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = dict(state)
        for name in self._pairs.keys() & state.keys():
            self._restore(name)

    def _saved(self, name: str) -> Any:
        with self._named(name):
            return self._pairs[name][0]()

    def _restore(self, name: str) -> None:
        self._restored.add(name)
        with self._named(name):
            self._pairs[name][1](self._waiting.pop(name))

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            add_note(error, f"raised by what {self._call(name)} was given")
            raise

    def _call(self, name: str) -> str:
        return f"{self._owner}.keep({name!r}, ...)"


def _pair_of(call: str, name: str, held: Any) -> Pair:
    """Return the functions that save and restore an object.

    Raises:
        TypeError: It has none, or `name` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{call} expected a name; got {brief(name)}. Write keep('env', env).")
    if isinstance(held, torch.Generator):
        return held.get_state, held.set_state
    if isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
        return held.getstate, lambda state: held.setstate((state[0], tuple(state[1]), state[2]))
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(held, numpy.random.Generator):
        return lambda: _listed(held.bit_generator.state), lambda state: setattr(held.bit_generator, "state", state)
    if numpy is not None and isinstance(held, numpy.random.RandomState):
        return lambda: _listed(held.get_state(legacy=False)), held.set_state
    if isinstance(held, tuple) and len(held) == 2 and all(map(callable, held)):
        return held
    if isinstance(held, Optimizer):
        return held.state_dict, partial(load_state, held)
    has_state = callable(getattr(held, "state_dict", None)) and callable(getattr(held, "load_state_dict", None))
    if has_state and not isinstance(held, type):
        return held.state_dict, held.load_state_dict
    raise TypeError(
        f"{call} expected an object with state_dict and load_state_dict, a random generator, or a pair of "
        f"functions (save, restore); got {brief(held)}. A pair for a list is (lambda: [*rows], rows.extend)."
    )


def _listed(state: Any) -> Any:
    """Return the state of a generator of numpy with lists for arrays."""
    if isinstance(state, Mapping):
        return {name: _listed(part) for name, part in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state

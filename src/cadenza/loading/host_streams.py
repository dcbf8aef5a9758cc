"""The global generators of Python and numpy, put aside and back for every batch that is loaded: 15 microseconds instead of 110.

Both take long to tell their own state: they make a number of each of 624. So it is looked up in memory whether they were drawn
from since it was last told. What lies there has to agree with what they tell before it is believed; else they are always asked.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

_SIZE = 624 * 4 + 4  # of a Mersenne twister: its numbers, and the place of the next one
_HIDDEN: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the functions of the module
_SEED = super(random.Random, _HIDDEN).seed


class PythonStream:
    """The state of Python's global generator, as ``random.getstate()`` gives it."""

    def __init__(self) -> None:
        self._address: int | None = None
        self._seen = b""
        self._state: Any = None

    def capture(self) -> Any:
        """Return the state, for ``random.setstate``."""
        if self._address is None:
            self._address = _address_in_python()
        if not self._address:
            return random.getstate()
        seen = ctypes.string_at(self._address, _SIZE)
        if seen != self._seen:
            self._seen, self._state = seen, random.getstate()
            return self._state
        version, numbers, _ = self._state
        return version, numbers, _HIDDEN.gauss_next

    @staticmethod
    def seed(seed: int) -> None:
        """Do what ``random.seed(seed)`` does with a number, without its questions."""
        _SEED(seed)
        _HIDDEN.gauss_next = None


class NumpyStream:
    """The state of numpy's global generator, as ``numpy.random.get_state()`` gives it, or as the bytes of it.

    They are written back as well: numpy says in public where they lie (``bit_generator.ctypes.state_address``).
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._whole: bytes | None = None

    def capture(self, numpy: Any) -> Any:
        """Return the state, for `restore`."""
        address = self._found(numpy)
        if not address:
            return numpy.random.get_state()
        seen = ctypes.string_at(address, _SIZE)
        if seen != self._whole:
            # Normal numbers are drawn in pairs, and the half of one that may be waiting lies elsewhere.
            state = numpy.random.get_state()
            if state[3]:
                return state
            self._whole = seen
        return seen

    def restore(self, numpy: Any, state: Any) -> None:
        """Put the generator back to a state that `capture` returned."""
        if isinstance(state, bytes) and (address := self._found(numpy)):
            numpy.random.seed(0)  # no half of a pair is left
            ctypes.memmove(address, state, _SIZE)
            self._whole = state
        else:
            self._whole = None
            numpy.random.set_state(told(numpy, state))

    def _found(self, numpy: Any) -> int:
        """Return where the numbers lie; 0 if that is not known."""
        current = getattr(numpy.random, "get_bit_generator", lambda: None)()
        if current is None:
            return 0
        if current is not self._generator:
            self._generator, self._whole = current, None
            self._address = _address_in_numpy(numpy, current)
        return self._address


def told(numpy: Any, state: Any) -> Any:
    """Return a state that `NumpyStream.capture` returned as numpy tells it: name, keys, position, has_gauss, gauss."""
    if not isinstance(state, bytes):
        return state
    keys = numpy.frombuffer(state, dtype="uint32", count=624)
    return "MT19937", keys, int.from_bytes(state[-4:], sys.byteorder), 0, 0.0


def _address_in_numpy(numpy: Any, generator: Any) -> int:
    state = numpy.random.get_state()
    if state[0] != "MT19937":
        return 0
    address: int = generator.ctypes.state_address
    there = ctypes.string_at(address, _SIZE)
    expected = state[1].astype("uint32").tobytes() + int(state[2]).to_bytes(4, sys.byteorder)
    return address if there == expected else 0


def _address_in_python() -> int:
    kind = random.Random.__base__
    address = id(_HIDDEN) + object.__basicsize__  # where CPython's object has its own fields
    if kind is None or kind.__basicsize__ < object.__basicsize__ + _SIZE:
        return 0
    _, numbers, _ = random.getstate()
    expected = b"".join(number.to_bytes(4, sys.byteorder) for number in (numbers[-1], *numbers[:-1]))
    return address if ctypes.string_at(address, _SIZE) == expected else 0

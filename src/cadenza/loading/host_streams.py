"""The states of the global generators of Python and NumPy, captured and restored for every batch in less than a microsecond.

``random.getstate`` takes 11 microseconds, and ``numpy.random.get_state`` 160, because they convert 624 numbers to objects. Both
generators are Mersenne twisters, so their bytes are copied instead. NumPy documents their address
(``bit_generator.ctypes.state_address``). In CPython they follow the head of the object. Each address is checked once: the bytes
there must be those of the state that the generator returns. If they differ, the public functions are used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_Twister: Any = random.Random.__mro__[1]  # the base class in C
_SIZE = 624 * 4 + 4  # bytes of a Mersenne twister: its numbers, and the index of the next one
_NEAR = 64  # bytes of the index and of the numbers beside it


class PythonStream:
    """The state of Python's global generator, as ``random.getstate()`` returns it, or as its bytes."""

    def __init__(self) -> None:
        self._generator: Any = getattr(random, "_inst", None)
        self._memory = _memory_of_python(self._generator)

    def capture(self) -> Any:
        """Return the state, for `restore`."""
        return random.getstate() if self._memory is None else (self._memory.raw, self._generator.gauss_next)

    def capturing(self) -> Callable[[], Any]:
        """Return a function that does what `capture` does. If nothing was drawn, it reads 64 bytes and returns the same object.

        A draw changes the index, and the numbers beside it change before an index comes again.
        """
        if self._memory is None:
            return random.getstate
        memory, generator, seen, state = self._memory, self._generator, b"", (b"", None)
        near = (ctypes.c_char * _NEAR).from_buffer(memory)  # the index is the first

        def capture() -> Any:
            nonlocal seen, state
            now, gauss = near.raw, generator.gauss_next
            if now != seen or gauss is not state[1]:
                seen, state = now, (memory.raw, gauss)
            return state

        return capture

    def seed(self, seed: int) -> None:
        """Seed the generator, as ``random.seed(seed)`` does."""
        if self._memory is None:
            random.seed(seed)
        else:  # without the conversions of other seeds
            _Twister.seed(self._generator, seed)
            self._generator.gauss_next = None

    def restore(self, state: Any) -> None:
        """Put the generator back to a state that `capture` returned."""
        if self._memory is None:
            random.setstate(state)
        else:
            self._memory.raw, self._generator.gauss_next = state


def _memory_of_python(generator: Any) -> Any:
    head, fits = object.__basicsize__, _Twister.__basicsize__ >= object.__basicsize__ + _SIZE
    if sys.implementation.name != "cpython" or type(generator) is not random.Random or not fits:
        return None
    memory = (ctypes.c_char * _SIZE).from_address(id(generator) + head)
    *numbers, index = random.getstate()[1]
    return memory if memory.raw == struct.pack("=i624I", index, *numbers) else None


class NumpyStream:
    """The state of numpy's global generator, as ``numpy.random.get_state()`` returns it, or as its bytes."""

    def __init__(self) -> None:
        self._current: Any = None  # numpy's function that returns its generator
        self._generator: Any = None
        self._memory: Any = None
        self._whole: bytes | None = None
        self._seeded: bytes | None = None

    def capture(self, numpy: Any) -> Any:
        """Return the state, for `restore`."""
        memory = self._memory
        if memory is None or self._current() is not self._generator:
            memory = self._found(numpy)
            if memory is None:
                return numpy.random.get_state()
        seen: bytes = memory.raw
        if seen != self._whole:
            # Normal numbers are drawn in pairs, and the half of one that may be waiting lies elsewhere.
            state = numpy.random.get_state()
            if state[3]:
                return state
            self._whole = seen
        return self._whole

    def capturing(self, numpy: Any) -> Callable[[], Any]:
        """Return a function that does what `capture` does. If nothing was drawn, it reads 64 bytes only."""
        memory = self._found(numpy)
        if memory is None:
            return partial(self.capture, numpy)
        current, generator, seen, state = self._current, self._generator, b"", b""
        near = (ctypes.c_char * _NEAR).from_buffer(memory, _SIZE - _NEAR)  # the index is the last

        def capture() -> Any:
            nonlocal seen, state
            now = near.raw
            if now == seen and current() is generator:
                return state
            captured = self.capture(numpy)
            seen, state = (now, captured) if isinstance(captured, bytes) and current() is generator else (b"", b"")
            return captured

        return capture

    def seed(self, numpy: Any, seed: int) -> None:
        """Seed the generator."""
        numpy.random.seed(seed % 2**32)
        self._seeded = None if self._memory is None else self._memory.raw

    def restore(self, numpy: Any, state: Any) -> None:
        """Put the generator back to a state that `capture` returned."""
        if isinstance(state, bytes) and (memory := self._found(numpy)) is not None:
            if memory.raw != self._seeded:
                numpy.random.seed(0)  # no half of a pair is left
            memory.raw = state
            self._whole = state
        else:
            self._whole = None
            if isinstance(state, bytes):  # numpy has another generator since then
                keys = numpy.frombuffer(state, dtype="uint32", count=624)
                state = "MT19937", keys, int.from_bytes(state[-4:], sys.byteorder), 0, 0.0
            numpy.random.set_state(state)

    def _found(self, numpy: Any) -> Any:
        """Return the memory of the numbers; None if its address is not known."""
        get = getattr(numpy.random, "get_bit_generator", None)
        if get is None:
            return None
        current = get()
        if current is not self._generator:
            self._current, self._generator, self._whole, self._seeded = get, current, None, None
            self._memory = _memory_of_numpy(numpy, current)
        return self._memory


def _memory_of_numpy(numpy: Any, generator: Any) -> Any:
    state = numpy.random.get_state()
    if state[0] != "MT19937":
        return None
    memory = (ctypes.c_char * _SIZE).from_address(generator.ctypes.state_address)
    expected = state[1].astype("uint32").tobytes() + int(state[2]).to_bytes(4, sys.byteorder)
    return memory if memory.raw == expected else None

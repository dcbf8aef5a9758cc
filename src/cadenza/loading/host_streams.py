"""The states of the global generators on the host, captured and restored for every batch in less than a microsecond.

``random.getstate`` takes 11 microseconds, and ``numpy.random.get_state`` 160, because they convert 624 numbers to objects. Both
generators are Mersenne twisters, so their bytes are copied instead. NumPy documents their address
(``bit_generator.ctypes.state_address``). In CPython they follow the head of the object. Torch's generator is a twister too:
its address (``Generator._cdata``) tells whether numbers were drawn since its state was read, which takes 2 microseconds, and 10
after a step. Each address is checked once: the bytes there must be those of the state that the generator returns. If they
differ, the public functions are used. They are used as well if NumPy has a generator that is no twister.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Twister: Any = random.Random.__mro__[1]  # the base class in C
_SIZE = 624 * 4 + 4  # bytes of a Mersenne twister: its numbers, and the index of the next one
_HALF = "i4xd"  # numpy's half of a pair of normal numbers: whether one waits, and its value
_NEAR = 64  # bytes of the index and of the numbers beside it
_TORCH_SIZE = 5056  # bytes of a state of torch's generator


class PythonStream:
    """The state of Python's global generator, as ``random.getstate()`` returns it, or as its bytes."""

    def __init__(self) -> None:
        self.generator: Any = getattr(random, "_inst", None)
        self.memory: Any = _memory_of_python(self.generator)
        """The bytes of its state; None if their address is not known."""

    def capture(self) -> Any:
        """Return the state, for `restore`."""
        return random.getstate() if self.memory is None else (self.memory.raw, self.generator.gauss_next)

    def seed(self, seed: int) -> None:
        """Seed the generator, as ``random.seed(seed)`` does."""
        if self.memory is None:
            random.seed(seed)
        else:  # without the conversions of other seeds
            _Twister.seed(self.generator, seed)
            self.generator.gauss_next = None

    def restore(self, state: Any) -> None:
        """Put the generator back to a state that `capture` returned."""
        if self.memory is None:
            random.setstate(state)
        else:
            self.memory.raw, self.generator.gauss_next = state


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
        self.generator: Any = None
        """The generator of `memory`."""
        self._memory: tuple[Any, Any] | None = None

    def capture(self, numpy: Any) -> Any:
        """Return the state, for `restore`."""
        memory = self._memory
        if memory is None or self._current() is not self.generator:
            memory = self.memory(numpy)
            if memory is None:
                return state_of_numpy(numpy)
        numbers, half = memory
        return numbers.raw + half.raw

    def restore(self, numpy: Any, state: Any) -> None:
        """Put the generator back to a state that `capture` returned."""
        if not isinstance(state, bytes):
            numpy.random.set_state(state)
        elif (memory := self.memory(numpy)) is not None:
            numbers, half = memory
            numbers.raw, half.raw = state[:_SIZE], state[_SIZE:]
        else:  # numpy has another generator since then
            keys = numpy.frombuffer(state, dtype="uint32", count=624)
            numpy.random.set_state(("MT19937", keys, *struct.unpack(f"=i{_HALF}", state[_SIZE - 4 :])))

    def memory(self, numpy: Any) -> tuple[Any, Any] | None:
        """Return the bytes of its numbers, and of half a pair of normal numbers; None if their address is not known."""
        get = getattr(numpy.random, "get_bit_generator", None)
        if get is None:
            return None
        current = get()
        if current is not self.generator:
            self._current, self.generator = get, current
            self._memory = _memory_of_numpy(numpy, current)
        return self._memory


def state_of_numpy(numpy: Any) -> Any:
    """Return the state of numpy's global generator, for ``numpy.random.set_state``: a tuple, or a dict if it is no twister."""
    get = getattr(numpy.random, "get_bit_generator", None)
    return numpy.random.get_state(legacy=get is None or isinstance(get(), numpy.random.MT19937))


def capturing(python: PythonStream, of_numpy: NumpyStream, numpy: Any) -> Callable[[], tuple[Any, Any, Tensor]]:
    """Return a function that returns the states of Python's, NumPy's and torch's generators.

    Of a generator that did not draw, it reads the bytes near its index, and returns the same object again. A draw changes the
    index of a twister, and the numbers beside it change before an index comes again.
    """
    generator, near_torch = torch.default_generator, _near_the_index_of_torch()
    memory, memory_of_numpy = python.memory, of_numpy.memory(numpy)

    def capture() -> tuple[Any, Any, Tensor]:
        return python.capture(), of_numpy.capture(numpy), generator.get_state()

    owner: Any = getattr(numpy.random.get_state, "__self__", None)  # it is asked for NumPy's generator without a call
    if getattr(owner, "_bit_generator", None) is not of_numpy.generator:
        return capture
    if memory is None or memory_of_numpy is None or near_torch is None:
        return capture
    # The index is the first number of Python's memory, and the last one of NumPy's.
    numbers, half = (memoryview(one).cast("B") for one in memory_of_numpy)
    near, after_numpy = (memoryview(memory).cast("B")[:_NEAR], numbers[-_NEAR:], half, *near_torch), 2 * _NEAR + half.nbytes
    join, gaussian, twister = b"".join, python.generator, of_numpy.generator
    seen, states = b"", capture()

    def capture_if_drawn() -> tuple[Any, Any, Tensor]:
        nonlocal seen, states
        now, gauss, same = join(near), gaussian.gauss_next, owner._bit_generator is twister
        if now == seen and gauss is states[0][1] and same:
            return states
        first, second, third = states
        if now[:_NEAR] != seen[:_NEAR] or gauss is not first[1]:
            first = python.capture()
        if now[_NEAR:after_numpy] != seen[_NEAR:after_numpy] or not same:
            second = of_numpy.capture(numpy)
        if now[after_numpy:] != seen[after_numpy:]:
            third = generator.get_state()
        seen, states = now if same else b"", (first, second, third)
        return states

    return capture_if_drawn


def _memory_of_numpy(numpy: Any, generator: Any) -> tuple[Any, Any] | None:
    """Return the bytes of its numbers and index, and of half a pair of normal numbers.

    The half lies in the object that draws. It is found by planting one (``aug_bitgen_t`` in numpy's ``mtrand.pyx``).
    """
    state, owner = state_of_numpy(numpy), getattr(numpy.random.get_state, "__self__", None)
    if not isinstance(state, tuple) or owner is None:
        return None
    numbers = (ctypes.c_char * _SIZE).from_address(generator.ctypes.state_address)
    if numbers.raw != state[1].astype("uint32").tobytes() + int(state[2]).to_bytes(4, sys.byteorder):
        return None
    planted, size = struct.pack(f"={_HALF}", 1, 0.7512345), type(owner).__basicsize__
    numpy.random.set_state((*state[:3], 1, 0.7512345))
    try:
        offset = (ctypes.c_char * size).from_address(id(owner)).raw.find(planted)
    finally:
        numpy.random.set_state(state)
    return (numbers, (ctypes.c_char * len(planted)).from_address(id(owner) + offset)) if offset > 0 else None


def _near_the_index_of_torch() -> tuple[memoryview, memoryview] | None:
    """Return the bytes of torch's generator that a draw changes; None if their address is not known.

    They are the index with the first numbers, and the halves of pairs of normal numbers, which follow the last number. The
    halves are found by planting two of them (``CPUGeneratorImplState`` in torch's ``CPUGeneratorImpl.cpp``).
    """
    generator = torch.default_generator
    address, state = getattr(generator, "_cdata", None), generator.get_state()
    if type(address) is not int or state.numel() != _TORCH_SIZE:
        return None
    numbers = state[24:5016].view(torch.int64).to(torch.int32).numpy().tobytes()
    offset = (ctypes.c_char * 160).from_address(address).raw.find(numbers[:32])
    if offset < 20 or (ctypes.c_char * len(numbers)).from_address(address + offset).raw != numbers:
        return None
    halves = (ctypes.c_char * 28).from_address(address + offset + len(numbers))
    planted = state.clone()
    single, double = struct.pack("=f?", 0.25, True), struct.pack("=dddi", 0, 0.75, 0, 1)
    planted[5048:5053], planted[5016:5044] = _as_bytes(single), _as_bytes(double)
    try:
        generator.set_state(planted)
        found = single in halves.raw and struct.pack("=d?", 0.75, True) in halves.raw
    finally:
        generator.set_state(state)
    index = (ctypes.c_char * _NEAR).from_address(address + offset - 20)
    return (memoryview(index).cast("B"), memoryview(halves).cast("B")) if found else None


def _as_bytes(packed: bytes) -> Tensor:
    return torch.tensor([*packed], dtype=torch.uint8)

"""Seeds, and the state of the random number generators."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that is derived from `parts`, with the mixing function of splitmix64 (Steele et al. 2014).

    >>> derive_seed(1, 2, 3) == derive_seed(1, 2, 3), derive_seed(1, 2, 3) == derive_seed(1, 3, 2)
    (True, False)
    """
    value = 0
    for part in parts:
        value = _mixed(value, part)
    return value >> 1


def seeds_below(*parts: int) -> Callable[[int], int]:
    """Return a function that returns ``derive_seed(*parts, last)`` for `last`, in less time.

    >>> seeds_below(1, 2)(3) == derive_seed(1, 2, 3)
    True
    """
    above = 0
    for part in parts:
        above = _mixed(above, part)
    return lambda last: _mixed(above, last) >> 1


def _mixed(value: int, part: int) -> int:
    value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


_MASK = 2**64 - 1


def seed_all(seed: int) -> None:
    """Seed the generators of Python, of numpy if it is imported, and of torch on all devices.

    >>> seed_all(1)
    >>> first = torch.rand(()).item()
    >>> seed_all(1)
    >>> torch.rand(()).item() == first
    True
    """
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def seed_host(seed: int) -> None:
    """Seed the generators of this process on the host, which code that loads data draws from."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def draw_seed(*, keep: bool = False) -> int:
    """Draw a seed from torch's global generator, as a `DataLoader` does; with `keep` the generator does not advance.

    >>> first = seed_all(1) or draw_seed(keep=True)
    >>> draw_seed() == first, draw_seed() == first
    (True, False)
    """
    before = torch.default_generator.get_state() if keep else None
    seed = int(torch.randint(2**62, (), device="cpu").item())
    if before is not None:
        torch.default_generator.set_state(before)
    return seed


class RNGState(NamedTuple):
    """The state of all global random generators of this process, captured and restored in microseconds: for every batch."""

    python: Any
    torch_cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any
    """As `numpy_capture` returns it."""

    @staticmethod
    def capture(*, cuda: bool = True) -> RNGState:
        """Return the current RNG state; without `cuda`, that of the generators on the host alone."""
        numpy = sys.modules.get("numpy")
        return RNGState(
            python=random.getstate(),
            torch_cpu=torch.default_generator.get_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if cuda and torch.cuda.is_initialized() else (),
            numpy=None if numpy is None else numpy_capture(numpy),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the RNG state as plain values and tensors."""
        numpy = _tuple_of(self.numpy) if isinstance(self.numpy, bytes) else self.numpy
        if isinstance(numpy, dict):  # no Mersenne twister
            numpy = _without_arrays(numpy)
        elif numpy is not None:
            name, keys, *rest = numpy
            numpy = (name, torch.from_numpy(keys.astype("int64")), *rest)
        return {"python": self.python, "torch": self.torch_cpu, "cuda": list(self.cuda), "numpy": numpy}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RNGState:
        """Return the RNG state from the result of `to_plain`."""
        numpy = plain["numpy"]
        if numpy is not None and not isinstance(numpy, Mapping):
            name, keys, *rest = numpy
            numpy = (name, keys.numpy().astype("uint32"), *rest)
        return RNGState(plain["python"], plain["torch"], tuple(plain["cuda"]), numpy)

    @staticmethod
    def seeded(seed: int) -> RNGState:
        """Return the RNG state after ``seed_all(seed)``. The generators do not change."""
        with preserve_rng_state():
            seed_all(seed)
            return RNGState.capture()

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        torch.default_generator.set_state(self.torch_cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda[: torch.cuda.device_count()]))  # this machine may have fewer devices
        if self.numpy is not None:
            import numpy  # the saved run used it; this one may not have imported it yet

            numpy_restore(numpy, self.numpy)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the RNG state at the end, also after an error."""
    state = RNGState.capture()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seed the generators on the host inside; restore their state at the end, also after an error."""
    outside = RNGState.capture(cuda=False)
    try:
        seed_host(seed)
        yield
    finally:
        outside.restore()


# -- the generator of numpy ------------------------------------------------------------------------

_SIZE = 624 * 4 + 4  # bytes of a Mersenne twister: its numbers, and the index of the next one
_HALF = "i4xd"  # numpy's half of a pair of normal numbers: whether one waits, and its value


def numpy_capture(numpy: Any) -> Any:
    """Return the state of numpy's global generator: as bytes or, where their address is not known, as numpy returns it.

    ``numpy.random.get_state`` takes 160 microseconds, because it converts 624 numbers to objects; a copy of the bytes takes
    less than one. NumPy documents their address (``bit_generator.ctypes.state_address``). The address is checked once: the
    bytes there must be those of the state that numpy returns. If they differ, or if the generator is no Mersenne twister,
    the public functions are used.
    """
    memory = _memory_in(numpy)
    return _state_of_numpy(numpy) if memory is None else memory[0].raw + memory[1].raw


def numpy_restore(numpy: Any, state: Any) -> None:
    """Put numpy's global generator back to a state that `numpy_capture` returned."""
    memory = _memory_in(numpy) if isinstance(state, bytes) else None
    if memory is not None:
        memory[0].raw, memory[1].raw = state[:_SIZE], state[_SIZE:]
    else:
        numpy.random.set_state(_tuple_of(state) if isinstance(state, bytes) else state)


def _memory_in(numpy: Any) -> tuple[Any, Any] | None:
    get = getattr(numpy.random, "get_bit_generator", None)  # since numpy 1.24
    return None if get is None else _memory_of_numpy(get())


def _state_of_numpy(numpy: Any) -> Any:
    """Return the state of numpy's global generator, for ``numpy.random.set_state``: a tuple, or a dict if it is no twister."""
    get = getattr(numpy.random, "get_bit_generator", None)
    return numpy.random.get_state(legacy=get is None or isinstance(get(), numpy.random.MT19937))


def _tuple_of(state: bytes) -> tuple[Any, ...]:
    """Return the bytes of a state in the form of ``numpy.random.get_state``."""
    import numpy

    return ("MT19937", numpy.frombuffer(state, "uint32", 624), *struct.unpack(f"=i{_HALF}", state[_SIZE - 4 :]))


@lru_cache(maxsize=1)
def _memory_of_numpy(generator: Any) -> tuple[Any, Any] | None:
    """Return the bytes of its numbers and index, and of half a pair of normal numbers; None if their address is not known.

    The half lies in the object that draws. It is found by planting one (``aug_bitgen_t`` in numpy's ``mtrand.pyx``).
    """
    import numpy

    state, owner = _state_of_numpy(numpy), getattr(numpy.random.get_state, "__self__", None)
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

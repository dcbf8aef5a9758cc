"""Seeds, and the state of the random number generators."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.status.formats import mapped


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
    devices: Mapping[int, Tensor]
    """The states of accelerators, by index."""
    numpy: Any
    """As `numpy_capture` returns it."""

    @staticmethod
    def capture(*, devices: bool = True) -> RNGState:
        """Return the current RNG state; without `devices`, that of the generators on the host alone."""
        numpy = sys.modules.get("numpy")
        devices_now = _states_of_devices() if devices else {}
        numpy_now = None if numpy is None else numpy_capture(numpy)
        return RNGState(random.getstate(), torch.default_generator.get_state(), devices_now, numpy_now)

    @staticmethod
    def exchange(seed: int) -> RNGState:
        """Do as `seed_host`, and return the RNG state before, without that of devices. It takes less time than `capture`."""
        numpy = sys.modules.get("numpy")
        python, torch_cpu = random.getstate(), torch.default_generator.get_state()
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return RNGState(python, torch_cpu, {}, None if numpy is None else numpy_capture(numpy, seed % 2**32))

    def to_plain(self, own: int | None = None) -> dict[str, Any]:
        """Return the RNG state as plain values and tensors. That of the device with the index `own` is the first."""
        numpy = _tuple_of(self.numpy) if isinstance(self.numpy, bytes) else self.numpy
        if isinstance(numpy, dict):  # no Mersenne twister
            numpy = without_arrays(numpy)
        elif numpy is not None:
            name, keys, *rest = numpy
            numpy = (name, torch.tensor([*keys], dtype=torch.int64), *rest)
        return {"python": self.python, "torch": self.torch_cpu, "cuda": _own_first(self.devices, own), "numpy": numpy}

    @staticmethod
    def from_plain(plain: Mapping[str, Any], own: int | None = None) -> RNGState:
        """Return the RNG state from the result of `to_plain`. The device of this process may have another index than there."""
        numpy = plain["numpy"]
        if numpy is not None and not isinstance(numpy, Mapping):
            name, keys, *rest = numpy
            numpy = (name, keys.numpy().astype("uint32"), *rest)
        indices = chain([] if own is None else [own], (index for index in count() if index != own))
        return RNGState(plain["python"], plain["torch"], dict(zip(indices, plain["cuda"], strict=False)), numpy)

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
        if self.devices:
            _set_devices(self.devices)
        if self.numpy is not None:  # the saved run used it; this one may not have imported it yet
            numpy_restore(sys.modules.get("numpy") or import_module("numpy"), self.numpy)


def _own_first(states: Mapping[int, Tensor], own: int | None) -> list[Tensor]:
    return [states[index] for index in sorted(states, key=lambda index: (index != own, index))]


def _accelerator(*, used: bool) -> Any:
    """Return torch's module of the accelerator, such as ``torch.cuda``; None without one or, with `used`, before its use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module = None if device is None else torch.get_device_module(device)
    return None if used and not getattr(module, "is_initialized", lambda: module is not None)() else module


def _states_of_devices() -> dict[int, Tensor]:
    module = _accelerator(used=True)
    return {} if module is None else dict(enumerate(getattr(module, "get_rng_state_all", lambda: [module.get_rng_state()])()))


def _set_devices(states: Mapping[int, Tensor]) -> None:
    """Set the generators of the accelerators. This machine may have fewer than the one that saved them."""
    if (module := _accelerator(used=False)) is not None:
        for index, state in states.items():
            if index < module.device_count():
                module.set_rng_state(state, *((index,) if hasattr(module, "get_rng_state_all") else ()))  # MPS has one


def without_arrays(state: Any) -> Any:
    """Return the state of a generator of numpy with lists for arrays."""
    return mapped(state, lambda part: part.tolist() if hasattr(part, "tolist") else part)


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
    outside = RNGState.exchange(seed)
    try:
        yield
    finally:
        outside.restore()


# -- the generator of numpy ------------------------------------------------------------------------

_Memory = ctypes.c_char * (625 * 4)  # a Mersenne twister: its numbers, and the index of the next one


def numpy_capture(numpy: Any, seed: int | None = None) -> Any:
    """Return the state of numpy's global generator: as bytes or, for other generators, as numpy returns it. Then seed it.

    ``numpy.random.get_state`` takes 90 microseconds, and this 4. The numbers of a Mersenne twister lie at an address that numpy
    documents (``bit_generator.ctypes.state_address``). Half of a pair of normal numbers may wait beside them: then the next
    normal number leaves them unchanged. Before numpy 1.24, and for other generators, ``get_state`` is called.
    """
    if (memory := _memory_in(numpy)) is None:
        state = numpy.random.get_state(legacy=False)
    else:
        numbers, half = memory.raw, numpy.random.standard_normal()
        state = _tuple_of(numbers, half) if memory.raw == numbers else numbers
    numpy_restore(numpy, state) if seed is None else numpy.random.seed(seed)
    return state


def numpy_restore(numpy: Any, state: Any) -> None:
    """Put numpy's global generator back to a state that `numpy_capture` returned."""
    memory = _memory_in(numpy) if isinstance(state, bytes) else None
    if memory is not None:
        numpy.random.seed(0)  # no half of a pair waits
        memory.raw = state
    else:
        numpy.random.set_state(_tuple_of(state) if isinstance(state, bytes) else state)


def _memory_in(numpy: Any) -> Any:
    """Return the memory of the numbers of numpy's global generator; None if their address is not known."""
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()
    return _Memory.from_address(generator.ctypes.state_address) if _is_twister(numpy, generator) else None


def _is_twister(numpy: Any, generator: object) -> bool:
    """Return whether it is numpy's own: a generator of this name from another package may have another memory."""
    return type(generator) is getattr(numpy.random, "MT19937", None)


def _tuple_of(numbers: bytes, *half: float) -> tuple[Any, ...]:
    """Return bytes, and the half of a pair that waits, in the form of ``numpy.random.get_state``."""
    *keys, index = memoryview(numbers).cast("I")
    return ("MT19937", keys, index, len(half), *(half or (0.0,)))

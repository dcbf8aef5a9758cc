"""Seeds, and the state of the random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.loading.host_streams import NumpyStream

_NUMPY = NumpyStream()


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that is derived from `parts`, with the mixing function of splitmix64 (Steele et al. 2014).

    >>> derive_seed(1, 2, 3) == derive_seed(1, 2, 3), derive_seed(1, 2, 3) == derive_seed(1, 3, 2)
    (True, False)
    """
    value = 0
    for part in parts:
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value >> 1


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
    """The state of all global random generators of this process."""

    python: Any
    torch_cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any

    @staticmethod
    def capture(*, devices: bool = True) -> RNGState:
        """Return the current RNG state.

        Without `devices`, only of the generators on the host, and in a form that is captured faster: for every batch.
        """
        numpy = sys.modules.get("numpy")
        return RNGState(
            python=random.getstate(),
            torch_cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if devices and torch.cuda.is_initialized() else (),
            numpy=None if numpy is None else numpy.random.get_state() if devices else _NUMPY.capture(numpy),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the RNG state as plain values and tensors. It must have been captured with `devices`."""
        numpy = None
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            numpy = (name, torch.from_numpy(keys.astype("int64")), *rest)
        return {"python": self.python, "torch": self.torch_cpu, "cuda": list(self.cuda), "numpy": numpy}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RNGState:
        """Return the RNG state from the result of `to_plain`."""
        numpy = plain["numpy"]
        if numpy is not None:
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
        torch.set_rng_state(self.torch_cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda[: torch.cuda.device_count()]))  # this machine may have fewer devices
        if self.numpy is not None:
            import numpy  # the saved run used it; this one may not have imported it yet

            _NUMPY.restore(numpy, self.numpy)


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
    outside = RNGState.capture(devices=False)
    try:
        seed_host(seed)
        yield
    finally:
        outside.restore()

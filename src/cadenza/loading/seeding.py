"""Random numbers: seed every generator, and put them back as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.loading.host_streams import NumpyStream, PythonStream, told

_PYTHON, _NUMPY = PythonStream(), NumpyStream()


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's (where it is in use) and torch's generators, on every device.

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


def drawn_seed(*, keep: bool = False) -> int:
    """Draw a seed from torch's global generator, as a `DataLoader` does; with `keep` the generator does not advance.

    >>> first = seed_all(1) or drawn_seed(keep=True)
    >>> drawn_seed() == first, drawn_seed() == first
    (True, False)
    """
    before = torch.default_generator.get_state() if keep else None
    seed = int(torch.randint(2**62, (), device="cpu").item())
    if before is not None:
        torch.default_generator.set_state(before)
    return seed


class Streams(NamedTuple):
    """The state of every generator of this process."""

    python: Any
    torch_cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any

    @staticmethod
    def capture(*, devices: bool = True) -> Streams:
        """Read the generators' states; without `devices` only those of the host."""
        numpy = sys.modules.get("numpy")
        return Streams(
            python=_PYTHON.capture(),
            torch_cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if devices and torch.cuda.is_initialized() else (),
            numpy=None if numpy is None else _NUMPY.capture(numpy),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the states as plain values and tensors."""
        numpy = None
        if self.numpy is not None:
            name, keys, position, has_gauss, gauss = told(sys.modules["numpy"], self.numpy)
            numpy = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss)
        return {"python": self.python, "torch": self.torch_cpu, "cuda": list(self.cuda), "numpy": numpy}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Streams:
        """Return what `to_plain` was made of."""
        numpy = plain["numpy"]
        if numpy is not None:
            name, keys, *rest = numpy
            numpy = (name, keys.numpy().astype("uint32"), *rest)
        return Streams(plain["python"], plain["torch"], tuple(plain["cuda"]), numpy)

    @staticmethod
    def seeded(seed: int) -> Streams:
        """Return the states that `seed_all` leads to; the generators stay as they are."""
        with streams_kept():
            seed_all(seed)
            return Streams.capture()

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda[: torch.cuda.device_count()]))  # this machine may have fewer
        if self.numpy is not None:
            import numpy  # it was in use, and may not have been imported again yet

            _NUMPY.restore(numpy, self.numpy)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Leave every generator as it was, whatever happens inside."""
    streams = Streams.capture()
    try:
        yield
    finally:
        streams.restore()

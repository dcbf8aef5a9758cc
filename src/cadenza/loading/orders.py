"""The order of the samples in an epoch, read at any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import isqrt

import torch
from torch import Tensor

from cadenza.loading.rng import derive_seed

PERMUTED = 2**20
"""Up to this number of samples, a shuffled order is torch's permutation, in memory. Above it, the order is a `KeyedOrder`."""

CHUNK = 1024  # positions of a keyed order that are computed together, because a tensor operation has a fixed cost


class Order(ABC):
    """The samples of an epoch by position. Positions count from 0 over all ranks."""

    @abstractmethod
    def at(self, positions: range) -> Tensor:
        """Return the indices of the samples at these positions, shape (len(positions),), int64."""

    def read(self, batches: Iterable[range]) -> Iterator[Tensor]:
        """Yield the indices of the samples in each batch of positions."""
        return map(self.at, batches)


class Unshuffled(Order):
    """The order of the data set."""

    def at(self, positions: range) -> Tensor:
        return torch.arange(positions.start, positions.stop)


class Permutation(Order):
    """The order that torch draws for all samples, with 8 bytes for each.

    Args:
        samples: The number of samples.
        generator: The generator that determines the order.
        device: The device that holds the indices; they are drawn on the host, so that they are the same on every device.
    """

    def __init__(self, samples: int, generator: torch.Generator, device: torch.device | None = None) -> None:
        self._order = torch.randperm(samples, generator=generator).to(device or "cpu")

    def at(self, positions: range) -> Tensor:
        return self._order[positions.start : positions.stop]


class KeyedOrder(Order):
    """A shuffled order that is computed for the positions that are read. It takes no memory, whatever the number of samples.

    The construction is the generalized Feistel cipher over ``range(rows * columns)`` with cycle walking, methods 3 and 2 of
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. A position is split into a row and a column. Each
    round adds a keyed function of one to the other, so it can be inverted, and the whole is a bijection. ``rows * columns`` is
    larger than the number of samples by less than ``rows``, about its square root; a result outside is mapped again.

    Args:
        samples: The number of samples, at most 2**62.
        key: The order depends on the key and on the number of samples alone.
        device: The device that receives the indices. They are computed on the host.
    """

    def __init__(self, samples: int, key: int, device: torch.device | None = None) -> None:
        self._samples, self._device = samples, device
        self._rows = isqrt(max(samples - 1, 0)) + 1
        self._columns = -(-samples // self._rows)
        self._keys = [derive_seed(key, samples, number) & _LOW for number in range(ROUNDS)]

    def at(self, positions: range) -> Tensor:
        return self._indices(torch.arange(positions.start, positions.stop))

    def read(self, batches: Iterable[range]) -> Iterator[Tensor]:
        held: list[range] = []
        for batch in batches:
            held.append(batch)
            if sum(map(len, held)) >= CHUNK:
                yield from self._read(held)
                held = []
        if held:
            yield from self._read(held)

    def _read(self, batches: list[range]) -> Iterator[Tensor]:
        positions = torch.cat([torch.arange(batch.start, batch.stop) for batch in batches])
        return iter(self._indices(positions).split([len(batch) for batch in batches]))

    def _indices(self, positions: Tensor) -> Tensor:
        indices = self._mapped(positions)
        while len(outside := (indices >= self._samples).nonzero()[:, 0]):
            indices[outside] = self._mapped(indices[outside])
        if self._device is None or self._device.type != "cuda":
            return indices if self._device is None else indices.to(self._device)
        return indices.pin_memory().to(self._device, non_blocking=True)  # else the host waits for the device

    def _mapped(self, positions: Tensor) -> Tensor:
        """Return a bijection of ``range(rows * columns)``, shape (N,) -> (N,)."""
        row, column = positions // self._columns, positions % self._columns
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mixed(column, first)).remainder_(self._rows)
            column = (column + _mixed(row, second)).remainder_(self._columns)
        return row * self._columns + column


ROUNDS = 8  # an even number; with 6, the differences of neighbours among fewer than 100 samples are not uniform
_LOW = 2**32 - 1


def _mixed(values: Tensor, key: int) -> Tensor:
    """Return a keyed hash below 2**55 of values below 2**32, shape (N,) -> (N,). No product exceeds int64."""
    mixed = (values ^ key) * 0x7FEB352D
    mixed ^= mixed >> 32
    mixed = (mixed & _LOW) * 0x7A5662DB
    mixed ^= mixed >> 29
    return mixed >> 8

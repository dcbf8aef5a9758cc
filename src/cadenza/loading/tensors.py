"""Batches of tensors in memory, without a call for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from cadenza.loading.rng import derive_seed
from cadenza.loading.shards import (
    PERMUTED,
    KeyedOrder,
    Order,
    Permutation,
    PositionBatches,
    RankBatches,
    Shard,
    batches_of_rank,
)
from cadenza.status.formats import counted

BatchT = TypeVar("BatchT", tuple[Tensor, ...], dict[str, Tensor])


class TensorBatches(Generic[BatchT]):
    """A loader over tensors in memory: row i of each tensor belongs to sample i.

    A run can resume it at any batch: the order of an epoch depends on the seed and the number of the epoch alone. On several
    ranks, it is sharded as a `DataLoader` over a map-style dataset is. It also works in a plain ``for`` loop.

    Shuffled batches are copies. Unshuffled batches are views: code that changes such a batch in place changes the data.

    Args:
        tensors: One or more tensors of shape (N, ...); batches are tuples with as many tensors. Or one mapping of names to such
            tensors; batches are dicts with the same names. No gradient flows into the tensors.
        batch_size: The number of samples in a batch; the last batch may have fewer.
        shuffle: Whether to draw a new order for each epoch.
        device: The device that holds the tensors, such as ``"cuda"``. Batches are created there, and a step copies nothing to
            the device. None: the device of the tensors.
        drop_last: Whether to drop the last batch if it is incomplete.
        seed: Determines the order instead of the seed of the run. Outside a run, passes are counted, and the order depends on
            (seed, pass). With None, torch's global generator determines it, as for a `DataLoader`.

    Raises:
        TypeError: An argument is not a tensor, there is no tensor, or a number has another type.
        ValueError: The tensors differ in length or in device, or `batch_size` is below 1.

    >>> batches = TensorBatches(torch.arange(5), torch.arange(5) * 10, batch_size=2)
    >>> [(inputs.tolist(), targets.tolist()) for inputs, targets in batches]
    [([0, 1], [0, 10]), ([2, 3], [20, 30]), ([4], [40])]
    """

    @overload
    def __init__(
        self: TensorBatches[dict[str, Tensor]],
        tensors: Mapping[str, Tensor],
        /,
        *,
        batch_size: int,
        shuffle: bool = ...,
        device: str | torch.device | None = ...,
        drop_last: bool = ...,
        seed: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: TensorBatches[tuple[Tensor, ...]],
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = ...,
        device: str | torch.device | None = ...,
        drop_last: bool = ...,
        seed: int | None = ...,
    ) -> None: ...
    def __init__(
        self,
        *tensors: Any,
        batch_size: int,
        shuffle: bool = False,
        device: str | torch.device | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        named = _named(tensors)
        for name, value in (("batch_size", batch_size), ("seed", 0 if seed is None else seed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number; got {value!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 sample; got {batch_size!r}")
        self._tensors = [value.detach() if device is None else value.detach().to(device) for value in named.values()]
        self._names = list(named) if isinstance(tensors[0], Mapping) else None
        self.samples: int = _common_length(named)
        """The number of samples."""
        self.device: torch.device = _common_device(dict(zip(named, self._tensors, strict=True)))
        self.batch_size: int = batch_size
        self.shuffle: bool = shuffle
        self.drop_last: bool = drop_last
        self.seed: int | None = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(range(0, self._end, self.batch_size))

    def __iter__(self) -> Iterator[BatchT]:
        if self.seed is None and self.shuffle:
            return self.batches(0, seed=int(torch.randint(2**62, ()).item()))
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.batches(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, counted from 0. In a run this call is not needed."""
        self._epoch = epoch

    def batches(
        self,
        epoch: int,
        skip: int = 0,
        *,
        seed: int = 0,
        shard: Shard | None = None,
        on_replicated: Callable[[int], object] = lambda number: None,
        permuted: int = PERMUTED,
    ) -> Iterator[BatchT]:
        """Return the batches of an epoch from number `skip` on. Skipped batches are not read.

        Args:
            epoch: The number of the epoch, counted from 0.
            skip: The number of batches of this rank to skip.
            seed: The seed of the order, if the loader has none.
            shard: The shard that this rank reads; None: everything.
            on_replicated: See `Shard.shard_indices`.
            permuted: See `resumable`.
        """
        shard, own = (shard or Shard()).at_round(skip)
        order = self._order(derive_seed(seed if self.seed is None else self.seed, epoch), permuted) if self.shuffle else None
        mine = self._batches_of(shard)
        if mine.replicated_at is not None:
            on_replicated(mine.replicated_at)
        batches = self._read(mine.since(own), order)
        return batches if shard.world_size == 1 else shard.until_any_ends(batches, len(self) - own)

    def indices(self, epoch: int, number: int, *, seed: int, shard: Shard, permuted: int = PERMUTED) -> list[int] | None:
        """Return the indices of the rows in batch `number` of `batches`, from 0; None if there are fewer batches."""
        shard, own = shard.at_round(number)
        positions = next(self._batches_of(shard).since(own), None)
        if positions is None or not self.shuffle:
            return None if positions is None else list(positions)
        order = self._order(derive_seed(seed if self.seed is None else self.seed, epoch), permuted)
        rows: list[int] = order.at(positions).tolist()
        return rows

    @property
    def _end(self) -> int:
        """The number of samples in the batches of an epoch."""
        return self.samples - self.samples % self.batch_size if self.drop_last else self.samples

    def _order(self, seed: int, permuted: int) -> Order:
        if self.samples > permuted:
            return KeyedOrder(self.samples, seed, self.device)
        return Permutation(self.samples, torch.Generator().manual_seed(seed), self.device)

    def _batches_of(self, shard: Shard) -> RankBatches:
        return batches_of_rank(PositionBatches.of(self._end, self.batch_size), shard)

    def _read(self, batches: Iterable[range], order: Order | None) -> Iterator[Any]:
        tensors, names = self._tensors, self._names
        pack: Callable[[list[Tensor]], Any] = tuple if names is None else lambda parts: dict(zip(names, parts, strict=True))
        if order is None:
            for positions in batches:
                yield pack([tensor[positions.start : positions.stop] for tensor in tensors])
        else:
            for index in order.read(batches):
                yield pack([tensor.index_select(0, index) for tensor in tensors])

    def __repr__(self) -> str:
        shuffled = ", shuffle=True" if self.shuffle else ""
        return f"TensorBatches({counted(self.samples, 'sample')}, batch_size={self.batch_size}{shuffled})"


def _named(tensors: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors by the name for error messages: the key in the mapping, or the number of the argument."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Mapping) else None
    named = {str(i): tensor for i, tensor in enumerate(tensors)} if given is None else dict(given)
    if not named:
        raise TypeError("TensorBatches takes one or more tensors, or a mapping of names to tensors; got none")
    for name, value in named.items():
        if not isinstance(value, Tensor):
            hint = ". Convert it with torch.as_tensor(...)" if hasattr(value, "__array__") or isinstance(value, list) else ""
            raise TypeError(f"TensorBatches takes tensors; got a {type(value).__name__} as {name!r}{hint}")
        if not value.ndim:
            raise ValueError(f"tensor {name!r} must have shape (samples, ...); got one of shape ()")
    return named


def _common_length(named: Mapping[str, Tensor]) -> int:
    lengths = {name: len(value) for name, value in named.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"all tensors must have the same number of rows, one for each sample; got {given}")
    return next(iter(lengths.values()))


def _common_device(named: Mapping[str, Tensor]) -> torch.device:
    devices = {name: value.device for name, value in named.items()}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name}: {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on the same device; got {given}. Pass device= to move them to one device.")
    return next(iter(devices.values()))

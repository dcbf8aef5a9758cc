"""Batches of tensors that fit in memory, without a call for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from cadenza.loading.seeded import mixed
from cadenza.loading.shards import Share

BatchT = TypeVar("BatchT", tuple[Tensor, ...], dict[str, Tensor])


class TensorBatches(Generic[BatchT]):
    """A loader over tensors in memory: row i of each tensor belongs to sample i.

    A run reads it at an exact position: the order of an epoch depends on the seed and the number of the epoch alone, and on
    several ranks it is shared out as a `DataLoader` over a data set with indices is. It can be read in a plain ``for`` as well.

    Shuffled batches are copies. Others are views of the tensors: what is changed in them in place is changed in the data.

    Args:
        tensors: One or more tensors of shape (N, ...); batches are tuples of as many. Or one mapping of names to such tensors;
            batches are dicts with the same names. No gradient flows into them.
        batch_size: Samples in a batch; the last one may have fewer.
        shuffle: Whether each epoch has an order of its own.
        device: Where to keep them, such as ``"cuda"``: then batches are made there, and nothing is copied in a step. None:
            where they are.
        drop_last: Leave out the last batch if it is not full.
        seed: Decides the order instead of the run's seed. Read without a run, passes are counted, and the order of each depends
            on (seed, pass); with None it is drawn from torch's global generator, as that of a `DataLoader` is.

    Raises:
        TypeError: Something is not a tensor, there is none, or an argument is no number.
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
        self._tensors = [one.detach() if device is None else one.detach().to(device) for one in named.values()]
        self._names = list(named) if isinstance(tensors[0], Mapping) else None
        self.samples = _common_length(named)
        """How many samples there are."""
        self.device = _common_device(dict(zip(named, self._tensors, strict=True)))
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(range(0, self._end, self.batch_size))

    def __iter__(self) -> Iterator[BatchT]:
        if self.seed is None and self.shuffle:
            return self.batches(0, seed=int(torch.randint(2**62, ()).item()))
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.batches(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that of `epoch`, counted from 0. A run needs no such call."""
        self._epoch = epoch

    def batches(
        self,
        epoch: int,
        skip: int = 0,
        *,
        seed: int = 0,
        share: Share | None = None,
        alike: Callable[[int], object] = lambda number: None,
    ) -> Iterator[BatchT]:
        """Return the batches of an epoch from number `skip` on; nothing is read that is skipped.

        Args:
            epoch: Counted from 0.
            skip: How many batches, of those of this rank.
            seed: Counts where the loader was given none.
            share: The part of it that this rank reads; None: all.
            alike: See `Share.of_indices`.
        """
        share, own = (share or Share()).at(skip)
        order = self._drawn(mixed(seed if self.seed is None else self.seed, epoch)) if self.shuffle else None
        batches = self._made(self._pieces(own, share, alike), order)
        return batches if share.ranks == 1 else share.together(batches)

    def indices(self, epoch: int, number: int, *, seed: int, share: Share) -> list[int] | None:
        """Return the rows in batch `number`, from 0, of those that `batches` gives; None if there are fewer."""
        share, own = share.at(number)
        piece = next(self._pieces(own, share, lambda number: None), None)
        if piece is None or not self.shuffle:
            return None if piece is None else list(piece)
        order = self._drawn(mixed(seed if self.seed is None else self.seed, epoch))
        rows: list[int] = order[piece[0] : piece[-1] + 1].tolist()
        return rows

    @property
    def _end(self) -> int:
        """The first place in an epoch that belongs to no batch."""
        return self.samples - self.samples % self.batch_size if self.drop_last else self.samples

    def _drawn(self, seed: int) -> Tensor:
        """Return the order, shape (N,), int64. It is drawn on the host, so that it is the same for every device."""
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def _pieces(self, skip: int, share: Share, alike: Callable[[int], object]) -> Iterator[Sequence[int]]:
        """Yield the places in the epoch of this rank's batches: neighbours, also where the end is dealt out anew."""
        size, end = self.batch_size, self._end
        whole = share.ranks == 1 and not share.past
        first = skip if whole else 0
        pieces = (range(start, min(start + size, end)) for start in range(first * size, end, size))
        return pieces if whole else islice(share.of_indices(pieces, alike), skip, None)

    def _made(self, pieces: Iterable[Sequence[int]], order: Tensor | None) -> Iterator[Any]:
        tensors, pack = self._tensors, self._pack
        for piece in pieces:
            rows = slice(piece[0], piece[-1] + 1)
            if order is None:
                yield pack([tensor[rows] for tensor in tensors])
            else:
                index = order[rows]
                yield pack([tensor.index_select(0, index) for tensor in tensors])

    @property
    def _pack(self) -> Callable[[list[Tensor]], Any]:
        names = self._names
        return tuple if names is None else lambda parts: dict(zip(names, parts, strict=True))

    def __repr__(self) -> str:
        shuffled = ", shuffle=True" if self.shuffle else ""
        return f"TensorBatches({self.samples} samples, batch_size={self.batch_size}{shuffled})"


def _named(tensors: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors by the name under which errors speak of them: that in the mapping, or their number."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Mapping) else None
    named = {str(i): one for i, one in enumerate(tensors)} if given is None else dict(given)
    if not named:
        raise TypeError("TensorBatches takes one or more tensors, or a mapping of names to tensors; got none")
    for name, one in named.items():
        if not isinstance(one, Tensor):
            hint = ": torch.as_tensor(...) makes one" if hasattr(one, "__array__") or isinstance(one, list) else ""
            raise TypeError(f"TensorBatches takes tensors; got a {type(one).__name__} as {name!r}{hint}")
        if not one.ndim:
            raise ValueError(f"tensor {name!r} must have shape (samples, ...); got one of shape ()")
    return named


def _common_length(named: Mapping[str, Tensor]) -> int:
    lengths = {name: len(one) for name, one in named.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"all tensors must have as many rows, one for each sample; got {told}")
    return next(iter(lengths.values()))


def _common_device(named: Mapping[str, Tensor]) -> torch.device:
    devices = {name: one.device for name, one in named.items()}
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{name}: {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on the same device; got {told}. Give device= to bring them to one.")
    return next(iter(devices.values()))

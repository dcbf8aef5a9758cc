"""A torch loader with fastNLP's order and padding, and batches with the indices of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.collators import Batch, Collator
from cadenza.compat.fastnlp.core.samplers import RandomSampler

advise(__name__)

Collate = Callable[[list[Any]], Any]


class TorchDataLoader(DataLoader[Any]):
    """A torch loader that pads batches, shuffles by seed and epoch only, and provides the indices of a batch.

    Its order is the order of `RandomSampler` with seed 0 and does not depend on the seed of the run. A trainer can read it from
    any batch on, so a run can resume inside an epoch.

    Args:
        dataset: A `DataSet`, or a map-style data set of torch.
        batch_size: The number of samples in a batch.
        shuffle: Shuffle in each epoch.
        sampler: Yields indices, instead of `shuffle`.
        batch_sampler: Yields lists of indices, instead.
        num_workers: The number of worker processes.
        collate_fn: Collates a list of samples; ``"auto"`` pads, see `Collator`; None uses torch's default.
        drop_last: Drop a smaller last batch.
        **options: Further arguments of torch's loader.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 16,
        shuffle: bool = False,
        sampler: Sampler[int] | Iterable[int] | None = None,
        batch_sampler: Sampler[list[int]] | Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Collate | Literal["auto"] | None = "auto",
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(collate_fn, str) and collate_fn != "auto":
            raise ValueError(f"collate_fn must be a function, 'auto' or None; got {collate_fn!r}")
        collate = Collator() if collate_fn == "auto" else default_collate if collate_fn is None else collate_fn
        self._collate = _IndexedCollate(collate)
        if batch_sampler is not None:
            options |= {"batch_sampler": batch_sampler}
        else:
            sampler = RandomSampler(dataset, shuffle=shuffle) if sampler is None else sampler
            options |= {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        super().__init__(_Indexed(dataset), collate_fn=self._collate, num_workers=num_workers, **options)

    def get_batch_indices(self) -> list[int] | None:
        """Return the indices of the samples of the last batch; None before the first.

        With worker processes, use ``batch.indices`` of a dictionary batch instead.
        """
        return self._collate.indices


def prepare_torch_dataloader(dataset: Any, *, shuffle: bool, **options: Any) -> TorchDataLoader:
    """Return a loader of a data set. The arguments are those of `TorchDataLoader`."""
    return TorchDataLoader(dataset, shuffle=shuffle, **options)


class _Indexed(Dataset[Any]):
    """A data set that returns samples with their index. Other attributes are those of the inner data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _IndexedCollate:
    """Collates samples with their index, and keeps the indices."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate
        self.indices: list[int] | None = None

    def __call__(self, samples: list[tuple[int, Any]]) -> Any:
        self.indices = [index for index, _ in samples]
        batch = self.collate([sample for _, sample in samples])
        if type(batch) is dict:
            batch = Batch(batch)
            batch.indices = self.indices
        return batch

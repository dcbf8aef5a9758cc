"""A torch loader with fastNLP's order and padding, and batches with the indices of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from cadenza.compat.fastnlp.core.collators import Batch, Collator
from cadenza.compat.fastnlp.core.dataset import DataSet
from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.samplers import RandomSampler

Collate = Callable[[list[Any]], Any]
Indices = Sampler[int] | Iterable[int]
Batches = Sampler[list[int]] | Iterable[Sequence[int]]


class TorchDataLoader(DataLoader[Any]):
    """A torch loader that pads batches, shuffles by seed and epoch only, and provides the indices of a batch.

    Its order is the order of `RandomSampler` with seed 0 and does not depend on the seed of the run. A trainer can read it from
    any batch on, so a run can resume inside an epoch.

    Args:
        dataset: A `DataSet`, or a map-style data set of torch.
        batch_size: The number of samples in a batch.
        shuffle: Shuffle in each epoch.
        sampler: Yields indices, instead of `shuffle`.
        batch_sampler: Yields lists of indices, instead of `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: The number of worker processes.
        collate_fn: Collates a list of samples; ``"auto"`` pads, see `Collator`; None uses torch's default.
        pin_memory: Copy batches to pinned memory.
        drop_last: Drop a smaller last batch.
        timeout: The time that a worker process may take for a batch, in seconds; 0: no limit.
        worker_init_fn: Called in each worker process with its number.
        multiprocessing_context: How worker processes start; None: torch's default.
        generator: The generator of the seeds of worker processes.
        prefetch_factor: The number of batches that each worker process loads in advance.
        persistent_workers: Keep the worker processes after an epoch.
        kwargs: Ignored; a warning names them.

    Raises:
        ValueError: `collate_fn` is another text, or None for a `DataSet`.
    """

    def __init__(  # the signature is fastNLP's
        self,
        dataset: Any,
        batch_size: int = 16,
        shuffle: bool = False,
        sampler: Indices | None = None,
        batch_sampler: Batches | None = None,
        num_workers: int = 0,
        collate_fn: Collate | Literal["auto"] | None = "auto",
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            logger.warning(f"TorchDataLoader has no arguments {sorted(kwargs)}, so they have no effect")
        self._collate = _IndexedCollate(_collate_of(collate_fn, dataset))
        options: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            sampler = RandomSampler(dataset, shuffle=shuffle) if sampler is None else sampler
            options = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        super().__init__(
            _Indexed(dataset),
            collate_fn=self._collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            **options,
        )

    def get_batch_indices(self) -> list[int] | None:
        """Return the indices of the samples of the last batch; None before the first.

        With worker processes, use ``batch.indices`` of a dictionary batch instead.
        """
        return self._collate.indices

    @property
    def cur_batch_indices(self) -> list[int] | None:
        """See `get_batch_indices`."""
        return self._collate.indices

    def set_pad(
        self,
        field_name: str | tuple[str, ...],
        pad_val: float | None = 0,
        dtype: Any = None,
        backend: str | None = None,
        pad_fn: Collate | None = None,
    ) -> Collator:
        """Choose how a field is padded; see `Collator.set_pad`. Return the collator."""
        return self._collator("set_pad").set_pad(field_name, pad_val, dtype, backend, pad_fn)

    def set_ignore(self, *field_names: str | tuple[str, ...]) -> Collator:
        """Omit fields from the batches; see `Collator.set_ignore`. Return the collator."""
        return self._collator("set_ignore").set_ignore(*field_names)

    def _collator(self, method: str) -> Collator:
        if not isinstance(self._collate.collate, Collator):
            raise ValueError(f"{method} needs collate_fn='auto' or a Collator; got {self._collate.collate!r}")
        return self._collate.collate


def prepare_torch_dataloader(  # the signature is fastNLP's
    ds_or_db: Any,
    batch_size: int = 16,
    shuffle: bool | None = None,
    sampler: Indices | None = None,
    batch_sampler: Batches | None = None,
    num_workers: int = 0,
    collate_fn: Collate | Literal["auto"] | None = "auto",
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    generator: Any = None,
    prefetch_factor: int | None = 2,
    persistent_workers: bool = False,
    non_train_sampler: Indices | None = None,
    non_train_batch_size: int | None = None,
) -> Any:
    """Return a loader of a data set, or for several data sets a dictionary of loaders.

    The other arguments are those of `TorchDataLoader`.

    Args:
        ds_or_db: A data set; or a mapping of data sets, or an object with one in its attribute ``datasets``.
        shuffle: Shuffle in each epoch. None: only data sets with ``train`` in their names.
        sampler: For one data set only, as is `batch_sampler`.
        non_train_sampler: For the data sets without ``train`` in their names.
        non_train_batch_size: For the same data sets; None: `batch_size`.

    Raises:
        AssertionError: There are several data sets and a sampler.
        ValueError: `ds_or_db` is neither a data set nor a mapping.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": collate_fn, "pin_memory": pin_memory}
    options |= {"drop_last": drop_last, "timeout": timeout, "worker_init_fn": worker_init_fn, "generator": generator}
    options |= {"multiprocessing_context": multiprocessing_context, "prefetch_factor": prefetch_factor}
    options |= {"persistent_workers": persistent_workers}
    several = getattr(ds_or_db, "datasets", ds_or_db)
    if not isinstance(several, Mapping):
        if not (hasattr(ds_or_db, "__getitem__") and hasattr(ds_or_db, "__len__")):
            raise ValueError(f"a data set needs __getitem__ and __len__; got a {type(ds_or_db).__name__}")
        return TorchDataLoader(ds_or_db, batch_size, bool(shuffle), sampler, batch_sampler, **options)
    if sampler is not None or batch_sampler is not None:
        raise AssertionError("sampler and batch_sampler are for one data set; got several. Create a TorchDataLoader for each.")
    loaders: dict[str, TorchDataLoader] = {}
    for name, dataset in several.items():
        train = "train" in name
        size = batch_size if train or not non_train_batch_size else non_train_batch_size
        shuffles = train if shuffle is None else shuffle
        loaders[name] = TorchDataLoader(dataset, size, shuffles, None if train else non_train_sampler, **options)
    return loaders


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


def _collate_of(given: Collate | str | None, dataset: Any) -> Collate:
    if given is None:
        if isinstance(dataset, DataSet):
            raise ValueError("collate_fn=None is torch's default, which cannot collate the rows of a DataSet. Use 'auto'.")
        return default_collate
    if not isinstance(given, str):
        return given
    if given != "auto":
        raise ValueError(f"collate_fn must be a function, 'auto' or None; got {given!r}")
    return deepcopy(dataset.collator) if isinstance(dataset, DataSet) else Collator(backend="torch")

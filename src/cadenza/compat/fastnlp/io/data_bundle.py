"""``fastNLP.io.data_bundle``: several data sets with their vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self, TypeVar

from cadenza.compat.fastnlp.core.dataset import DataSet, Instance
from cadenza.compat.fastnlp.core.vocabulary import Vocabulary
from cadenza.errors import nearest

__all__ = ["DataBundle"]

Held = TypeVar("Held")


class DataBundle:
    """Data sets by name, such as ``train`` and ``dev``, and vocabularies by the name of their field.

    Methods of all data sets skip those that do not have the field, unless ``ignore_miss_dataset`` is False.

    Args:
        vocabs: Vocabularies by field.
        datasets: Data sets by name.

    >>> bundle = DataBundle(datasets={"train": DataSet({"words": [["a"], ["b", "c"]]})})
    >>> bundle.add_seq_len("words").get_dataset("train")["seq_len"].content
    [1, 2]
    """

    def __init__(self, vocabs: dict[str, Vocabulary] | None = None, datasets: dict[str, DataSet] | None = None) -> None:
        self.vocabs: dict[str, Vocabulary] = vocabs or {}
        self.datasets: dict[str, DataSet] = datasets or {}

    # -- data sets and vocabularies ----------------------------------------------------------------

    def set_vocab(self, vocab: Vocabulary, field_name: str) -> Self:
        """Set the vocabulary of a field. Return self.

        Raises:
            AssertionError: It is not a `Vocabulary`.
        """
        if not isinstance(vocab, Vocabulary):
            raise AssertionError(f"vocab must be a Vocabulary; got a {type(vocab).__name__}")
        self.vocabs[field_name] = vocab
        return self

    def set_dataset(self, dataset: DataSet, name: str) -> Self:
        """Set a data set. Return self.

        Raises:
            AssertionError: It is not a `DataSet`.
        """
        if not isinstance(dataset, DataSet):
            raise AssertionError(f"dataset must be a DataSet; got a {type(dataset).__name__}")
        self.datasets[name] = dataset
        return self

    def get_dataset(self, name: str) -> DataSet:
        """Return a data set.

        Raises:
            KeyError: There is none of this name.
        """
        return _of(self.datasets, name, "data set")

    def get_vocab(self, name: str) -> Vocabulary:
        """Return the vocabulary of a field.

        Raises:
            KeyError: There is none.
        """
        return _of(self.vocabs, name, "vocabulary")

    def delete_dataset(self, name: str) -> Self:
        """Remove a data set, if there is one of this name. Return self."""
        self.datasets.pop(name, None)
        return self

    def delete_vocab(self, field_name: str) -> Self:
        """Remove the vocabulary of a field, if there is one. Return self."""
        self.vocabs.pop(field_name, None)
        return self

    @property
    def num_dataset(self) -> int:
        """The number of data sets."""
        return len(self.datasets)

    @property
    def num_vocab(self) -> int:
        """The number of vocabularies."""
        return len(self.vocabs)

    def iter_datasets(self) -> Iterator[tuple[str, DataSet]]:
        """Yield each data set with its name."""
        yield from self.datasets.items()

    def iter_vocabs(self) -> Iterator[tuple[str, Vocabulary]]:
        """Yield each vocabulary with the name of its field."""
        yield from self.vocabs.items()

    def get_dataset_names(self) -> list[str]:
        """Return the names of the data sets."""
        return list(self.datasets)

    def get_vocab_names(self) -> list[str]:
        """Return the names of the fields with vocabularies."""
        return list(self.vocabs)

    # -- fields of all data sets -------------------------------------------------------------------

    def copy_field(self, field_name: str, new_field_name: str, ignore_miss_dataset: bool = True) -> Self:
        """Copy a field. Return self."""
        for _, dataset in self._with(field_name, ignore_miss_dataset):
            dataset.copy_field(field_name, new_field_name)
        return self

    def rename_field(
        self, field_name: str, new_field_name: str, ignore_miss_dataset: bool = True, rename_vocab: bool = True
    ) -> Self:
        """Rename a field, and with `rename_vocab` that of its vocabulary. Return self."""
        for _, dataset in self._with(field_name, ignore_miss_dataset):
            dataset.rename_field(field_name, new_field_name)
        if rename_vocab and field_name in self.vocabs:
            self.vocabs[new_field_name] = self.vocabs.pop(field_name)
        return self

    def delete_field(self, field_name: str, ignore_miss_dataset: bool = True, delete_vocab: bool = True) -> Self:
        """Remove a field, and with `delete_vocab` its vocabulary. Return self."""
        for _, dataset in self._with(field_name, ignore_miss_dataset):
            dataset.delete_field(field_name)
        return self.delete_vocab(field_name) if delete_vocab else self

    def add_seq_len(self, field_name: str, new_field_name: str = "seq_len", ignore_miss_dataset: bool = True) -> Self:
        """Add a field with the lengths of another one's values. Return self."""
        for _, dataset in self._with(field_name, ignore_miss_dataset):
            dataset.add_seq_len(field_name, new_field_name)
        return self

    def apply_field(
        self,
        func: Callable[[Any], Any],
        field_name: str,
        new_field_name: str,
        num_proc: int = 0,
        ignore_miss_dataset: bool = True,
        progress_desc: str = "",
        progress_bar: Any = "rich",
    ) -> Self:
        """Call `func` with each value of a field; see `DataSet.apply_field`. Return self."""
        for name, dataset in self._with(field_name, ignore_miss_dataset):
            dataset.apply_field(func, field_name, new_field_name, num_proc, _text(progress_desc, name), progress_bar)
        return self

    def apply_field_more(
        self,
        func: Callable[[Any], Mapping[str, Any]],
        field_name: str,
        modify_fields: bool = True,
        num_proc: int = 0,
        ignore_miss_dataset: bool = True,
        progress_bar: Any = "rich",
        progress_desc: str = "",
    ) -> dict[str, dict[str, list[Any]]]:
        """Call `func` with each value of a field; see `DataSet.apply_field_more`. Return the results by data set."""
        return {
            name: dataset.apply_field_more(func, field_name, modify_fields, num_proc, _text(progress_desc, name), progress_bar)
            for name, dataset in self._with(field_name, ignore_miss_dataset)
        }

    def apply(
        self,
        func: Callable[[Instance], Any],
        new_field_name: str | None,
        num_proc: int = 0,
        progress_desc: str = "",
        progress_bar: Any = "rich",
    ) -> Self:
        """Call `func` with each row; see `DataSet.apply`. Return self."""
        for name, dataset in self.datasets.items():
            dataset.apply(func, new_field_name, num_proc, progress_bar, _text(progress_desc, name))
        return self

    def apply_more(
        self,
        func: Callable[[Instance], Mapping[str, Any]],
        modify_fields: bool = True,
        num_proc: int = 0,
        progress_desc: str = "",
        progress_bar: Any = "rich",
    ) -> dict[str, dict[str, list[Any]]]:
        """Call `func` with each row; see `DataSet.apply_more`. Return the results by data set."""
        return {
            name: dataset.apply_more(func, modify_fields, num_proc, _text(progress_desc, name), progress_bar)
            for name, dataset in self.datasets.items()
        }

    def drop(self, func: Callable[[Instance], bool], inplace: bool = True) -> DataBundle:
        """Remove the rows for which `func` is true. Return self, or a new bundle with `inplace` False."""
        changed = {name: dataset.drop(func, inplace) for name, dataset in self.datasets.items()}
        return self if inplace else DataBundle(self.vocabs, changed)

    def set_pad(
        self,
        field_name: Hashable,
        pad_val: float | None = 0,
        dtype: Any = None,
        backend: str | None = None,
        pad_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Choose how loaders pad a field; see `Collator.set_pad`. Return self."""
        for dataset in self.datasets.values():
            dataset.collator.set_pad(field_name, pad_val, dtype, "auto" if backend is None else backend, pad_fn)
        return self

    def set_ignore(self, *field_names: Hashable) -> Self:
        """Let loaders omit fields; see `Collator.set_ignore`. Return self."""
        for dataset in self.datasets.values():
            dataset.collator.set_ignore(*field_names)
        return self

    def __repr__(self) -> str:
        sizes = [f"{name}: {len(dataset)} rows" for name, dataset in self.datasets.items()]
        sizes += [f"{name}: {len(vocabulary)} words" for name, vocabulary in self.vocabs.items()]
        return f"DataBundle({', '.join(sizes)})"

    def _with(self, field: str, ignore_missing: bool) -> Iterator[tuple[str, DataSet]]:
        for name, dataset in self.datasets.items():
            if dataset.has_field(field):
                yield name, dataset
            elif not ignore_missing:
                raise KeyError(f"the data set {name!r} has no field {field!r}; there are {dataset.get_field_names()}")


def _of(known: Mapping[str, Held], name: str, what: str) -> Held:
    if name not in known:
        raise KeyError(f"there is no {what} {name!r}; there are {list(known)}.{nearest(name, known)}")
    return known[name]


def _text(text: str, name: str) -> str:
    return f"{text or 'Processing'} for {name!r}"

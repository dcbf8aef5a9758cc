"""Vocabularies: words and their indices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from cadenza.compat.fastnlp.core.dataset import DataSet

__all__ = ["Vocabulary"]


Words = Iterable[str]


class Vocabulary:
    """Assign an index to each word: padding 0, unknown 1, then the words by frequency.

    Of words with equal counts, the one seen first has the lower index. Indices are assigned at the first use, and again after
    words were added.

    Args:
        max_size: At most this many words, besides padding and unknown; None: no limit.
        min_freq: Only words with at least this count; None: all.
        padding: The padding word, with index 0; None: no padding.
        unknown: Unknown words get the index of this word; None: no such word.

    >>> vocabulary = Vocabulary().add_word_lst(["b", "a", "b"])
    >>> vocabulary["b"], vocabulary["a"], vocabulary["never seen"], len(vocabulary)
    (2, 3, 1, 4)
    """

    def __init__(
        self,
        max_size: int | None = None,
        min_freq: int | None = None,
        padding: str | None = "<pad>",
        unknown: str | None = "<unk>",
    ) -> None:
        self.max_size: int | None = max_size
        self.min_freq: int | None = min_freq
        self.padding: str | None = padding
        self.unknown: str | None = unknown
        self.word_count: Counter[str] = Counter()
        self._rare: dict[str, None] = {}  # seen only with no_create_entry
        self._index: dict[str, int] | None = None
        self._words: dict[int, str] = {}

    # -- seeing words ------------------------------------------------------------------------------

    def add_word(self, word: str, no_create_entry: bool = False) -> Vocabulary:
        """Count a word once. Return self."""
        return self.update([word], no_create_entry)

    def add(self, word: str, no_create_entry: bool = False) -> Vocabulary:
        """Count a word once. Return self."""
        return self.update([word], no_create_entry)

    def add_word_lst(self, word_lst: Words, no_create_entry: bool = False) -> Vocabulary:
        """Count each word of a list. Return self."""
        return self.update(word_lst, no_create_entry)

    def update(self, word_lst: Words, no_create_entry: bool = False) -> Vocabulary:
        """Count each word of a list. Return self.

        Args:
            word_lst: The words.
            no_create_entry: The words come from data without training, so an embedding need not learn vectors for words that
                occur only there. They still get an index.
        """
        for word in word_lst:
            if not no_create_entry:
                self._rare.pop(word, None)
            elif word not in self.word_count:
                self._rare[word] = None
            self.word_count[word] += 1
        self._index = None
        return self

    def is_word_no_create_entry(self, word: str) -> bool:
        """Return whether a word was seen only with ``no_create_entry``."""
        return word in self._rare

    def from_dataset(
        self,
        *datasets: DataSet,
        field_name: str | Sequence[str],
        no_create_entry_dataset: DataSet | Sequence[DataSet] | None = None,
    ) -> Vocabulary:
        """Count the words in the fields of data sets: a word, a list of words or a list of such lists a row. Return self."""
        names = [field_name] if isinstance(field_name, str) else list(field_name)
        given = no_create_entry_dataset
        rest = [] if given is None else [given] if isinstance(given, DataSet) else list(given)
        for dataset, no_entry in [*((data, False) for data in datasets), *((data, True) for data in rest)]:
            for name in names:
                for value in _checked(dataset).get_field(name):
                    self.update(_words_in(value, name), no_entry)
        return self

    def clear(self) -> Vocabulary:
        """Forget all words. Return self."""
        self.word_count.clear()
        self._rare.clear()
        self._index = None
        return self

    # -- indices -----------------------------------------------------------------------------------

    def build_vocab(self) -> Vocabulary:
        """Assign the indices now. Return self."""
        special = [word for word in (self.padding, self.unknown) if word is not None]
        counted = [(word, count) for word, count in self.word_count.most_common() if word not in special]
        words = [word for word, count in counted if self.min_freq is None or count >= self.min_freq]
        self.word2idx = {word: number for number, word in enumerate([*special, *words[: self.max_size]])}
        return self

    @property
    def word2idx(self) -> dict[str, int]:
        """The index of each word."""
        if self._index is None:
            self.build_vocab()
        assert self._index is not None, "it was built"
        return self._index

    @word2idx.setter
    def word2idx(self, indices: Mapping[str, int]) -> None:
        self._index = dict(indices)
        self._words = {number: word for word, number in indices.items()}

    @property
    def idx2word(self) -> dict[int, str]:
        """The word of each index."""
        return {number: word for word, number in self.word2idx.items()}

    @idx2word.setter
    def idx2word(self, words: Mapping[int, str]) -> None:
        self.word2idx = {word: number for number, word in words.items()}

    def build_reverse_vocab(self) -> None:
        """Do nothing: `idx2word` is always that of `word2idx`."""

    @property
    def padding_idx(self) -> int | None:
        """The index of the padding; None without one."""
        return None if self.padding is None else self.word2idx[self.padding]

    @property
    def unknown_idx(self) -> int | None:
        """The index of unknown words; None without one."""
        return None if self.unknown is None else self.word2idx[self.unknown]

    def to_index(self, w: str) -> int:
        """Return the index of a word.

        Raises:
            ValueError: The word is unknown, and there is no index for unknown words.
        """
        number = self.word2idx.get(w, self.unknown_idx)
        if number is None:
            raise ValueError(f"the word {w!r} is not in the vocabulary, which has unknown=None")
        return number

    def to_word(self, idx: int) -> str:
        """Return the word of an index."""
        if self._index is None:
            self.build_vocab()
        return self._words[idx]

    def index_dataset(
        self, *datasets: DataSet, field_name: str | Sequence[str], new_field_name: str | Sequence[str] | None = None
    ) -> Vocabulary:
        """Replace the words of fields by indices, or write the indices to new fields. Return self."""
        names = [field_name] if isinstance(field_name, str) else list(field_name)
        new = names if new_field_name is None else [new_field_name] if isinstance(new_field_name, str) else list(new_field_name)
        if len(new) != len(names):
            raise ValueError(f"there must be a new name for each of the {len(names)} fields; got {new}")
        for dataset in datasets:
            for old_name, new_name in zip(names, new, strict=True):
                values = [_mapped(value, self.to_index) for value in _checked(dataset).get_field(old_name)]
                dataset.add_field(new_name, values)
        return self

    # -- files -------------------------------------------------------------------------------------

    def save(self, filepath: str | os.PathLike[str] | IO[str]) -> None:
        """Write the words, their counts and indices to a text file, in the format of fastNLP.

        Args:
            filepath: A path, or a file that is open for writing text.
        """
        with _opened(filepath, "w") as file:
            for name in ("max_size", "min_freq", "unknown", "padding"):
                file.write(f"{name}\t{getattr(self, name)}\n")
            file.write(f"rebuild\t{self._index is None}\n\n")
            for word, count in self.word_count.items():
                number = -2 if self._index is None else self._index.get(word, -1)  # -2: no indices; -1: not this word
                file.write(f"{word}\t{count}\t{number}\t{int(word in self._rare)}\n")

    @staticmethod
    def load(filepath: str | os.PathLike[str] | IO[str]) -> Vocabulary:
        """Return the vocabulary of a file of `save`.

        Args:
            filepath: A path, or a file that is open for reading text.
        """
        with _opened(filepath, "r") as file:
            head, _, rows = file.read().partition("\n\n")
        options = {name: None if value == "None" else value for name, value in (line.split("\t") for line in head.splitlines())}
        size, least = (None if options[name] is None else int(options[name] or 0) for name in ("max_size", "min_freq"))
        vocabulary = Vocabulary(size, least, options["padding"], options["unknown"])
        indices: dict[str, int] = {}
        for word, count, number, rare in (line.split("\t") for line in rows.split("\n") if line):
            vocabulary.word_count[word] = int(count)
            if int(number) >= 0:
                indices[word] = int(number)
            if rare == "1":
                vocabulary._rare[word] = None
        if indices:
            special = [word for word in (vocabulary.padding, vocabulary.unknown) if word is not None]
            vocabulary.word2idx = {**{word: number for number, word in enumerate(special)}, **indices}
        return vocabulary

    def __getitem__(self, w: str) -> int:
        return self.to_index(w)

    def __contains__(self, item: object) -> bool:
        return item in self.word2idx

    def has_word(self, w: str) -> bool:
        """Return whether a word has its own index."""
        return w in self

    def __len__(self) -> int:
        return len(self.word2idx)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.word2idx.items())

    def __repr__(self) -> str:
        return f"Vocabulary({list(self.word_count)[:5]}...)"


def _checked(dataset: object) -> DataSet:
    if not isinstance(dataset, DataSet):
        raise TypeError(f"expected a DataSet; got {type(dataset).__name__}")
    return dataset


def _words_in(value: Any, field: str, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Sequence) and depth < 2:
        for part in value:
            yield from _words_in(part, field, depth + 1)
    else:
        raise TypeError(f"the field {field!r} must hold words, lists of them or lists of such lists; got {value!r}")


def _mapped(value: Any, to_index: Callable[[str], int]) -> Any:
    return to_index(value) if isinstance(value, str) else [_mapped(part, to_index) for part in value]


def _opened(file: str | os.PathLike[str] | IO[str], mode: str) -> AbstractContextManager[IO[str]]:
    """Return an open file. One that the caller opened stays open."""
    if isinstance(file, str | os.PathLike):
        return Path(file).open(mode, encoding="utf-8")
    return nullcontext(file)

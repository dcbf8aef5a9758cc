"""Methods of `DataSet` that change or export its fields and rows."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cadenza.compat.fastnlp.core.collators import Collator
from cadenza.compat.fastnlp.core.dataset.applying import ApplyResultException, results_of
from cadenza.compat.fastnlp.core.dataset.field import FieldArray
from cadenza.compat.fastnlp.core.dataset.instance import Instance
from cadenza.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas

Row = Mapping[str, Any]
Bar = str | None


class Operations:
    """Methods of `DataSet`."""

    field_arrays: dict[str, FieldArray]
    get_field: Callable[[str], FieldArray]
    add_field: Callable[[str, Sequence[Any]], Any]
    _collator: Collator | None = None

    # -- padding -----------------------------------------------------------------------------------

    @property
    def collator(self) -> Collator:
        """The collator of loaders of this data set. They copy it."""
        if self._collator is None:
            self._collator = Collator()
        return self._collator

    def set_pad(
        self,
        field_name: str | tuple[str, ...],
        pad_val: float | None = 0,
        dtype: Any = None,
        backend: str | None = None,
        pad_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Collator:
        """Choose how loaders pad a field; see `Collator.set_pad`. Return the collator."""
        return self.collator.set_pad(field_name, pad_val, dtype, "auto" if backend is None else backend, pad_fn)

    def set_ignore(self, *field_names: str | tuple[str, ...]) -> Collator:
        """Let loaders omit fields; see `Collator.set_ignore`. Return the collator."""
        return self.collator.set_ignore(*field_names)

    # -- new fields --------------------------------------------------------------------------------

    def apply(
        self,
        func: Callable[[Instance], Any],
        new_field_name: str | None = None,
        num_proc: int = 0,
        progress_bar: Bar = "rich",
        progress_desc: str = "",
    ) -> list[Any]:
        """Call `func` with each row, and return the results. The arguments are those of `apply_more`.

        Args:
            new_field_name: The field that gets the results, which may exist; None: only return them.
        """
        results = self._applied(func, self, num_proc, progress_desc, progress_bar)
        if new_field_name is not None:
            self.add_field(new_field_name, results)
        return results

    def apply_field(
        self,
        func: Callable[[Any], Any],
        field_name: str,
        new_field_name: str | None = None,
        num_proc: int = 0,
        progress_desc: str = "",
        progress_bar: Bar = "rich",
    ) -> list[Any]:
        """Call `func` with each value of a field, and return the results; see `apply`."""
        results = self._applied(func, self.get_field(field_name), num_proc, progress_desc, progress_bar)
        if new_field_name is not None:
            self.add_field(new_field_name, results)
        return results

    def apply_more(
        self,
        func: Callable[[Instance], Row],
        modify_fields: bool = True,
        num_proc: int = 0,
        progress_desc: str = "",
        progress_bar: Bar = "rich",
    ) -> dict[str, list[Any]]:
        """Call `func` with each row. It returns the fields to add or to replace.

        Args:
            func: Returns a dictionary with the same names for each row.
            modify_fields: Change the data set; False only returns the values.
            num_proc: The number of processes; 0 or 1: this process. With more, `func` is pickled, so it cannot be a lambda.
            progress_desc: The text of the progress bar.
            progress_bar: ``"rich"``, ``"tqdm"`` or None.

        Returns:
            The new values of all rows by name.

        Raises:
            AssertionError: The data set is empty.
            ApplyResultException: `func` did not return a dictionary with the same names as for the first row.
            TypeError: `func` is a lambda, with several processes.
        """
        return self._add_all(self._applied(func, self, num_proc, progress_desc, progress_bar), modify_fields)

    def apply_field_more(
        self,
        func: Callable[[Any], Row],
        field_name: str,
        modify_fields: bool = True,
        num_proc: int = 0,
        progress_desc: str = "",
        progress_bar: Bar = "rich",
    ) -> dict[str, list[Any]]:
        """Call `func` with each value of a field. It returns the fields to add or to replace; see `apply_more`."""
        values = self.get_field(field_name)
        return self._add_all(self._applied(func, values, num_proc, progress_desc, progress_bar), modify_fields)

    def _applied(self, func: Any, values: Any, num_proc: int, text: str | None, bar: Bar) -> list[Any]:
        if not len(values):
            raise AssertionError("a function can be applied to at least one row; the DataSet is empty")
        return list(results_of(func, values, num_proc, text or "Processing", bar))

    def _add_all(self, rows: Iterable[Any], modify_fields: bool) -> dict[str, list[Any]]:
        results: dict[str, list[Any]] = {}
        for row, new in enumerate(rows):
            if not isinstance(new, Mapping):
                raise ApplyResultException(f"the function must return a dict; for row {row} it returned {new!r}")
            if row and new.keys() != results.keys():
                before = list(results)
                raise ApplyResultException(f"for row {row} the function returned the fields {list(new)}, before {before}")
            for name, value in new.items():
                results.setdefault(name, []).append(value)
        for name, values in results.items() if modify_fields else ():
            self.add_field(name, values)
        return results

    # -- fields and rows ---------------------------------------------------------------------------

    def get_all_fields(self) -> dict[str, FieldArray]:
        """Return the fields by name."""
        return self.field_arrays

    def add_fieldarray(self, field_name: str, fieldarray: FieldArray) -> None:
        """Add a field.

        Raises:
            TypeError: It is not a `FieldArray`.
        """
        if not isinstance(fieldarray, FieldArray):
            raise TypeError(f"fieldarray must be a FieldArray; got a {type(fieldarray).__name__}")
        self.add_field(field_name, fieldarray.content)

    def copy_field(self, field_name: str, new_field_name: str) -> Self:
        """Copy a field with its values. Return self."""
        self.add_field(new_field_name, deepcopy(self.get_field(field_name).content))
        return self

    def rename_field(self, field_name: str, new_field_name: str) -> Self:
        """Rename a field, which becomes the last one. Return self."""
        field = self.get_field(field_name)
        del self.field_arrays[field_name]
        field.name = new_field_name
        self.field_arrays[new_field_name] = field
        return self

    def get_length(self) -> int:
        """Return the number of rows."""
        return next((len(field) for field in self.field_arrays.values()), 0)

    def delete_instance(self, index: int) -> Self:
        """Remove a row. Return self.

        Raises:
            IndexError: There is no such row.
        """
        if index >= self.get_length():
            raise IndexError(f"there are {self.get_length()} rows; got the index {index}")
        for field in self.field_arrays.values():
            field.pop(index)
        return self

    def drop(self, func: Callable[[Instance], bool], inplace: bool = True) -> Self:
        """Remove the rows for which `func` is true. Return self, or a new data set with `inplace` False."""
        kept = [index for index, row in enumerate(self) if not func(row)]  # type: ignore[arg-type, var-annotated]  # a DataSet
        target = self if inplace else deepcopy(self)
        for field in target.field_arrays.values():
            field.content = [field.content[index] for index in kept]
        return target

    def concat(self, dataset: Operations, inplace: bool = True, field_mapping: Mapping[str, str] | None = None) -> Self:
        """Add copies of the rows of another data set. Return self, or a new data set with `inplace` False.

        Args:
            dataset: The other data set. Its further fields are ignored.
            inplace: Change this data set.
            field_mapping: New names of the other data set's fields, by their names.

        Raises:
            RuntimeError: The other data set has no field for one of these.
        """
        named = {(field_mapping or {}).get(name, name): field for name, field in dataset.field_arrays.items()}
        if missing := self.field_arrays.keys() - named.keys():
            raise RuntimeError(f"the other DataSet has no fields {sorted(missing)}. Pass field_mapping, or delete them here.")
        target = self if inplace else deepcopy(self)
        for name, field in target.field_arrays.items():
            field.content.extend(deepcopy(named[name].content))
        return target

    # -- files and tables --------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Pickle the data set to a file."""
        Path(path).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the data set of a file of `save`. Read only files that you trust: a pickle can execute any code.

        Raises:
            TypeError: The file contains something else.
        """
        found = pickle.loads(Path(path).read_bytes())
        if not isinstance(found, cls):
            raise TypeError(f"the file {path} contains a {type(found).__name__}, not a DataSet")
        return found

    @classmethod
    def from_pandas(cls, df: pandas.DataFrame) -> Self:
        """Return a data set with the columns of a data frame."""
        return cls(df.to_dict(orient="list"))  # type: ignore[call-arg]  # the constructor of DataSet

    def to_pandas(self) -> pandas.DataFrame:
        """Return the fields as a data frame."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", needed_by="DataSet.to_pandas", extra="data") from None
        return pandas.DataFrame({name: field.content for name, field in self.field_arrays.items()})

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the fields to a CSV file."""
        self.to_pandas().to_csv(path, encoding="utf-8")

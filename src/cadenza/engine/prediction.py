"""Prediction: joined in memory, or written to a file batch by batch, in the order of the loader on several ranks too."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
from torch import nn

from cadenza.drivers import Driver
from cadenza.drivers.agreeing import by_main
from cadenza.engine.evaluation import NONE, each_batch, undisturbed
from cadenza.engine.outputs import joined, on_host
from cadenza.engine.rank_checks import main_only
from cadenza.engine.session import Session
from cadenza.errors import DataError, DirectoryError, DistributedError
from cadenza.files.paths import local_path
from cadenza.hooks.moments import Callback
from cadenza.loading.evaluation import Evaluation
from cadenza.records.tables import Format, Table, column_of, format_of, plain_value, writing
from cadenza.status.outputs import Outputs, parts_of
from cadenza.status.plain import is_array

_OWNER = "predict(to=...)"
_COUNTER = "index"


class Prediction(Evaluation):
    """The evaluation that `Trainer.predict` does, named ``predict``.

    Args:
        loader: Any iterable of batches.
        compute: ``compute(model, batch)`` returns the predictions. None: the prediction of `compute_loss`.
        compute_loss: That of the trainer.
        limit: The maximal number of batches; None: all.
        to: The path of the file to write; None: no file.

    Raises:
        TypeError: `compute` is missing, and `compute_loss` is a function that only returns a loss; or `to` is no path.
        ValueError: `to` has an unknown suffix, or is a URL.
        MissingExtraError: `to` is a Parquet file, and pyarrow is not installed.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        compute: Callable[[nn.Module, Any], Any] | None,
        compute_loss: object,
        *,
        limit: int | None,
        to: str | os.PathLike[str] | None,
    ) -> None:
        predicted = compute or getattr(compute_loss, "predict", None)
        if predicted is None:
            raise TypeError(
                "predict needs predictions, but compute_loss only returns a loss: it is a function of your own, "
                f"{compute_loss!r}. Pass compute=, a function (model, batch) -> predictions."
            )

        def predictions(model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"predictions": predicted(model, batch)}

        super().__init__(loader, name="predict", compute=predictions, limit=limit)
        self.to: Path | None = None
        self.format: Format | None = None
        if to is not None:
            if not isinstance(to, str | os.PathLike):
                raise TypeError(f"to must be the path of a file, such as 'predictions.parquet'; got {to!r}")
            if "://" in os.fspath(to):
                raise ValueError(f"to must be a local file; got the URL {os.fspath(to)!r}. Write a local file, and copy it.")
            self.to, self.format = local_path(to), format_of(local_path(to), needed_by=_OWNER)


def predict(session: Session, evaluation: Evaluation) -> Any:
    """Return the predictions for every batch, on the host; or write them to the file of a `Prediction`, and return its path.

    Tensors that differ in the first dimension only are joined along it; mappings of such tensors by key; anything else comes
    as a list with an entry a batch. Every rank must call this.
    """
    evaluation.complete, evaluation.batch = False, 0
    with ExitStack() as files:
        parts = _destination(session, evaluation, files)
        with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
            session.hooks.on_eval_start(session.run, evaluation)
            evaluation.check_order(session.driver.data_world_size)
            each_batch(session, evaluation, parts.add)
            evaluation.complete = True
        return parts.result()


class _Destination(Protocol):
    def add(self, batch: Any, outputs: Outputs) -> None:
        """Take the predictions for a batch."""

    def result(self) -> Any:
        """Return all predictions, or the path. Every rank must call this."""


def _destination(session: Session, evaluation: Evaluation, files: ExitStack) -> _Destination:
    to, format_ = getattr(evaluation, "to", None), getattr(evaluation, "format", None)
    if to is None or format_ is None:
        return _InMemory(session.driver)
    path = session.run.info.base / to
    main_only(session.driver, lambda: _check_can_write(path))  # before the first batch
    if session.driver.world_size == 1:
        return _InFile(path, files.enter_context(writing(path, format_, counter=_COUNTER)))
    folder = path.parent if path.parent.is_dir() else None  # another machine may not have it
    return _Spooled(session.driver, path, format_, files.enter_context(tempfile.TemporaryFile(dir=folder)))


def _check_can_write(path: Path) -> None:
    from cadenza.sinks.own_file import own_folder  # imported here: a trainer needs no sink

    own_folder(path.parent, sink=_OWNER)
    if path.is_dir():
        raise DirectoryError(f"{_OWNER} cannot write {str(path)!r}: it is a folder. Give the path of a file.")


class _InMemory:
    def __init__(self, driver: Driver) -> None:
        self._driver, self._parts = driver, list[Any]()

    def add(self, batch: Any, outputs: Outputs) -> None:
        self._parts.append(on_host(outputs["predictions"]))

    def result(self) -> Any:
        parts = self._parts
        if self._driver.data_world_size > 1:  # each rank did every so many-th batch
            turns = zip_longest(*self._driver.gather_data(parts), fillvalue=NONE)
            parts = [part for turn in turns for part in turn if part is not NONE]
        return joined(parts)


class _InFile:
    """Writes each batch."""

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table

    def add(self, batch: Any, outputs: Outputs) -> None:
        self._table.add(columns_of(outputs["predictions"]))

    def result(self) -> Path:
        return self._path


class _Spooled:
    """Keeps the batches of this rank in a temporary file. At the end the main process writes those of all ranks, in rounds.

    So ranks do not wait for each other at each batch, and none needs more memory than for a batch; the main process needs that
    for a batch of each rank.
    """

    def __init__(self, driver: Driver, path: Path, format_: Format, spool: BinaryIO) -> None:
        self._driver, self._path, self._format, self._spool = driver, path, format_, spool
        self._batches = 0

    def add(self, batch: Any, outputs: Outputs) -> None:
        columns = columns_of(outputs["predictions"])
        if self._driver.counts:
            pickle.dump(columns, self._spool, protocol=pickle.HIGHEST_PROTOCOL)
            self._batches += 1

    def result(self) -> Path:
        arriving, failed = self._in_order(), list[Exception]()
        if self._driver.is_main:
            try:
                with writing(self._path, self._format, counter=_COUNTER) as table:
                    for rows in arriving:
                        table.add(rows)
            except Exception as error:
                failed.append(error)
        for _ in arriving:  # the other ranks send theirs, also after an error of the main process
            pass

        def raise_failed() -> None:
            for error in failed:
                raise error

        by_main(
            self._driver.meeting,
            raise_failed,
            lambda rank, problem: DistributedError(f"the main process could not write {str(self._path)!r}: {problem}"),
        )
        return self._path

    def _in_order(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of all ranks on the main process, and none on the others. Communicates."""
        rounds = int(self._driver.reduce(torch.tensor(self._batches), "max"))
        self._spool.seek(0)
        for number in range(rounds):
            own = pickle.load(self._spool) if number < self._batches else None
            yield from (rows for rows in self._driver.gather_on_main(own) if rows is not None)


def columns_of(predictions: Any) -> dict[str, Any]:
    """Return the predictions for a batch of N samples as columns by name, on the host.

    Raises:
        DataError: They are no columns, or have different lengths.
    """
    columns = dict(_columns("", predictions))
    lengths = {name: len(column) for name, column in columns.items()}
    if not columns or len(set(lengths.values())) > 1:
        raise DataError(
            f"{_OWNER} needs a prediction for each sample of the batch in all columns; got "
            f"{lengths or 'no columns'}. Return tensors of shape (N, ...), lists of N values, or a mapping of these."
        )
    return columns


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and columns of a value; `name` is empty for the whole prediction."""
    if named := _named_parts(value):
        for key, part in named.items():
            is_loss = not name and key == "loss" and getattr(part, "ndim", None) == 0  # of a model that returns its own
            if part is not None and not is_loss:
                yield from _columns(f"{name}/{key}" if name else str(key), part)
    elif is_array(value) and value.ndim:
        yield name or "prediction", column_of(value)
    elif isinstance(value, list | tuple):
        yield name or "prediction", [plain_value(part) for part in value]
    else:
        came = f"shape {tuple(value.shape)}" if is_array(value) else type(value).__name__
        raise DataError(
            f"{_OWNER} cannot write {name or 'prediction'!r} as a column: expected a tensor of shape (N, ...), a list of N "
            f"values, or a mapping of these; got {came}. Return one of these from compute."
        )


def _named_parts(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a mapping, an object with fields, or a tuple of tensors; nothing for other values."""
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return cast("dict[str, Any]", value._asdict())
    if isinstance(value, tuple) and any(is_array(part) or isinstance(part, Mapping) for part in value):
        return {f"prediction/{number}": part for number, part in enumerate(value)}
    return parts_of(value) if is_dataclass(value) or hasattr(value, "loss") else {}

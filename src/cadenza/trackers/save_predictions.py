"""Write the predictions of a model to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any
from weakref import ref

from cadenza.engine.objective import predictions_in, targets_in
from cadenza.errors import DataError, nearest
from cadenza.files.paths import local_text
from cadenza.hooks.moments import Callback
from cadenza.sinks.own_file import own_folder
from cadenza.status.decisions import decide
from cadenza.trackers.tables import column_of, format_of, writing

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

Column = Callable[[Any, Mapping[str, Any]], Any]
Rows = dict[str, Any]
"""The columns of some samples, by name: each an array of shape (N,) on the host, or a list."""


class SavePredictions(Callback):
    """Write a row for each sample of an evaluation or prediction, as CSV, Parquet or JSON lines.

    The columns are ``sample`` (0, 1, 2, ... in the order of the loader), ``prediction`` and, if there are targets, ``target``.
    Values of shape (N,), or a list of N, make one column. Values of shape (N, C) make C columns, ``prediction/0`` to
    ``prediction/{C-1}``. A mapping makes one column for each name. Values are not rounded, and scores are not turned into
    classes: use `columns` for that.

    The whole file is written at the end of the evaluation. An evaluation that ends with an error writes no file. An existing
    file is replaced only if it lies in the directory of the run, if the same run wrote it, or if the run continues.

    With multiple ranks: communicates at the end of the evaluation: the main process writes all rows in the order of the loader.

    Args:
        path: The path of the file, with the suffix ``.csv``, ``.parquet`` or ``.jsonl``. It may have the fields ``{epoch}`` and
            ``{step}``. A relative path starts at the directory of the run, or at the working directory if the run has none, as
            in `Trainer.predict` and `Trainer.evaluate`.
        evaluation: ``"predict"`` for `Trainer.predict`, else the name of an `Evaluate` or `Trainer.evaluate`.
        columns: More columns by name, each a function ``(batch, outputs) -> values``. A column with one of the names above
            replaces that column.
        overwrite: Replace any existing file.

    Raises:
        ValueError: The path has another suffix or an unknown field.
        MissingExtraError: The suffix is ``.parquet`` and pyarrow is not installed.
        FileExistsError: At the start of an evaluation, or before the first epoch: the file exists and may not be replaced.
        DataError: There are no predictions, or columns differ in length.

    >>> import tempfile
    >>> from cadenza import supervised
    >>> import torch
    >>> from cadenza.testing import tiny_loader, tiny_trainer
    >>> classes = lambda batch, outputs: outputs["predictions"].argmax(-1)
    >>> save = SavePredictions(tempfile.mkdtemp() + "/valid.csv", evaluation="eval", columns={"prediction": classes})
    >>> trainer = tiny_trainer(compute_loss=supervised(torch.nn.functional.mse_loss), callbacks=[save])
    >>> results = trainer.evaluate(tiny_loader(1))
    >>> save.file.read_text().splitlines()
    ['sample,prediction,target/0', '0,0,-1.0', '1,0,3.0']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        evaluation: str = "predict",
        columns: Mapping[str, Column] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path: str = local_text(path)
        self.evaluation: str = evaluation
        self.overwrite: bool = overwrite
        self.columns: dict[str, Column] = dict(columns or {})
        self._fields = _fields_in(self.path)
        self._format = format_of(self.path, needed_by="SavePredictions")
        for name, column in self.columns.items():
            if not callable(column):
                raise TypeError(f"columns[{name!r}] must be a function (batch, outputs) -> values; got {column!r}")
        self._parts: list[Rows] = []
        self._written: set[Path] = set()
        self._run: ref[Run] | None = None
        self.file: Path | None = None
        """The last written file."""

    def on_fit_start(self, run: Run) -> None:
        if self.evaluation in run.evaluations and run.is_main:  # so that an error shows before the first epoch
            if not self._fields:
                self._check_free(run, self._target(run))
            own_folder(self._target(run).parent, sink="SavePredictions")

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.name == self.evaluation:
            self._parts = []
            if run.is_main:
                path = self._target(run)
                self._check_free(run, path)
                own_folder(path.parent, sink="SavePredictions")  # so that an error shows before the evaluation

    def on_eval_batch_end(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any]) -> None:
        if evaluation.name == self.evaluation and outputs:  # empty after an error
            self._parts.append(self._rows(batch, outputs))

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.name != self.evaluation:
            return
        parts, self._parts = self._parts, []
        if not evaluation.complete:
            return
        parts = [*run.driver.in_turns(iter(parts), len(parts))]  # those of all ranks, in the order of the loader
        if run.is_main:
            path = self._target(run)
            if not parts or not parts[0]:
                raise DataError(
                    "SavePredictions has nothing to write: no batch has outputs. Check that the loader is not empty."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path, self._format, counter="sample") as table:
                for part in parts:
                    table.add(part)
            rows = sum(len(next(iter(part.values()))) for part in parts)
            self._written.add(path)
            self.file = path
            data = {"rows": rows, "evaluation": self.evaluation, "path": str(path)}
            decide(run, "saved predictions", f"{rows} rows of {self.evaluation!r} in {path}", data=data)

    def _rows(self, batch: Any, outputs: Mapping[str, Any]) -> Rows:
        own = {name: column(batch, outputs) for name, column in self.columns.items()}
        given = {"prediction": predictions_in(outputs), "target": targets_in(batch, outputs)}
        if given["prediction"] is None and "prediction" not in own:
            raise DataError(
                f"SavePredictions finds no 'predictions' in the outputs of {self.evaluation!r}; got {list(outputs)}."
                f"{nearest('predictions', outputs)} Return a mapping with 'predictions' from compute, or give "
                "columns={'prediction': a function (batch, outputs)}."
            )
        standard = {name: value for name, value in given.items() if value is not None}
        rows = {key: part for name, value in (standard | own).items() for key, part in _columns(name, value)}
        lengths = {name: len(column) for name, column in rows.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"all columns must have a value for each sample of the batch; got {lengths}. Return one per sample."
            )
        return rows

    def _target(self, run: Run) -> Path:
        counters = {"epoch": run.progress.epoch, "step": run.progress.step}
        return run.info.base / self.path.format(**counters)

    def _check_free(self, run: Run, path: Path) -> None:
        if self._run is None or self._run() is not run:
            self._run, self._written = ref(run), set()
        inside = run.info.directory is not None and path.resolve().is_relative_to(run.info.directory.resolve())
        if self.overwrite or inside or path in self._written or run.progress.origin.step or not path.exists():
            return
        raise FileExistsError(
            f"{str(path)!r} exists, and SavePredictions would replace it. Move it, give another path (it may have the fields "
            "{epoch} and {step}), or SavePredictions(..., overwrite=True)."
        )


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and columns of a value of N samples."""
    value = column_of(value)
    dimensions = getattr(value, "ndim", None)  # a NumPy array has it too
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _columns(f"{name}/{key}", part)
    elif dimensions == 2:
        for index in range(value.shape[1]):
            yield f"{name}/{index}", value[:, index]
    elif dimensions == 1 or isinstance(value, list | tuple):
        yield name, value
    else:
        came = type(value).__name__ if dimensions is None else f"shape {tuple(value.shape)}"
        raise DataError(
            f"SavePredictions cannot write {name!r} as columns: expected values of shape (N,) or (N, C), a list of N, or a "
            f"mapping of these; got {came}. Give columns={{{name!r}: a function (batch, outputs)}} that makes such values."
        )


def _fields_in(path: str) -> set[str]:
    try:
        fields = {field for _, field, _, _ in Formatter().parse(path) if field is not None}
    except ValueError as error:
        raise ValueError(f"the path {path!r} cannot be parsed: {error}. Double a brace that is not part of a field.") from None
    for field in fields - {"epoch", "step"}:
        raise ValueError(f"a path may have the fields {{epoch}} and {{step}}; got {{{field}}} in {path!r}")
    return fields

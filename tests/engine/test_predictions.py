"""Predictions in memory and in files: what `Trainer.predict(to=...)` writes is read back with pyarrow, csv and json."""

from __future__ import annotations

import csv
import json
import math
import os
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Evaluation, Run, on, supervised
from cadenza.errors import DataError, DirectoryError, MissingExtraError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_trainer
from tests.engine.parts import Unsized, broken, unequal

MSE = supervised(nn.functional.mse_loss)
Pair = namedtuple("Pair", ["scores", "classes"])  # as a model of the user returns it


def written(path: Path, *predictions: Any) -> Any:
    """Write these predictions, a batch each; return the table."""
    script = iter(predictions)
    to = tiny_trainer().predict(tiny_loader(len(predictions)), compute=lambda model, batch: next(script), to=path)
    assert to == path
    return pyarrow.parquet.read_table(to) if path.suffix == ".parquet" else None


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: json.loads(value) for name, value in row.items()} for row in csv.DictReader(file)]


# -- in memory ----------------------------------------------------------------------------------------


def test_predictions_are_joined_by_dimension_and_name_or_come_as_a_list_and_a_loss_function_needs_compute() -> None:
    loader, model = unequal(4, 4, 1), tiny_model()
    trainer = tiny_trainer(model=model, compute_loss=MSE)
    with torch.no_grad():
        assert torch.equal(trainer.predict(loader), model(torch.cat([inputs for inputs, _ in loader])))
    by_name = trainer.predict(tiny_loader(2, batch_size=3), compute=lambda model, batch: {"x": batch[0] * 2, "note": "text"})
    assert by_name["x"].shape == (6, 1)
    assert by_name["note"] == ["text", "text"]
    unlike = trainer.predict(unequal(2, 3), compute=lambda model, batch: torch.zeros(1, len(batch[0])))
    assert [tuple(one.shape) for one in unlike] == [(1, 2), (1, 3)]
    assert trainer.predict([torch.ones(3, 1)]).shape == (3, 1), "inputs alone"
    with pytest.raises(TypeError, match=r"Pass compute=, a function \(model, batch\) -> predictions"):
        tiny_trainer(compute_loss=lambda model, batch: model(batch[0]).mean()).predict(tiny_loader(1))


# -- rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_a_row_for_each_sample_in_the_order_of_the_loader_with_the_very_values(tmp_path: Path, suffix: str) -> None:
    trainer, loader = tiny_trainer(model=tiny_model(), compute_loss=MSE), unequal(4, 4, 1)
    expected = trainer.predict(loader)
    path = trainer.predict(loader, to=tmp_path / f"predictions.{suffix}")
    rows = rows_of(path)
    assert [row["index"] for row in rows] == list(range(9))
    values = [row["prediction/0"] if suffix == "csv" else row["prediction"][0] for row in rows]
    assert torch.equal(torch.tensor(values).unsqueeze(1), expected)


@pytest.mark.parametrize(
    ("prediction", "columns"),
    [
        (torch.tensor([1, 2]), {"prediction": "int64"}),
        (torch.tensor([True, False]), {"prediction": "bool"}),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), {"prediction": "list<item: float>"}),
        (torch.zeros(2, 3, 4, dtype=torch.float64), {"prediction": "list<item: list<item: double>>"}),
        (torch.zeros(2, dtype=torch.bfloat16), {"prediction": "float"}),
        (torch.zeros(2, dtype=torch.float16), {"prediction": "float"}),
        (torch.zeros(2, dtype=torch.uint8), {"prediction": "uint8"}),
        (numpy.array([1.5, 2.5]), {"prediction": "double"}),
        (["cat", "dog"], {"prediction": "string"}),
        ([torch.tensor([1, 2]), torch.tensor([3])], {"prediction": "list<item: int64>"}),
        ([{"box": torch.tensor([1.0])}, {"box": torch.tensor([2.0])}], {"prediction": "struct<box: list<item: double>>"}),
        (
            {"logits": torch.zeros(2, 3), "class": torch.tensor([0, 1]), "none": None},
            {"logits": "list<item: float>", "class": "int64"},
        ),
        ({"a": {"x": torch.zeros(2)}, "loss": torch.tensor(0.5)}, {"a/x": "float"}),
        ((torch.zeros(2), torch.tensor([1, 2])), {"prediction/0": "float", "prediction/1": "int64"}),
        (Pair(torch.zeros(2), ["a", "b"]), {"scores": "float", "classes": "string"}),
    ],
)
def test_the_shape_and_the_kind_say_which_columns_there_are(tmp_path: Path, prediction: Any, columns: dict[str, str]) -> None:
    table = written(tmp_path / "a.parquet", prediction, prediction)
    kinds = {field.name: str(field.type).replace("element", "item") for field in table.schema}
    assert kinds == {"index": "int64", **columns}
    assert table["index"].to_pylist() == [0, 1, 2, 3]


def test_a_column_index_replaces_the_position_and_lists_may_have_other_lengths_later(tmp_path: Path) -> None:
    table = written(tmp_path / "a.parquet", {"index": torch.tensor([7, 3]), "score": torch.zeros(2)})
    assert table.column_names == ["index", "score"]
    assert table["index"].to_pylist() == [7, 3]
    table = written(tmp_path / "a.parquet", torch.zeros(1, 2), torch.ones(2, 3), torch.ones(0, 1))
    assert table["prediction"].to_pylist() == [[0, 0], [1, 1, 1], [1, 1, 1]]


def test_json_has_null_for_a_number_that_is_not_finite_and_parquet_keeps_it(tmp_path: Path) -> None:
    values = torch.tensor([math.nan, math.inf, 1.0])
    written(tmp_path / "a.jsonl", values)
    assert [row["prediction"] for row in rows_of(tmp_path / "a.jsonl")] == [None, None, 1.0]
    assert torch.equal(torch.tensor(written(tmp_path / "a.parquet", values)["prediction"].to_pylist()).isnan(), values.isnan())


def test_a_batch_that_the_model_uses_again_does_no_harm(tmp_path: Path) -> None:
    buffer = torch.zeros(2)
    path = tiny_trainer().predict(tiny_loader(3), compute=lambda model, batch: buffer.add_(1), to=tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(path)["prediction"].to_pylist() == [1, 1, 2, 2, 3, 3]


def test_a_loader_without_length_and_a_limit_with_the_moments_of_a_prediction(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = tiny_trainer(callbacks=[recorder], compute_loss=MSE)
    path = trainer.predict(Unsized(tiny_loader(5)), to=tmp_path / "a.parquet")
    assert len(rows_of(path)) == 10
    assert recorder.names == ["on_eval_start", *["on_eval_batch_start", "on_eval_batch_end"] * 5, "on_eval_end"]
    assert len(rows_of(trainer.predict(Unsized(tiny_loader(5)), to=tmp_path / "a.parquet", limit=3))) == 6


def test_memory_holds_a_few_batches_however_long_the_loader_is(tmp_path: Path) -> None:
    def peak(batches: int) -> int:
        """Return the most memory, in bytes, that Python, NumPy and Arrow held. torch's own is not counted."""
        loader = DataLoader(TensorDataset(torch.zeros(32 * batches, 1), torch.zeros(32 * batches, 1)), batch_size=32)
        most, before = 0, pyarrow.total_allocated_bytes()

        @on(Callback.on_eval_batch_end)
        def look(run: Run, evaluation: Evaluation, batch: Any, outputs: Any) -> None:
            nonlocal most
            most = max(most, pyarrow.total_allocated_bytes() - before)

        trainer = tiny_trainer(compute_loss=MSE, callbacks=[look])
        tracemalloc.start()
        trainer.predict(loader, compute=lambda model, batch: batch[0].repeat(1, 2000), to=tmp_path / "a.parquet")
        most += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2)
    few, many = peak(50), peak(200)  # of 12.8 MB and of 51.2 MB
    assert many < few + 1e6
    assert many < 20e6


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_an_error_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    path, trainer = tmp_path / f"a.{suffix}", tiny_trainer(compute_loss=MSE)
    trainer.predict(tiny_loader(1), to=path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.predict(broken(), to=path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    trainer.predict(tiny_loader(2), to=path)
    assert len(rows_of(path)) == 4


def test_a_hook_that_fails_at_the_end_leaves_no_file_and_a_relative_path_may_have_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = on(Callback.on_eval_end)(lambda run, evaluation: evaluation.results["late"])
    with pytest.raises(KeyError, match="late"):
        tiny_trainer(compute_loss=MSE, callbacks=[fail]).predict(tiny_loader(1), to=tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    path = tiny_trainer(compute_loss=MSE).predict(tiny_loader(1), to="new/predictions.parquet")
    assert path == tmp_path / "new" / "predictions.parquet"
    assert path.is_file()


# -- errors -------------------------------------------------------------------------------------------


def test_wrong_paths_are_errors_before_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    predict: Any = tiny_trainer(compute_loss=MSE, callbacks=[recorder]).predict
    with pytest.raises(ValueError, match=r"needs a path ending in \.parquet, \.csv or \.jsonl; got .*a\.txt', with the suffix"):
        predict(tiny_loader(1), to=tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"to must be a local file; got the URL 's3://a/b\.parquet'"):
        predict(tiny_loader(1), to="s3://a/b.parquet")
    with pytest.raises(TypeError, match=r"to must be the path of a file, such as 'predictions\.parquet'; got 3"):
        predict(tiny_loader(1), to=3)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DirectoryError, match=r"folder\.csv': it is a folder\. Give the path of a file"):
        predict(tiny_loader(1), to=tmp_path / "folder.csv")
    with pytest.raises(DirectoryError, match=r"cannot write to .*/proc"):
        predict(tiny_loader(1), to="/proc/predictions.csv")
    monkeypatch.setattr("cadenza.trackers.tables.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'pyarrow'.*pip install 'cadenza\[parquet\]'"):
        predict(tiny_loader(1), to=tmp_path / "a.parquet")
    assert recorder.names == []
    assert os.listdir(tmp_path) == ["folder.csv"]


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ([torch.tensor(1.0)], r"cannot write 'prediction' as a column: expected .*; got shape \(\)\. Return"),
        ([{"a": "text"}], "cannot write 'a' as a column: expected .*; got str"),
        ([{"a": torch.zeros(2), "b": torch.zeros(3)}], r"in all columns; got {'a': 2, 'b': 3}"),
        ([{"a": None}], "in all columns; got no columns"),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], r"the same columns: the first has \['a'\], a later one \['b'\]"),
        (
            [torch.tensor([1, 2]), torch.tensor([0.5, 2])],
            "column 'prediction' cannot be written as Parquet: .* of the first batch, int64",
        ),
        ([["a", 1]], "column 'prediction' cannot be written as Parquet: expected values of one kind"),
        ([torch.zeros(2, dtype=torch.complex64)], "column 'prediction' cannot be written as Parquet"),
    ],
)
def test_what_is_no_column_is_an_error_that_says_what_is(tmp_path: Path, predictions: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        written(tmp_path / "a.parquet", *predictions)
    assert list(tmp_path.iterdir()) == []


def test_csv_and_json_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'prediction' cannot be written as CSV: .*; got shape \(1, 2, 3\)"):
        written(tmp_path / "a.csv", torch.zeros(1, 2, 3))
    with pytest.raises(DataError, match=r"column 'prediction' cannot be written as CSV: .*; got a list in a row"):
        written(tmp_path / "a.csv", [[1, 2], [3]])
    with pytest.raises(DataError, match="a row cannot be written as JSON: expected numbers, texts, lists and mappings"):
        written(tmp_path / "a.jsonl", [object()])
    assert list(tmp_path.iterdir()) == []

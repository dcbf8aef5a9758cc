"""SavePredictions: what is written is read back with the csv module and with pyarrow."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from torch import nn

from cadenza import Callback, supervised
from cadenza.callbacks import Checkpoint, Evaluate, SavePredictions
from cadenza.drivers import SingleDriver
from cadenza.errors import DataError
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer

MSE = supervised(nn.functional.mse_loss)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_it_is(model: nn.Module, batch: Any) -> Any:
    return batch


def saved(path: Path, batches: list[dict[str, Any]], **arguments: Any) -> list[dict[str, str]]:
    """Return the rows for batches that are outputs already."""
    save = SavePredictions(path, evaluation="eval", **arguments)
    tiny_trainer(callbacks=[save]).evaluate(batches, compute=as_it_is)
    return read(path)


def test_a_prediction_is_written_row_by_row_with_the_very_values(tmp_path: Path) -> None:
    save = SavePredictions(tmp_path / "predictions.csv")
    values = tiny_trainer(callbacks=[save], compute_loss=MSE).predict(tiny_loader(3))
    rows = read(tmp_path / "predictions.csv")
    assert [list(row) for row in rows] == [["sample", "prediction/0"]] * 6
    assert [int(row["sample"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [float(row["prediction/0"]) for row in rows] == values[:, 0].tolist()


def test_the_classes_and_targets_of_an_evaluation_are_one_line(tmp_path: Path) -> None:
    batches = [
        {"predictions": torch.tensor([[0.9, 0.1], [0.2, 0.8]]), "targets": torch.tensor([0, 0])},
        {"predictions": torch.tensor([[0.3, 0.7]]), "targets": torch.tensor([1])},
    ]
    rows = saved(
        tmp_path / "valid.csv", batches, columns={"prediction": lambda batch, outputs: outputs["predictions"].argmax(-1)}
    )
    assert [tuple(row.values()) for row in rows] == [("0", "0", "0"), ("1", "1", "0"), ("2", "1", "1")]
    assert list(rows[0]) == ["sample", "prediction", "target"]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"predictions": torch.tensor([1, 2])}, {"prediction": "2"}),
        ({"predictions": torch.tensor([[1.5], [2.5]])}, {"prediction/0": "2.5"}),
        ({"predictions": torch.tensor([[1, 2], [3, 4]])}, {"prediction/0": "3", "prediction/1": "4"}),
        ({"predictions": torch.tensor([0.5, 0.25], dtype=torch.bfloat16)}, {"prediction": "0.25"}),
        ({"predictions": torch.tensor([True, False])}, {"prediction": "False"}),
        ({"predictions": ["one", 'a "word", and\nmore']}, {"prediction": 'a "word", and\nmore'}),
        ({"predictions": numpy.array([[1, 2], [3, 4]])}, {"prediction/0": "3", "prediction/1": "4"}),
        ({"predictions": {"a": [1, 2], "b": torch.tensor([[3], [4]])}}, {"prediction/a": "2", "prediction/b/0": "4"}),
        ({"logits": torch.tensor([0.25, 0.5]), "labels": torch.tensor([0, 3])}, {"prediction": "0.5", "target": "3"}),
    ],
)
def test_the_shape_says_which_columns_there_are(tmp_path: Path, outputs: dict[str, Any], expected: dict[str, str]) -> None:
    assert saved(tmp_path / "a.csv", [outputs])[1] == {"sample": "1", **expected}


def test_own_columns_are_added_and_one_with_a_known_name_replaces_it(tmp_path: Path) -> None:
    batches = [{"predictions": torch.tensor([5, 6]), "ids": ["x", "y"]}]
    columns = {
        "sample": lambda batch, outputs: batch["ids"],
        "double": lambda batch, outputs: [2 * value for value in outputs["predictions"]],
    }
    rows = saved(tmp_path / "a.csv", batches, columns=columns)
    assert [sorted(row.items()) for row in rows] == [
        [("double", "10"), ("prediction", "5"), ("sample", "x")],
        [("double", "12"), ("prediction", "6"), ("sample", "y")],
    ]


def test_a_batch_that_is_used_again_by_the_loader_does_no_harm(tmp_path: Path) -> None:
    class Reusing:
        def __iter__(self) -> Any:
            batch = torch.zeros(1)
            for _ in range(3):
                yield {"predictions": batch}
                batch += 1

    tiny_trainer(callbacks=[SavePredictions(tmp_path / "a.csv", evaluation="eval")]).evaluate(Reusing(), compute=as_it_is)
    assert [row["prediction"] for row in read(tmp_path / "a.csv")] == ["0.0", "1.0", "2.0"]


def test_parquet_keeps_the_kinds_of_values(tmp_path: Path) -> None:
    save = SavePredictions(tmp_path / "a.parquet", evaluation="eval", columns={"id": lambda batch, outputs: batch["id"]})
    batches = [{"predictions": torch.tensor([[0.1, 0.9]] * 2), "targets": torch.tensor([1, 0]), "id": ["a", "b"]}] * 2
    tiny_trainer(callbacks=[save]).evaluate(batches, compute=as_it_is)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert {field.name: str(field.type) for field in table.schema} == {
        "sample": "int64",
        "prediction/0": "float",
        "prediction/1": "float",
        "target": "int64",
        "id": "string",
    }
    assert table["sample"].to_pylist() == [0, 1, 2, 3]
    assert table["prediction/1"].to_pylist() == [torch.tensor(0.9).item()] * 4
    assert table["id"].to_pylist() == ["a", "b", "a", "b"]


def test_in_a_fit_the_file_lies_in_the_runs_directory_and_is_that_of_the_last_evaluation(tmp_path: Path) -> None:
    save = SavePredictions("valid/last.csv", evaluation="eval")
    run = tiny_run(callbacks=[Evaluate(tiny_loader(2)), save], compute_loss=MSE, epochs=3, directory=tmp_path / "run")
    path = tmp_path / "run" / "valid" / "last.csv"
    assert save.file == path
    assert [float(row["prediction/0"]) for row in read(path)] == [
        value.item() for inputs, _ in tiny_loader(2) for value in run.model(inputs).flatten()
    ]
    assert run.why("saved predictions").endswith(f"4 rows of 'eval' in {path}")


def test_only_the_named_evaluation_is_written_each_time_to_its_own_file_if_the_path_has_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(callbacks=[SavePredictions(tmp_path / "a.csv", evaluation="test")], compute_loss=MSE)
    trainer.evaluate(tiny_loader(1))
    trainer.predict(tiny_loader(1))
    tiny_run(callbacks=[Evaluate(tiny_loader(1)), SavePredictions(tmp_path / "b.csv", evaluation="evall")], compute_loss=MSE)
    assert "expects an evaluation 'evall'; this run has ['eval']. Did you mean 'eval'?" in caplog.text
    assert list(tmp_path.iterdir()) == []
    trainer.evaluate(tiny_loader(1), name="test")
    assert len(read(tmp_path / "a.csv")) == 2
    save = SavePredictions(tmp_path / "each" / "{epoch}-{step:03}.csv", evaluation="eval")
    tiny_run(callbacks=[Evaluate(tiny_loader(1)), save], compute_loss=MSE, epochs=2)
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == ["1-005.csv", "2-010.csv"]


def test_the_batches_of_all_ranks_are_written_in_turn(tmp_path: Path) -> None:
    class TwoRanks(SingleDriver):
        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    save = SavePredictions(tmp_path / "a.csv", evaluation="eval")
    tiny_trainer(callbacks=[save], driver=TwoRanks("cpu")).evaluate(
        [{"predictions": [1, 2]}, {"predictions": [3]}], compute=as_it_is
    )
    assert [row["prediction"] for row in read(tmp_path / "a.csv")] == ["1", "2", "1", "2", "3", "3"]


def test_a_file_that_was_there_is_refused_before_the_work_and_stays_as_it_is(tmp_path: Path) -> None:
    path, recorder = tmp_path / "a.csv", Recorder(Callback.on_eval_batch_start, Callback.on_epoch_start)
    path.write_text("precious")
    with pytest.raises(FileExistsError, match=r"a\.csv' exists.*overwrite=True"):
        tiny_trainer(callbacks=[SavePredictions(path), recorder], compute_loss=MSE).predict(tiny_loader(1))
    callbacks = [Evaluate(tiny_loader(1)), SavePredictions(path, evaluation="eval"), recorder]
    with pytest.raises(FileExistsError):
        tiny_run(callbacks=callbacks, compute_loss=MSE)
    assert recorder.names == []
    assert path.read_text() == "precious"


@pytest.mark.parametrize(("overwrite", "rows"), [(False, 2), (True, 6)])
def test_the_file_of_an_earlier_call_is_replaced_only_on_request(tmp_path: Path, overwrite: bool, rows: int) -> None:
    save = SavePredictions(tmp_path / "a.csv", overwrite=overwrite)
    trainer = tiny_trainer(callbacks=[save], compute_loss=MSE)
    trainer.predict(tiny_loader(1))
    assert save._parts == []  # what was gathered is let go of
    with nullcontext() if overwrite else pytest.raises(FileExistsError):
        trainer.predict(tiny_loader(3))
    assert len(read(tmp_path / "a.csv")) == rows


def test_a_run_replaces_its_own_file_and_so_does_the_same_run_continued(tmp_path: Path) -> None:
    def fit(steps: int, resume: bool | str) -> list[dict[str, str]]:
        save = SavePredictions(tmp_path / "outside.csv", evaluation="eval")
        callbacks = [Evaluate(tiny_loader(1), every="1 step"), save, Checkpoint(every="1 step")]
        tiny_trainer(callbacks=callbacks, compute_loss=MSE, steps=steps, directory=tmp_path / "run").fit(resume=resume)
        return read(tmp_path / "outside.csv")

    assert fit(2, resume=False) != fit(4, resume="auto")


def broken_batches() -> Iterator[Any]:
    yield from tiny_loader(2)
    raise OSError("the disk is gone")


def broken_compute(model: nn.Module, batch: Any) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("arguments", [{}, {"compute": broken_compute}], ids=["loader", "forward pass"])
@pytest.mark.parametrize("call", ["predict", "eval"])
@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_an_evaluation_that_fails_leaves_no_file_and_the_next_one_begins_anew(
    tmp_path: Path, call: str, name: str, arguments: dict[str, Any]
) -> None:
    trainer = tiny_trainer(callbacks=[SavePredictions(tmp_path / name, evaluation=call)], compute_loss=MSE)
    do: Any = trainer.predict if call == "predict" else trainer.evaluate
    with pytest.raises(OSError, match="the disk is gone") as caught:
        do(broken_batches(), **arguments)
    assert [note.partition(":")[0] for note in caught.value.__notes__] == ["context"], "no second error is attached"
    assert list(tmp_path.iterdir()) == []
    do(tiny_loader(1))
    rows = read(tmp_path / name) if name == "a.csv" else pyarrow.parquet.read_table(tmp_path / name).to_pylist()
    assert len(rows) == 2


def test_values_that_cannot_be_written_leave_only_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("earlier")
    save = SavePredictions(path, overwrite=True, columns={"prediction": lambda batch, outputs: ["a", 1]})
    with pytest.raises(DataError, match="column 'prediction' cannot be written as Parquet"):
        tiny_trainer(callbacks=[save], compute_loss=MSE).predict(tiny_loader(1))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.parquet", "earlier")]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"predictions": torch.zeros(2, 3, 4)}], r"expected values of shape \(N,\) or \(N, C\).*got shape \(2, 3, 4\)"),
        ([{"predictions": torch.tensor(1.0)}], r"expected values of shape \(N,\) or \(N, C\).*got shape \(\)"),
        ([{"predictions": "text"}], r"expected values of shape \(N,\) or \(N, C\).*got str"),
        ([{"prediction": torch.zeros(2)}], r"no 'predictions'.*got \['prediction'\]. Did you mean 'prediction'"),
        ([{}], "nothing to write"),
        ([{"predictions": torch.zeros(2), "targets": torch.zeros(3)}], r"got {'prediction': 2, 'target': 3}"),
        (
            [{"predictions": torch.zeros(2, 1)}, {"predictions": torch.zeros(2, 2)}],
            r"the first has \['prediction/0'\], a later one \['prediction/0', 'prediction/1'\]",
        ),
    ],
)
def test_what_cannot_be_laid_out_in_columns_is_an_error(batches: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        saved(tmp_path / "a.csv", batches)
    assert list(tmp_path.iterdir()) == []

"""SavePredictions, ConfusionMatrix, SampleImages: files are read back, counts compared, pictures looked at by pixel."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import numpy
import PIL.Image
import pyarrow.parquet
import pytest
import torch
from sklearn.metrics import confusion_matrix
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza import Callback, Figure, Image, Run, on, supervised
from cadenza.callbacks import Checkpoint, ConfusionMatrix, Evaluate, SampleImages, SavePredictions
from cadenza.drivers import SingleDriver
from cadenza.errors import DataError
from cadenza.records.record import Media, Record
from cadenza.sinks import TensorBoard
from cadenza.testing import Recorder, simulate, tiny_loader, tiny_run, tiny_trainer

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
    columns = {"prediction": lambda batch, outputs: outputs["predictions"].argmax(-1)}
    rows = saved(tmp_path / "valid.csv", batches, columns=columns)
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
    kinds = {"sample": "int64", "prediction/0": "float", "prediction/1": "float", "target": "int64", "id": "string"}
    assert {field.name: str(field.type) for field in table.schema} == kinds
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
    assert "it waits for the evaluation 'evall', and there is 'eval'. Did you mean 'eval'?" in caplog.text
    assert list(tmp_path.iterdir()) == []
    trainer.evaluate(tiny_loader(1), name="test")
    assert len(read(tmp_path / "a.csv")) == 2
    save = SavePredictions(tmp_path / "each" / "{epoch}-{step:03}.csv", evaluation="eval")
    tiny_run(callbacks=[Evaluate(tiny_loader(1)), save], compute_loss=MSE, epochs=2)
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == ["1-005.csv", "2-010.csv"]


class TwoRanks(SingleDriver):
    """A driver with another rank that has the same."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def reduce(self, value: Tensor, how: Any = "mean") -> Tensor:
        return value if how == "max" else 2 * value


def test_the_batches_of_all_ranks_are_written_in_turn(tmp_path: Path) -> None:
    batches = [{"predictions": [1, 2]}, {"predictions": [3]}]
    save = SavePredictions(tmp_path / "a.csv", evaluation="eval")
    tiny_trainer(callbacks=[save], driver=TwoRanks("cpu")).evaluate(batches, compute=as_it_is)
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


def broken_after(batches: Any) -> Iterator[Any]:
    yield from batches
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
        do(broken_after(tiny_loader(2)), **arguments)
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


# -- ConfusionMatrix ----------------------------------------------------------------------------------


def classes_of(*pairs: tuple[int, int]) -> dict[str, Tensor]:
    """Return a batch of (target, prediction)."""
    targets, predictions = (torch.tensor(part) for part in zip(*pairs, strict=True))
    return {"targets": targets, "predictions": predictions}


def judge(matrix: ConfusionMatrix, *batches: dict[str, Tensor], **arguments: Any) -> Any:
    tiny_trainer(callbacks=[matrix], **arguments).evaluate(list(batches), compute=as_it_is)
    return None if matrix.counts is None else matrix.counts.tolist()


@pytest.mark.parametrize("more", [(), (4, 5)])
def test_counts_are_those_of_scikit_learn(more: tuple[int, ...]) -> None:
    matrix = ConfusionMatrix()
    batches = [{"predictions": torch.randn(8, 4, *more), "targets": torch.randint(4, (8, *more))} for _ in range(5)]
    judge(matrix, *batches)
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    predictions = torch.cat([batch["predictions"].argmax(1).flatten() for batch in batches])
    assert matrix.counts is not None
    assert matrix.counts.dtype == torch.int64
    assert (matrix.counts.numpy() == confusion_matrix(targets, predictions, labels=range(4))).all()


@pytest.mark.parametrize(
    ("pairs", "arguments", "driver", "counts"),
    [
        ([(0, 2), (0, 2), (1, 0)], {"classes": 3}, None, [[0, 0, 2], [1, 0, 0], [0, 0, 0]]),
        ([(0, 0), (-100, 1), (1, 0)], {"classes": 2, "ignore_index": -100}, None, [[1, 0], [1, 0]]),
        ([(0, 1)], {"classes": 2}, TwoRanks("cpu"), [[0, 2], [0, 0]]),
    ],
    ids=["as they came", "ignored", "of all ranks"],
)
def test_rows_are_targets_and_columns_predictions(pairs: Any, arguments: Any, driver: Any, counts: list[list[int]]) -> None:
    driven = {} if driver is None else {"driver": driver}
    assert judge(ConfusionMatrix(**arguments), classes_of(*pairs), **driven) == counts


def test_each_evaluation_is_counted_anew_and_several_have_a_matrix_each() -> None:
    matrix, other = ConfusionMatrix(classes=2), ConfusionMatrix(classes=2, evaluation="test")
    assert judge(matrix, classes_of((0, 0))) == [[1, 0], [0, 0]]
    assert judge(matrix, classes_of((1, 1))) == [[0, 0], [0, 1]]
    simulate([matrix], metrics={"eval/acc": [0.5]})  # a script without batches
    assert matrix.counts is None
    first = Evaluate([classes_of((0, 0))], compute=as_it_is)
    second = Evaluate([classes_of((1, 1))], compute=as_it_is, name="test")
    tiny_run(callbacks=[first, second, matrix, other])
    counts = [one.counts.tolist() for one in (matrix, other) if one.counts is not None]
    assert counts == [[[1, 0], [0, 0]], [[0, 0], [0, 1]]]


def test_an_evaluation_that_fails_leaves_no_counts_and_is_the_only_error() -> None:
    matrix = ConfusionMatrix(classes=2)
    judge(matrix, classes_of((0, 0)))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        tiny_trainer(callbacks=[matrix]).evaluate(broken_after([classes_of((0, 0))]), compute=as_it_is)
    assert [note.partition(":")[0] for note in caught.value.__notes__] == ["context"], "no second error is attached"
    assert matrix.counts is None
    with pytest.raises(RuntimeError, match="no evaluation 'eval' is complete"):
        matrix.figure()


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        (None, ["3", "1", "0", "0"]),
        ("true", ["0.75", "0.25", "0.00", "0.00"]),  # a class that never came is no division by zero
        ("pred", ["1.00", "1.00", "0.00", "0.00"]),
        ("all", ["0.75", "0.25", "0.00", "0.00"]),
    ],
)
def test_the_cells_show_counts_or_fractions(normalize: Any, expected: list[str]) -> None:
    matrix = ConfusionMatrix(classes=2, normalize=normalize)
    judge(matrix, classes_of((0, 0), (0, 0), (0, 0), (0, 1)))
    assert [text.get_text() for text in matrix.figure().axes[0].texts] == expected


def test_the_axes_have_the_labels_and_with_many_classes_there_is_a_picture_without_numbers() -> None:
    labels = ["cat", r"$\wrong$"]  # would be no formula
    matrix = ConfusionMatrix(labels)
    judge(matrix, classes_of((0, 0)))
    figure = matrix.figure()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert pixels(figure).std() > 0
    matrix = ConfusionMatrix(classes=60)
    judge(matrix, classes_of((59, 59)))
    figure = matrix.figure()
    assert [*figure.axes[0].texts] == []
    assert pixels(figure).std() > 0


def pixels(figure: Any) -> Any:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return numpy.asarray(PIL.Image.open(buffer).convert("RGB")).astype(int)


def drawn_in(directory: Path, name: str) -> Any:
    """Return the pixels of the first image of this name that TensorBoard has."""
    event = EventAccumulator(str(directory)).Reload().Images(name)[0]
    return numpy.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))


def test_drawn_the_larger_count_is_the_darker_cell() -> None:
    matrix = ConfusionMatrix(classes=2)
    judge(matrix, classes_of((0, 0), (0, 0), (0, 0), (1, 0), (1, 1), (1, 1)))
    figure = matrix.figure()
    drawn = pixels(figure)

    def darkness(cell: tuple[int, int]) -> int:
        x, y = figure.axes[0].transData.transform((cell[1] - 0.4, cell[0] - 0.4))  # off the number in the middle
        return -int(drawn[len(drawn) - 1 - round(y), round(x)].sum())

    by_darkness = sorted([(0, 0), (0, 1), (1, 0), (1, 1)], key=darkness)
    assert by_darkness == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_in_a_fit_a_figure_is_logged_for_each_evaluation_and_none_is_kept(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    before = matplotlib.pyplot.get_fignums()

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        seen.extend((record.step, name) for name, value in record.media.items() if isinstance(value, Figure))

    matrix = ConfusionMatrix(classes=2, log="mixed up")
    evaluate = Evaluate([classes_of((0, 0), (1, 0))], compute=as_it_is)
    tiny_run(callbacks=[evaluate, matrix, TensorBoard(tmp_path), look], epochs=2)
    assert seen == [(5, "eval/mixed up"), (10, "eval/mixed up")]
    events = EventAccumulator(str(tmp_path)).Reload().Images("eval/mixed up")
    assert [event.step for event in events] == [5, 10]
    assert drawn_in(tmp_path, "eval/mixed up").std() > 10
    assert matplotlib.pyplot.get_fignums() == before


@pytest.mark.parametrize("pair", [(2, 0), (0, 2), (-1, 0)])
def test_a_class_out_of_range_is_an_error(pair: tuple[int, int]) -> None:
    matrix = ConfusionMatrix(classes=2)
    with pytest.raises(DataError, match="1 sample of 'eval' has a class out of range: expected 0 to 1"):
        judge(matrix, classes_of((0, 0), pair))
    assert matrix.counts is None


@pytest.mark.parametrize(
    ("predictions", "targets"),
    [
        (torch.rand(4), torch.zeros(4, dtype=torch.int64)),  # probabilities: where is the line?
        (torch.rand(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.rand(4, 3), torch.rand(4, 3)),
        (torch.rand(4, 3, 2), torch.zeros(4, 3, dtype=torch.int64)),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_shapes_that_do_not_fit_are_errors_and_no_guess(predictions: Tensor, targets: Tensor) -> None:
    with pytest.raises(DataError, match=r"expects predictions of shape \(N, C, \.\.\.\).*Return such from compute"):
        judge(ConfusionMatrix(classes=3), {"predictions": predictions, "targets": targets})


def test_the_number_of_classes_must_be_known() -> None:
    with pytest.raises(DataError, match=r"do not say how many classes there are\. Give ConfusionMatrix\(classes"):
        judge(ConfusionMatrix(), classes_of((0, 0)))
    batches = [{"predictions": torch.rand(1, count), "targets": torch.tensor([0])} for count in (2, 3)]
    with pytest.raises(DataError, match="differ in their number of classes"):
        judge(ConfusionMatrix(), *batches)
    with pytest.raises(DataError, match=r"needs tensors 'predictions' and 'targets'.*got NoneType and NoneType"):
        judge(ConfusionMatrix(), {"loss": torch.tensor(1.0)})


# -- SampleImages -------------------------------------------------------------------------------------


def logged(*callbacks: Callback, batches: list[Any], **arguments: Any) -> dict[tuple[int, str], Media]:
    media: dict[tuple[int, str], Media] = {}

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        media.update({(record.step, name): value for name, value in record.media.items()})

    loss = lambda model, batch: model(torch.ones(1, 1)).mean()  # noqa: E731  # shorter to read
    tiny_run(callbacks=[*callbacks, look], loader=batches, compute_loss=loss, **arguments)
    return media


def grid_of(batch: Any, **arguments: Any) -> Tensor:
    [picture] = logged(SampleImages(**arguments), batches=[batch]).values()
    assert isinstance(picture, Image)
    return picture.pixels


def shown(batch: Any, **arguments: Any) -> Tensor:
    """Return the only image of a batch as it is shown, without the gap around it."""
    return grid_of(batch, **arguments)[:, 2:-2, 2:-2]


def test_images_are_in_rows_with_a_gap_between_them() -> None:
    images = torch.arange(1, 6, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 1, 2, 3)
    grid = grid_of(images)[0] * 255
    assert grid.shape == (2 + 2 * (2 + 2), 2 + 3 * (3 + 2))
    assert grid[2:4, 2:5].unique().tolist() == [1]
    assert grid[2:4, 7:10].unique().tolist() == [2]
    assert grid[2:4, 12:15].unique().tolist() == [3]
    assert grid[6:8, 2:5].unique().tolist() == [4]
    assert grid[6:8, 7:10].unique().tolist() == [5]
    assert int(grid.sum()) == (1 + 2 + 3 + 4 + 5) * 6  # the rest is black


@pytest.mark.parametrize(("count", "batch", "expected"), [(1, 4, (3, 8, 8)), (4, 9, (3, 14, 14)), (16, 3, (3, 14, 14))])
def test_at_most_so_many_are_shown(count: int, batch: int, expected: tuple[int, ...]) -> None:
    assert grid_of(torch.rand(batch, 3, 4, 4), count=count).shape == expected


def test_without_mean_and_std_each_image_goes_from_black_to_white_and_whole_numbers_stay_as_they_are() -> None:
    grid = grid_of(torch.tensor([[[[-1.0, 0.0, 1.0]]], [[[10.0, 15.0, 20.0]]]]))
    assert grid[0, 2].tolist() == [0, 0, 0, 0.5, 1, 0, 0, 0, 0.5, 1, 0, 0]
    assert shown(torch.full((1, 1, 1, 2), 7.0))[0].tolist() == [[0, 0]]  # an image of one colour is black
    assert shown(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))[0].tolist() == [[0.0, pytest.approx(0.2), 1.0]]


def test_with_mean_and_std_the_normalisation_is_undone() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
    pixels = torch.rand(1, 3, 2, 2)
    normalized = (pixels - torch.tensor(mean).reshape(3, 1, 1)) / torch.tensor(std).reshape(3, 1, 1)
    assert torch.allclose(shown(normalized, mean=mean, std=std), pixels[0], atol=1e-6)
    assert shown(torch.tensor([[[[-9.0, 0.0, 9.0]]]]), mean=0.5, std=0.5)[0].tolist() == [[0.0, 0.5, 1.0]]


def test_what_is_not_finite_is_black_and_changes_nothing_else() -> None:
    image = torch.tensor([[[[math.nan, math.inf, -math.inf, 2.0, 4.0]]]])
    assert shown(image)[0].tolist() == [[0, 0, 0, 0, 1]]
    assert shown(image, mean=0, std=0.25)[0].tolist() == [[0, 0, 0, 0.5, 1]]
    assert shown(torch.full((1, 1, 1, 2), math.nan))[0].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(1, 1, 4, 4),
        (torch.ones(1, 9), torch.ones(1, 1, 4, 4)),
        {"sequence": torch.ones(1, 6, 7), "pixels": torch.ones(1, 1, 4, 4), "target": torch.ones(1)},
        [torch.ones(1, 7, 3, 3), [torch.ones(1, 4, 4)]],
    ],
)
def test_the_images_of_a_batch_are_found(batch: Any) -> None:
    assert grid_of(batch).shape == (1, 8, 8)


def test_a_function_says_where_they_are() -> None:
    def second(batch: Any, outputs: Mapping[str, Any]) -> Any:
        assert "loss" in outputs
        return batch[1]

    assert grid_of((torch.ones(1, 3, 9, 9), torch.ones(1, 1, 4, 4)), images=second).shape == (1, 8, 8)


def test_what_does_not_fit_is_an_error_that_names_its_shapes() -> None:
    with pytest.raises(DataError, match=r"no images in the batch.*got \[\(2, 5\), \(2,\)\]. Give SampleImages\(images="):
        grid_of((torch.ones(2, 5), torch.ones(2)))
    for wrong, came in ((torch.ones(2, 7, 3, 3), r"shape \(2, 7, 3, 3\)"), ([1], "'list'"), (torch.ones(0, 3, 3), "shape")):
        with pytest.raises(DataError, match=f"images must be a tensor of shape .* got {came}"):
            grid_of(torch.ones(2), images=lambda batch, outputs, wrong=wrong: wrong)
    with pytest.raises(DataError, match="must have one number, or 1, one per channel; got 2 and 2"):
        grid_of(torch.ones(1, 1, 2, 2), mean=(0.5, 0.5), std=(0.1, 0.1))
    with pytest.raises(DataError, match="a text for each of 2 images; got 1"):
        grid_of(torch.ones(2, 1, 1, 1), titles=lambda batch, outputs: ["one"])


def test_training_batches_are_shown_at_the_cadence_or_once_an_epoch() -> None:
    batches = [torch.full((1, 1, 1, 1), value, dtype=torch.uint8) for value in (10, 20, 30, 40)]
    media = logged(SampleImages(every="2 steps"), batches=batches)
    assert list(media) == [(2, "train/images"), (4, "train/images")]
    assert [int(one.pixels.max() * 255) for one in media.values() if isinstance(one, Image)] == [20, 40]
    assert list(logged(SampleImages(), batches=batches, epochs=2)) == [(4, "train/images"), (8, "train/images")]


def test_of_an_evaluation_the_first_batch_is_shown_and_of_the_training_if_it_is_wanted() -> None:
    judged = [torch.full((1, 1, 1, 1), value, dtype=torch.uint8) for value in (7, 8)]
    evaluate = Evaluate(judged, compute=lambda model, batch: {"loss": batch.float().mean()})
    media = logged(evaluate, SampleImages(evaluation="eval", log="seen"), batches=[torch.ones(1)] * 2)
    assert list(media) == [(2, "eval/seen")]
    [picture] = media.values()
    assert isinstance(picture, Image)
    assert int(picture.pixels.max() * 255) == 7
    both = logged(evaluate, SampleImages(every="1 epoch", evaluation="eval"), batches=[torch.ones(1, 1, 1, 1)])
    assert list(both) == [(1, "train/images"), (1, "eval/images")]


def test_an_evaluation_that_fails_at_its_second_batch_is_shown_once() -> None:
    asked = []

    def images(batch: Any, outputs: Mapping[str, Any]) -> Tensor:
        asked.append(1)
        return torch.ones(1, 1, 1, 1)

    def compute(model: nn.Module, batch: int) -> dict[str, Any]:
        return {"predictions": [1 // batch]}

    with pytest.raises(ZeroDivisionError):
        tiny_trainer(callbacks=[SampleImages(evaluation="eval", images=images)]).evaluate([1, 0], compute=compute)
    assert len(asked) == 1


def test_with_titles_it_is_a_figure_and_nothing_is_left_behind(tmp_path: Path) -> None:
    before = matplotlib.pyplot.get_fignums()
    batch = (torch.rand(3, 3, 8, 8), torch.tensor([4, 5, 6]))
    pictures = SampleImages(2, titles=lambda batch, outputs: [f"class {int(value)}" for value in batch[1]])
    [picture] = logged(pictures, TensorBoard(tmp_path), batches=[batch]).values()
    assert isinstance(picture, Figure)
    assert [axes.get_title() for axes in picture.figure.axes] == ["class 4", "class 5"]
    assert drawn_in(tmp_path, "train/images").std() > 10
    assert matplotlib.pyplot.get_fignums() == before


def test_grey_images_are_drawn_grey_and_by_their_own_brightness() -> None:
    batch = torch.tensor([[[[0, 128]]]], dtype=torch.uint8)
    titles = [r"$\wrong$"]  # would be no formula
    [picture] = logged(SampleImages(titles=lambda batch, outputs: titles), batches=[batch]).values()
    assert isinstance(picture, Figure)
    colours = {tuple(colour) for colour in pixels(picture.figure).reshape(-1, 3).tolist()}
    assert {(0, 0, 0), (128, 128, 128)} <= colours


def test_an_image_comes_back_from_tensorboard_pixel_by_pixel(tmp_path: Path) -> None:
    batch = torch.randint(256, (1, 3, 5, 6), dtype=torch.uint8)
    logged(SampleImages(), TensorBoard(tmp_path), batches=[batch])
    assert (drawn_in(tmp_path, "train/images")[2:-2, 2:-2] == batch[0].permute(1, 2, 0).numpy()).all()

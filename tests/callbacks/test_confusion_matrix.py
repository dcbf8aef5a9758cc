"""ConfusionMatrix: counts beside those counted one by one, and a figure that is really drawn."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.pyplot
import numpy
import PIL.Image
import pytest
import torch
from sklearn.metrics import confusion_matrix
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza import Callback, Figure, Run, on
from cadenza.callbacks import ConfusionMatrix, Evaluate
from cadenza.drivers import SingleDriver
from cadenza.errors import DataError, MissingExtraError
from cadenza.records.record import Record
from cadenza.sinks import TensorBoard
from cadenza.testing import simulate, tiny_run, tiny_trainer

Batch = dict[str, Tensor]


def as_it_is(model: nn.Module, batch: Any) -> Any:
    return batch


def classes_of(*pairs: tuple[int, int]) -> Batch:
    """Return a batch of (target, prediction)."""
    targets, predictions = (torch.tensor(part) for part in zip(*pairs, strict=True))
    return {"targets": targets, "predictions": predictions}


def judge(matrix: ConfusionMatrix, *batches: Batch, **arguments: Any) -> Any:
    tiny_trainer(callbacks=[matrix], **arguments).evaluate(list(batches), compute=as_it_is)
    return None if matrix.counts is None else matrix.counts.tolist()


def noisy(batches: int, classes: int, *more: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "predictions": torch.randn(8, classes, *more, generator=generator),
            "targets": torch.randint(classes, (8, *more), generator=generator),
        }
        for _ in range(batches)
    ]


# -- counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), (4, 5)])
def test_counts_are_those_of_scikit_learn(more: tuple[int, ...]) -> None:
    batches, matrix = noisy(5, 4, *more), ConfusionMatrix()
    judge(matrix, *batches)
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    predictions = torch.cat([batch["predictions"].argmax(1).flatten() for batch in batches])
    assert matrix.counts is not None
    assert matrix.counts.dtype == torch.int64
    assert (matrix.counts.numpy() == confusion_matrix(targets, predictions, labels=range(4))).all()


def test_rows_are_targets_and_columns_predictions() -> None:
    assert judge(ConfusionMatrix(classes=3), classes_of((0, 2), (0, 2), (1, 0))) == [[0, 0, 2], [1, 0, 0], [0, 0, 0]]


def test_ignored_targets_do_not_count() -> None:
    matrix = ConfusionMatrix(classes=2, ignore_index=-100)
    assert judge(matrix, classes_of((0, 0), (-100, 1), (1, 0))) == [[1, 0], [1, 0]]


def test_each_evaluation_is_counted_anew() -> None:
    matrix = ConfusionMatrix(classes=2)
    assert judge(matrix, classes_of((0, 0))) == [[1, 0], [0, 0]]
    assert judge(matrix, classes_of((1, 1))) == [[0, 0], [0, 1]]


def test_the_counts_of_all_ranks_are_added() -> None:
    class TwoRanks(SingleDriver):
        def reduce(self, value: Tensor, how: Any = "mean") -> Tensor:
            assert how == "sum"
            return 2 * value

    assert judge(ConfusionMatrix(classes=2), classes_of((0, 1)), driver=TwoRanks("cpu")) == [[0, 2], [0, 0]]


def test_an_evaluation_that_fails_leaves_no_counts_and_is_the_only_error() -> None:
    def failing() -> Any:
        yield classes_of((0, 0))
        raise OSError("the disk is gone")

    matrix = ConfusionMatrix(classes=2)
    judge(matrix, classes_of((0, 0)))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        tiny_trainer(callbacks=[matrix]).evaluate(failing(), compute=as_it_is)
    assert [note.partition(":")[0] for note in caught.value.__notes__] == ["context"], "no second error is attached"
    assert matrix.counts is None
    with pytest.raises(RuntimeError, match="no evaluation 'eval' is complete"):
        matrix.figure()


def test_a_script_without_batches_counts_nothing() -> None:
    matrix = ConfusionMatrix(classes=2)
    simulate([matrix], metrics={"eval/acc": [0.5]})
    assert matrix.counts is None


# -- figures ------------------------------------------------------------------------------------------


def cells(matrix: ConfusionMatrix) -> list[str]:
    return [text.get_text() for text in matrix.figure().axes[0].texts]


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
    assert cells(matrix) == expected


def test_the_axes_have_the_labels() -> None:
    labels = ["cat", r"$\wrong$"]  # would be no formula
    matrix = ConfusionMatrix(labels)
    judge(matrix, classes_of((0, 0)))
    figure = matrix.figure()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert pixels(figure).std() > 0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")


def pixels(figure: Any) -> Any:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return numpy.asarray(PIL.Image.open(buffer).convert("RGB")).astype(int)


def test_drawn_the_larger_count_is_the_darker_cell() -> None:
    matrix = ConfusionMatrix(classes=2)
    judge(matrix, classes_of((0, 0), (0, 0), (0, 0), (1, 0), (1, 1), (1, 1)))
    figure = matrix.figure()
    drawn = pixels(figure)
    axes = figure.axes[0]
    height = len(drawn)

    def darkness(row: int, column: int) -> int:
        x, y = axes.transData.transform((column - 0.4, row - 0.4))  # off the number in the middle
        return -int(drawn[height - 1 - round(y), round(x)].sum())

    by_darkness = sorted([(0, 0), (0, 1), (1, 0), (1, 1)], key=lambda cell: darkness(*cell))
    assert by_darkness == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_with_many_classes_there_is_a_picture_without_numbers() -> None:
    matrix = ConfusionMatrix(classes=60)
    judge(matrix, classes_of((59, 59)))
    assert cells(matrix) == []
    assert pixels(matrix.figure()).std() > 0


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
    assert numpy.asarray(PIL.Image.open(io.BytesIO(events[0].encoded_image_string))).std() > 10
    assert matplotlib.pyplot.get_fignums() == before


def test_several_evaluations_have_a_matrix_each() -> None:
    one, other = ConfusionMatrix(classes=2), ConfusionMatrix(classes=2, evaluation="test")
    tiny_run(
        callbacks=[
            Evaluate([classes_of((0, 0))], compute=as_it_is),
            Evaluate([classes_of((1, 1))], compute=as_it_is, name="test"),
            one,
            other,
        ]
    )
    assert one.counts is not None
    assert other.counts is not None
    assert (one.counts.tolist(), other.counts.tolist()) == ([[1, 0], [0, 0]], [[0, 0], [0, 1]])


# -- errors -------------------------------------------------------------------------------------------


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


def test_outputs_without_predictions_are_an_error() -> None:
    with pytest.raises(DataError, match=r"needs tensors 'predictions' and 'targets'.*got NoneType and NoneType"):
        judge(ConfusionMatrix(), {"loss": torch.tensor(1.0)})


def test_wrong_arguments_are_errors_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="got the text 'ab'"):
        ConfusionMatrix("ab")
    with pytest.raises(ValueError, match="normalize must be None or one of 'true', 'pred', 'all'; got 'rows'"):
        ConfusionMatrix(normalize="rows")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="got 2 for classes=3"):
        ConfusionMatrix(["a", "b"], classes=3)
    with pytest.raises(ValueError, match="the number of classes must be None or a whole number of at least 2; got 1"):
        ConfusionMatrix(["a"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'matplotlib'.*pip install 'cadenza\[figures\]'"):
        ConfusionMatrix()

"""ConfusionMatrix: counts beside those of scikit-learn, drawn. SampleImages: pictures looked at pixel by pixel."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
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

from cadenza import Callback, Figure, Image, Run, on
from cadenza.callbacks import ConfusionMatrix, Evaluate, SampleImages
from cadenza.drivers import SingleDriver
from cadenza.errors import DataError
from cadenza.records.record import Media, Record
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


@pytest.mark.parametrize("more", [(), (4, 5)])
def test_counts_are_those_of_scikit_learn(more: tuple[int, ...]) -> None:
    batches, matrix = noisy(5, 4, *more), ConfusionMatrix()
    judge(matrix, *batches)
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    predictions = torch.cat([batch["predictions"].argmax(1).flatten() for batch in batches])
    assert matrix.counts is not None
    assert matrix.counts.dtype == torch.int64
    assert (matrix.counts.numpy() == confusion_matrix(targets, predictions, labels=range(4))).all()


class TwoRanks(SingleDriver):
    def reduce(self, value: Tensor, how: Any = "mean") -> Tensor:
        assert how == "sum"
        return 2 * value


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


def test_each_evaluation_is_counted_anew() -> None:
    matrix = ConfusionMatrix(classes=2)
    assert judge(matrix, classes_of((0, 0))) == [[1, 0], [0, 0]]
    assert judge(matrix, classes_of((1, 1))) == [[0, 0], [0, 1]]
    simulate([matrix], metrics={"eval/acc": [0.5]})  # a script without batches
    assert matrix.counts is None


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


def drawn_in(directory: Path, name: str) -> Any:
    """Return the pixels of the first image of this name that TensorBoard has."""
    event = EventAccumulator(str(directory)).Reload().Images(name)[0]
    return numpy.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))


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
    figure = matrix.figure()
    assert [*figure.axes[0].texts] == []
    assert pixels(figure).std() > 0


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


def test_several_evaluations_have_a_matrix_each() -> None:
    one, other = ConfusionMatrix(classes=2), ConfusionMatrix(classes=2, evaluation="test")
    first = Evaluate([classes_of((0, 0))], compute=as_it_is)
    second = Evaluate([classes_of((1, 1))], compute=as_it_is, name="test")
    tiny_run(callbacks=[first, second, one, other])
    assert one.counts is not None
    assert other.counts is not None
    assert (one.counts.tolist(), other.counts.tolist()) == ([[1, 0], [0, 0]], [[0, 0], [0, 1]])


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


# -- SampleImages ----------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(torch.ones(1, 1)).mean()
    return loss


def logged(*callbacks: Callback, batches: list[Any], **arguments: Any) -> dict[tuple[int, str], Media]:
    media: dict[tuple[int, str], Media] = {}

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        media.update({(record.step, name): value for name, value in record.media.items()})

    tiny_run(callbacks=[*callbacks, look], loader=batches, compute_loss=loss_of, **arguments)
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
    def second(batch: Any, outputs: Mapping[str, Any]) -> Tensor:
        assert "loss" in outputs
        images: Tensor = batch[1]
        return images

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
    evaluate = Evaluate(judged, compute=loss_named)
    media = logged(evaluate, SampleImages(evaluation="eval", log="seen"), batches=[torch.ones(1)] * 2)
    assert list(media) == [(2, "eval/seen")]
    [picture] = media.values()
    assert isinstance(picture, Image)
    assert int(picture.pixels.max() * 255) == 7
    both = logged(evaluate, SampleImages(every="1 epoch", evaluation="eval"), batches=[torch.ones(1, 1, 1, 1)])
    assert list(both) == [(1, "eval/images"), (1, "train/images")]


def loss_named(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": batch.float().mean()}


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

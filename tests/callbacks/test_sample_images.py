"""SampleImages: pictures looked at pixel by pixel."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import numpy
import PIL.Image
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza import Callback, Figure, Image, Run, on
from cadenza.callbacks import Evaluate, SampleImages
from cadenza.errors import DataError, MissingExtraError, ScheduleError
from cadenza.hooks.subscription import Subscription
from cadenza.records.record import Media, Record
from cadenza.sinks import TensorBoard
from cadenza.testing import tiny_run, tiny_trainer


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(torch.ones(1, 1)).mean()
    return loss


def looking(into: dict[tuple[int, str], Media]) -> Subscription:
    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        into.update({(record.step, name): value for name, value in record.media.items()})

    return look


def logged(*callbacks: Callback, batches: list[Any], **arguments: Any) -> dict[tuple[int, str], Media]:
    media: dict[tuple[int, str], Media] = {}
    tiny_run(callbacks=[*callbacks, looking(media)], loader=batches, compute_loss=loss_of, **arguments)
    return media


def grid_of(batch: Any, **arguments: Any) -> Tensor:
    [picture] = logged(SampleImages(**arguments), batches=[batch]).values()
    assert isinstance(picture, Image)
    return picture.pixels


def shown(batch: Any, **arguments: Any) -> Tensor:
    """Return the only image of a batch as it is shown, without the gap around it."""
    return grid_of(batch, **arguments)[:, 2:-2, 2:-2]


# -- the grid -----------------------------------------------------------------------------------------


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


# -- brightness ---------------------------------------------------------------------------------------


def test_whole_numbers_stay_as_they_are() -> None:
    assert shown(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))[0].tolist() == [[0.0, pytest.approx(0.2), 1.0]]


def test_without_mean_and_std_each_image_goes_from_black_to_white() -> None:
    grid = grid_of(torch.tensor([[[[-1.0, 0.0, 1.0]]], [[[10.0, 15.0, 20.0]]]]))
    assert grid[0, 2].tolist() == [0, 0, 0, 0.5, 1, 0, 0, 0, 0.5, 1, 0, 0]


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


def test_an_image_of_one_colour_is_black() -> None:
    assert shown(torch.full((1, 1, 1, 2), 7.0))[0].tolist() == [[0, 0]]


# -- finding ------------------------------------------------------------------------------------------


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


def test_a_batch_without_images_is_an_error_that_names_its_shapes() -> None:
    with pytest.raises(DataError, match=r"no images in the batch.*got \[\(2, 5\), \(2,\)\]. Give SampleImages\(images="):
        grid_of((torch.ones(2, 5), torch.ones(2)))
    for wrong, came in ((torch.ones(2, 7, 3, 3), r"shape \(2, 7, 3, 3\)"), ([1], "'list'"), (torch.ones(0, 3, 3), "shape")):
        with pytest.raises(DataError, match=f"images must be a tensor of shape .* got {came}"):
            grid_of(torch.ones(2), images=lambda batch, outputs, wrong=wrong: wrong)


# -- when ---------------------------------------------------------------------------------------------


def test_training_batches_are_shown_at_the_cadence_and_with_the_weights_steps() -> None:
    batches = [torch.full((1, 1, 1, 1), value, dtype=torch.uint8) for value in (10, 20, 30, 40)]
    media = logged(SampleImages(every="2 steps"), batches=batches)
    assert list(media) == [(2, "train/images"), (4, "train/images")]
    assert [int(one.pixels.max() * 255) for one in media.values() if isinstance(one, Image)] == [20, 40]


def test_by_default_training_batches_are_shown_once_an_epoch() -> None:
    assert list(logged(SampleImages(), batches=[torch.ones(1, 1, 1, 1)] * 3, epochs=2)) == [
        (3, "train/images"),
        (6, "train/images"),
    ]


def test_of_an_evaluation_the_first_batch_is_shown() -> None:
    judged = [torch.full((1, 1, 1, 1), value, dtype=torch.uint8) for value in (7, 8)]
    evaluate = Evaluate(judged, compute=loss_named)
    media = logged(evaluate, SampleImages(evaluation="eval", log="seen"), batches=[torch.ones(1)] * 2)
    assert list(media) == [(2, "eval/seen")]
    [picture] = media.values()
    assert isinstance(picture, Image)
    assert int(picture.pixels.max() * 255) == 7


def loss_named(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": batch.float().mean()}


def test_both_can_be_shown() -> None:
    callbacks = [Evaluate([torch.ones(1, 1, 1, 1)], compute=loss_named), SampleImages(every="1 epoch", evaluation="eval")]
    assert list(logged(*callbacks, batches=[torch.ones(1, 1, 1, 1)])) == [(1, "eval/images"), (1, "train/images")]


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


# -- titles -------------------------------------------------------------------------------------------


def test_with_titles_it_is_a_figure_and_nothing_is_left_behind(tmp_path: Path) -> None:
    before = matplotlib.pyplot.get_fignums()
    batch = (torch.rand(3, 3, 8, 8), torch.tensor([4, 5, 6]))
    pictures = SampleImages(2, titles=lambda batch, outputs: [f"class {int(value)}" for value in batch[1]])
    [picture] = logged(pictures, TensorBoard(tmp_path), batches=[batch]).values()
    assert isinstance(picture, Figure)
    assert [axes.get_title() for axes in picture.figure.axes] == ["class 4", "class 5"]
    drawn = PIL.Image.open(io.BytesIO(EventAccumulator(str(tmp_path)).Reload().Images("train/images")[0].encoded_image_string))
    assert numpy.asarray(drawn).std() > 10
    assert matplotlib.pyplot.get_fignums() == before


def test_grey_images_are_drawn_grey_and_by_their_own_brightness() -> None:
    batch = torch.tensor([[[[0, 128]]]], dtype=torch.uint8)
    titles = [r"$\wrong$"]  # would be no formula
    [picture] = logged(SampleImages(titles=lambda batch, outputs: titles), batches=[batch]).values()
    assert isinstance(picture, Figure)
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png")
    colours = {colour for _, colour in PIL.Image.open(buffer).convert("RGB").getcolors() or []}
    assert {(0, 0, 0), (128, 128, 128)} <= colours


def test_too_few_titles_are_an_error() -> None:
    with pytest.raises(DataError, match="a text for each of 2 images; got 1"):
        grid_of(torch.ones(2, 1, 1, 1), titles=lambda batch, outputs: ["one"])


def test_an_image_comes_back_from_tensorboard_pixel_by_pixel(tmp_path: Path) -> None:
    batch = torch.randint(256, (1, 3, 5, 6), dtype=torch.uint8)
    logged(SampleImages(), TensorBoard(tmp_path), batches=[batch])
    [event] = EventAccumulator(str(tmp_path)).Reload().Images("train/images")
    pixels = numpy.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
    assert (pixels[2:-2, 2:-2] == batch[0].permute(1, 2, 0).numpy()).all()


# -- errors -------------------------------------------------------------------------------------------


def test_wrong_arguments_are_errors_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="count must be a whole number of at least 1; got 0"):
        SampleImages(0)
    with pytest.raises(ScheduleError):
        SampleImages(every="2 stps")
    with pytest.raises(ValueError, match=r"expected both mean and std, or none; got mean=0\.5 and std=None"):
        SampleImages(mean=0.5)
    with pytest.raises(TypeError, match=r"images must be a function \(batch, outputs\), or None; got 0"):
        SampleImages(images=0)  # type: ignore[arg-type]  # wrong on purpose
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    SampleImages()
    with pytest.raises(MissingExtraError, match=r"needs the package 'matplotlib'.*pip install 'cadenza\[figures\]'"):
        SampleImages(titles=lambda batch, outputs: [])


def test_a_mean_for_another_number_of_channels_is_an_error() -> None:
    with pytest.raises(DataError, match="must have one number, or 1, one per channel; got 2 and 2"):
        grid_of(torch.ones(1, 1, 2, 2), mean=(0.5, 0.5), std=(0.1, 0.1))

"""Log images of the batches as the model gets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.errors import DataError, MissingExtraError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic
from cadenza.loading.batches import tensors_in
from cadenza.records.record import Figure, Image, Media
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_GAP = 2  # pixels between two images
_CHANNELS = (1, 3, 4)


class SampleImages(Callback):
    """Log the first images of a batch as one picture: of training batches at an interval, or of the first evaluation batch.

    The images are those that the model gets. Images of uint8 do not change. Others are mapped to 0..1. With `mean` and `std`,
    the mapping is ``image * std + mean``, clamped to 0 and 1, which undoes the usual normalization. Without them, each image
    is scaled by its own minimum and maximum, so that the picture does not have the contrast of the data. Values that are not
    finite are black.

    With multiple ranks: the main process shows images of its own batches; it does not communicate.

    Args:
        count: The largest number of images in one picture.
        every: The interval for training batches. None: ``"1 epoch"``, or no training batches if `evaluation` is given.
        evaluation: The name of an evaluation, to log its first batch each time.
        images: ``images(batch, outputs)`` returns the images, shape (N, C, H, W) with C of 1, 3 or 4, or (N, H, W). None takes
            the first tensor of the batch with four dimensions and such a C, else the first with three.
        titles: ``titles(batch, outputs)`` returns a text for each image. The picture is then a figure of matplotlib.
        mean: The mean of the normalization to undo: one number, or one per channel. It needs `std`.
        std: The standard deviation of the normalization to undo, likewise. It needs `mean`.
        log: The images are logged as ``train/{log}`` and ``{evaluation}/{log}``.

    Raises:
        MissingExtraError: `titles` is given and matplotlib is not installed.
        DataError: A batch has no images.

    >>> from cadenza import Callback, on
    >>> import torch
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_log)
    ... def show(run, record):
    ...     print(record.step, {name: tuple(image.pixels.shape) for name, image in record.media.items()})
    >>> pictures = SampleImages(4, every="2 steps", images=lambda batch, outputs: torch.rand(8, 3, 10, 10))
    >>> run = tiny_run(callbacks=[pictures, show], steps=2)
    2 {'train/images': (3, 26, 26)}
    """

    @renamed(name="log")
    def __init__(
        self,
        count: int = 16,
        every: Interval | None = None,
        *,
        evaluation: str | None = None,
        images: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
        titles: Callable[[Any, Mapping[str, Any]], Sequence[object]] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        log: str = "images",
    ) -> None:
        for called, function in (("images", images), ("titles", titles)):
            if function is not None and not callable(function):
                raise TypeError(f"{called} must be a function (batch, outputs), or None; got {function!r}")
        if (mean is None) != (std is None):
            raise ValueError(f"expected both mean and std, or none; got mean={mean!r} and std={std!r}")
        if titles is not None and find_spec("matplotlib") is None:
            raise MissingExtraError("matplotlib", needed_by="SampleImages(titles=...)", extra="figures")
        if every is None and evaluation is None:
            every = "1 epoch"
        self.count: int = at_least(1, "count", count)
        self.every: Schedule | None = None if every is None else Schedule.parse(every)
        self.evaluation: str | None = evaluation
        self.images: Callable[[Any, Mapping[str, Any]], Tensor] | None = images
        self.titles: Callable[[Any, Mapping[str, Any]], Sequence[object]] | None = titles
        self.label: str = log
        self._normalized = None if mean is None or std is None else (_per_channel(mean), _per_channel(std))

    def listeners(self) -> list[Listener]:
        training = [] if self.every is None else [periodic(self.every, self._log_training)]
        judging = [] if self.evaluation is None else [Listener(Callback.on_eval_batch_end, self._log_evaluation)]
        return [*super().listeners(), *training, *judging]

    def _log_training(self, run: Run) -> None:
        if run.batch is not None and run.is_main:  # None if the run continued at the end of an epoch
            run.log(f"train/{self.label}", self._picture(run.batch, run.outputs))

    def _log_evaluation(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any]) -> None:
        if evaluation.name == self.evaluation and evaluation.batch == 1 and outputs and run.is_main:  # empty after an error
            run.log(f"{self.evaluation}/{self.label}", self._picture(batch, outputs))

    def _picture(self, batch: Any, outputs: Mapping[str, Any]) -> Media:
        given = _found(batch) if self.images is None else self.images(batch, outputs)
        images = self._bright(_four_dimensional(given)[: self.count].detach().cpu())
        if self.titles is None:
            return Image(_grid(images))
        titles = [str(title) for _, title in zip(images, self.titles(batch, outputs), strict=False)]
        if len(titles) < len(images):
            raise DataError(f"titles must return a text for each of {len(images)} images; got {len(titles)}")
        return Figure(_drawn(images, titles))

    def _bright(self, images: Tensor) -> Tensor:
        """Return images of shape (N, C, H, W) as float in 0..1."""
        if images.dtype == torch.uint8:
            return images.float() / 255
        images = images.float()
        images = torch.where(images.isfinite(), images, images.new_tensor(-math.inf))
        if self._normalized is not None:
            mean, std = self._normalized
            if {len(mean), len(std)} - {1, images.shape[1]}:
                raise DataError(
                    f"mean and std must have one number, or {images.shape[1]}, one per channel; got {len(mean)} and {len(std)}"
                )
            return (images * std + mean).clamp(0, 1)
        least = images.masked_fill(images == -math.inf, math.inf).amin((1, 2, 3), keepdim=True)
        spread = images.amax((1, 2, 3), keepdim=True) - least
        return torch.where(spread > 0, (images - least) / spread, 0.0).clamp(0, 1)


def _per_channel(value: float | Sequence[float]) -> Tensor:
    """Return one number for each channel, shape (C, 1, 1)."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1)


def _found(batch: Any) -> Tensor:
    tensors = list(tensors_in(batch))
    with_channels = (tensor for tensor in tensors if tensor.ndim == 4 and tensor.shape[1] in _CHANNELS)
    without = (tensor for tensor in tensors if tensor.ndim == 3)
    for tensor in (*with_channels, *without):
        return tensor
    raise DataError(
        "SampleImages finds no images in the batch: expected a tensor of shape (N, C, H, W) with C of 1, 3 or 4, or (N, H, W); "
        f"got {[tuple(tensor.shape) for tensor in tensors]}. Give SampleImages(images=...), a function (batch, outputs)."
    )


def _four_dimensional(images: Any) -> Tensor:
    shape = tuple(images.shape) if isinstance(images, Tensor) else ()
    if isinstance(images, Tensor) and len(shape) == 3 and all(shape):
        return images.unsqueeze(1)
    if isinstance(images, Tensor) and len(shape) == 4 and shape[1] in _CHANNELS and all(shape):
        return images
    came = f"shape {shape}" if isinstance(images, Tensor) else repr(type(images).__name__)
    raise DataError(f"images must be a tensor of shape (N, C, H, W), C of 1, 3 or 4, or (N, H, W), without a 0; got {came}")


def _grid(images: Tensor) -> Tensor:
    """Return images of shape (N, C, H, W) in a grid that is about square, shape (C, H', W')."""
    count, channels, height, width = images.shape
    rows, columns = _layout(count)
    grid = images.new_zeros(channels, rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP)
    for image, (row, column) in zip(images, _cells(rows, columns), strict=False):
        top, left = row * (height + _GAP) + _GAP, column * (width + _GAP) + _GAP
        grid[:, top : top + height, left : left + width] = image
    return grid


def _drawn(images: Tensor, titles: Sequence[str]) -> Any:
    from matplotlib.figure import Figure as Drawing  # pyplot would keep the figure in memory

    rows, columns = _layout(len(images))
    drawing = Drawing(figsize=(1.6 * columns, 1.9 * rows), layout="constrained")
    all_axes = drawing.subplots(rows, columns, squeeze=False)
    for axes in all_axes.flat:
        axes.axis("off")
    for image, title, cell in zip(images, titles, _cells(rows, columns), strict=False):
        pixels = image.permute(1, 2, 0) if len(image) > 1 else image[0]
        all_axes[cell].imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1)
        all_axes[cell].set_title(title, fontsize="small", parse_math=False)  # a text with two $ is not a formula
    return drawing


def _layout(count: int) -> tuple[int, int]:
    columns = math.ceil(math.sqrt(count))
    return math.ceil(count / columns), columns


def _cells(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(rows) for column in range(columns))

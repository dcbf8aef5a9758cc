"""``trainer.logger.experiment``: the methods of a ``SummaryWriter``, which log to the run's records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from cadenza.compat.adapter.view import View
from cadenza.records.record import RESERVED, Audio, Figure, Histogram, Image, Media, Text


class ExperimentView(View):
    """The tracker of a logger: TensorBoard's ``SummaryWriter``, and ``log`` of other trackers.

    Values are added to the record of the current step, which all sinks of the run write. ``global_step`` is ignored.
    """

    title: ClassVar[str] = "trainer.logger.experiment"
    absent: ClassVar[Mapping[str, str]] = {
        "add_graph": "Use the SummaryWriter of torch.utils.tensorboard in a callback.",
        "add_embedding": "Use the SummaryWriter of torch.utils.tensorboard in a callback.",
        "add_hparams": "The run directory holds the hyperparameters, and sinks show them.",
        "config": "The run directory holds the hyperparameters, and sinks show them.",
    }

    def log(self, data: Mapping[str, Any], step: int | None = None, *_: Any, **others: Any) -> None:
        """Log numbers, and media of Cadenza such as `Image`, by name."""
        self._run.log({name: _scalar(value) for name, value in data.items() if name not in RESERVED})

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **others: Any) -> None:
        """Log a number."""
        self.log({tag: scalar_value})

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *_: Any, **others: Any) -> None:
        """Log several numbers, as ``main_tag/name``."""
        self.log({f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()})

    def add_text(self, tag: str, text_string: str, *_: Any, **others: Any) -> None:
        """Log a text."""
        self._run.log(tag, Text(text_string))

    def add_histogram(self, tag: str, values: Any, *_: Any, **others: Any) -> None:
        """Log the distribution of the values of a tensor."""
        self._run.log(tag, Histogram(torch.as_tensor(values)))

    def add_image(
        self, tag: str, img_tensor: Any, global_step: Any = None, walltime: Any = None, dataformats: str = "CHW"
    ) -> None:
        """Log a picture: float in 0..1 or uint8, with the dimensions `dataformats`."""
        self._run.log(tag, Image(_ordered(img_tensor, dataformats, "CHW")))

    def add_images(
        self, tag: str, img_tensor: Any, global_step: Any = None, walltime: Any = None, dataformats: str = "NCHW"
    ) -> None:
        """Log several pictures in one row."""
        self._run.log(tag, Image(torch.cat([*_ordered(img_tensor, dataformats, "NCHW")], dim=-1)))

    def add_figure(self, tag: str, figure: Any, global_step: Any = None, close: bool = True, walltime: Any = None) -> None:
        """Log a figure of matplotlib, and close it."""
        self._run.log(tag, Figure(figure).drawn())
        if close and (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close(figure)

    def add_audio(
        self, tag: str, snd_tensor: Any, global_step: Any = None, sample_rate: int = 44100, walltime: Any = None
    ) -> None:
        """Log a sound in -1..1, shape (T,) or (1, T)."""
        self._run.log(tag, Audio(torch.as_tensor(snd_tensor).reshape(-1), sample_rate))

    def flush(self) -> None:
        """Do nothing: each record is written at the end of its step."""

    def close(self) -> None:
        """Do nothing: sinks are closed at the end of the run."""


def _scalar(value: Any) -> Any:
    return value if isinstance(value, Media) or not isinstance(value, Tensor) else value.detach().reshape(())


def _ordered(pixels: Any, given: str, wanted: str) -> Tensor:
    """Return a tensor with permuted dimensions; missing ones have size 1."""
    tensor, given = torch.as_tensor(pixels), given.upper()
    for name in wanted:
        if name not in given:
            tensor, given = tensor.unsqueeze(0), name + given
    return tensor.permute([given.index(name) for name in wanted])

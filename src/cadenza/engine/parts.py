"""What a run is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.optim.precision import Precision
from cadenza.optim.settings import Given
from cadenza.status.run_info import working_directory

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass(slots=True)
class Parts:
    """The parts of a run, built and placed; `Run` shows them under the same names."""

    model: nn.Module
    optimizers: list[Optimizer]
    loader: Iterable[Any]
    compute: Callable[[nn.Module, Any], Any]
    driver: Driver
    precision: Precision
    accumulate: int = 1
    step_fn: Callable[[Run, Any], Any] | None = None
    seed: int | None = None
    data_seed: int = 0
    replay: bool = False
    directory: Path | None = None
    home: Path = field(default_factory=working_directory)
    """The working directory when the trainer was made: relative paths of callbacks start there if there is no directory."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Given = field(default_factory=Given)

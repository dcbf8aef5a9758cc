"""``callback_metrics`` of Lightning: the newest value of each name that a run has logged or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.compat.adapter.view import OfRun
from cadenza.compat.lightning.module.logged import WAYS
from cadenza.errors import AdapterError
from cadenza.loading.batches import size_of

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_JOINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("mean", "sum"), torch.add),
    "min": torch.minimum,
    "max": torch.maximum,
}


class Metrics(OfRun):
    """The newest values under their native names and Lightning's names: ``val_loss`` besides ``eval/loss``.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.values: dict[str, Tensor] = {}
        """A single mapping for the whole run, to which callbacks may add values."""
        self.shown: dict[str, Any] = {}
        """The values for a progress bar."""
        self.batch: Any = None
        """The current batch of an evaluation, from which batch sizes are inferred."""
        self.sums: dict[str, tuple[Tensor, float]] = {}
        """The values logged in hooks of evaluation batches, by name, reduced over the batches so far, and their weights."""
        self._seen: dict[str, Any] = {}
        self._results: dict[int, Any] = {}

    def newest(self, current: Evaluation | None = None) -> dict[str, Tensor]:
        """Return the mapping, after new values are added to it."""
        session = self.held()
        if session is None:
            return self.values
        for name, series in session.metrics.history._series.items():
            if series and self._seen.get(name) is not series[-1]:
                self._seen[name] = series[-1]
                self.put(name, series[-1][1])
        for name, value in session.metrics.buffer._open.items():
            if isinstance(value, int | float | Tensor) and self._seen.get(name) is not value:
                self._seen[name] = value
                self.put(name, value)
        for evaluation in [*self.run.evaluations.values(), *([current] if current is not None else [])]:
            if evaluation.results and self._results.get(id(evaluation)) is not evaluation.results:
                self._results[id(evaluation)] = evaluation.results
                for name, number in evaluation.results.items():
                    self.put(name, number)
        if "train/loss" not in self._seen and (loss := self.run.loss) is not None:
            self.values["train_loss"] = loss.detach()
        return self.values

    def add(self, name: str, value: float | Tensor, batch_size: int | None, reduce_fx: Any) -> Tensor:
        """Add a value of an evaluation batch; return the mean over the batches so far, weighted by their sizes.

        Args:
            name: The name.
            value: A number.
            batch_size: The weight; None: that of the current batch.
            reduce_fx: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, or the function of torch.
        """
        way = WAYS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if way is None:
            raise AdapterError(
                f"pl_module.log({name!r}, ...) takes reduce_fx 'mean', 'sum', 'min' or 'max'; got {reduce_fx!r}."
            )
        size = float(size_of(self.batch) if batch_size is None else batch_size) if way == "mean" else 1.0
        part, weight = torch.as_tensor(value, dtype=torch.float32) * size, size
        if name in self.sums:
            before, others = self.sums[name]
            part, weight = _JOINED[way](before, part), others + size
        self.sums[name] = part, weight
        return part / weight if way == "mean" else part

    def put(self, name: str, value: float | Tensor) -> None:
        """Add a value under its names."""
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for alias in names_of(name):
            self.values[alias] = tensor


def names_of(name: str) -> list[str]:
    """Return the names of a value in ``callback_metrics``.

    >>> names_of("eval/loss"), names_of("train/loss"), names_of("lr")
    (['eval/loss', 'val_loss'], ['train/loss', 'train_loss'], ['lr'])
    """
    if "/" not in name:
        return [name]
    first, _, rest = name.partition("/")
    rest = rest.replace("/", "_")
    return [name, f"val_{rest}" if first == "eval" else f"{first}_{rest}"]

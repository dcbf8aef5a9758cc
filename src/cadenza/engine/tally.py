"""The sums of an evaluation: weighted means of the numbers in its outputs, and its metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cadenza.drivers import Driver
from cadenza.engine.metric_tally import MetricTally
from cadenza.engine.outputs import count_in
from cadenza.engine.session import Session
from cadenza.errors import DataError, LossError
from cadenza.loading.evaluation import Evaluation
from cadenza.records.scalars import as_numbers, weighted_sum
from cadenza.status.outputs import Outputs, scalar
from cadenza.status.tensor_parts import is_array

NOT_AVERAGED = frozenset({"weight", "samples", "tokens", "predictions", "targets", "logits", "labels"})
"""The names of outputs that have another meaning, so that no mean of them is reported."""
_PENDING = 512  # batches after which their numbers are added up, so that the lists stay short


def tally_of(session: Session, evaluation: Evaluation) -> Tally | TallyBySource:
    """Return a new tally: of each loader too, if the evaluation is one of a `Mixture`."""
    return TallyBySource(session.driver, evaluation) if evaluation.sources else Tally(session.driver, evaluation)


class TallyBySource:
    """Adds up numbers and metrics of each loader in a mixture, and of all of them."""

    def __init__(self, driver: Driver, evaluation: Evaluation) -> None:
        self._evaluation, self._all = evaluation, Tally(driver, evaluation)
        self._parts = evaluation.parts()
        self._tallies = {name: Tally(driver, part) for name, part in self._parts.items()}

    @property
    def unused(self) -> Outputs | None:
        """The outputs of the last batch, if no batch had a number so far."""
        return self._all.unused

    def add(self, batch: Any, outputs: Outputs) -> None:
        """Add the numbers in the outputs of a batch, and update the metrics."""
        source = self._evaluation.source or ""
        self._all.add(batch, outputs)
        self._parts[source].follow(self._evaluation)
        self._tallies[source].add(batch, outputs)

    def results(self) -> dict[str, float]:
        """Return the results of each loader, then those of all batches. Every rank must call this."""
        for name, part in self._parts.items():
            part.first_rank = self._evaluation.first_ranks.get(name, 0)
        each = [tally.results() for tally in self._tallies.values()]
        return {name: value for results in (*each, self._all.results()) for name, value in results.items()}


class Tally(MetricTally):
    """Adds up numbers and metrics. Numbers leave the device once, at the end."""

    def __init__(self, driver: Driver, evaluation: Evaluation) -> None:
        super().__init__(driver, evaluation)
        self._means = WeightedMeans(driver.device)
        self._left_out: frozenset[object] = NOT_AVERAGED
        self.unused: Outputs | None = None
        """The outputs of the last batch, if no batch had a number so far; for the warning of an evaluation without a result."""

    def add(self, batch: Any, outputs: Outputs) -> None:
        """Add the numbers in the outputs of a batch, and update the metrics."""
        weight, pending, left_out = None, self._means.pending, self._left_out
        for name, value in outputs.items():  # without derived values
            if name in left_out:
                continue
            number = value.item() if type(value) is Tensor and value.is_cpu and not value.ndim else value
            if type(number) is not float and (number := self._number(name, value)) is None:
                continue
            if weight is None:
                weight = self._weight(batch, outputs)
            try:
                values, weights = pending[name]
            except KeyError:
                values, weights = self._begun(name)
            values.append(number)
            weights.append(weight)
        if not pending:
            self.unused = outputs
        if not self._evaluation.batch % _PENDING:
            self._means.add_up()
        if self._metrics:
            self.update(batch, outputs)

    def _number(self, name: object, value: Any) -> float | Tensor | None:
        number = number_of(name, value, self._evaluation.name)
        return None if number is None else self._means.kept(number)

    def _weight(self, batch: Any, outputs: Outputs) -> float | Tensor:
        weight = dict.get(outputs, "weight")
        if weight is None and dict.get(outputs, "samples") is not None:
            weight = count_in(outputs, "samples")
        if weight is None:
            weight = self._evaluation.size_of(batch)
        return weight if type(weight) is int else self._means.kept(weight)

    def results(self) -> dict[str, float]:
        """Return the weighted means and the metrics, reduced over ranks. Every rank must call this.

        Raises:
            DataError: The batches with a number have a total weight of 0, or two results have the same name.
        """
        name, results = self._evaluation.name, {}
        for key, (total, weight) in self._means.sums(self._driver).items():
            if not weight:
                raise DataError(_weighs_nothing(name, key))
            results[f"{name}/{key}"] = total / weight
        self.add_metrics(results)
        return results

    def _begun(self, name: Any) -> tuple[list[Any], list[Any]]:
        """Return the lists for the first number with this name.

        Raises:
            DataError: A metric has this name.
        """
        if name in self._evaluation.metrics:
            raise DataError(
                f"{self._evaluation.name!r} would report two results {self._evaluation.name}/{name}: the mean of "
                f"outputs[{name!r}], and the metric {name!r}. Give one of them another name."
            )
        if not isinstance(name, str) or name.startswith("_"):
            self._left_out |= {name}
            return [], []
        return self._means.pending.setdefault(name, ([], []))


class WeightedMeans:
    """Weighted sums of numbers by name. A number on a device stays there until the end, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        # A sum in float32 loses digits after some 10 million tokens. MPS has no float64.
        self._zero = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.pending: dict[str, tuple[list[Any], list[Any]]] = {}
        """The numbers by name, and their weights, that are not in the sums yet."""
        self._sums: dict[str, Tensor] = {}

    def kept(self, value: float | Tensor) -> float | Tensor:
        """Return a copy: a tensor may be a view of a larger one, or change with the next batch."""
        if not isinstance(value, Tensor):
            return value
        return value.item() if value.is_cpu else value.detach().to(self._zero.device, self._zero.dtype, copy=True)

    def add_up(self) -> None:
        """Add the pending numbers to the sums."""
        for name, (values, weights) in self.pending.items():
            if values:
                numbers, factors = as_numbers(self._zero, values), as_numbers(self._zero, weights)
                sums = torch.stack([weighted_sum(numbers, factors), factors.sum()])
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums
                values.clear()
                weights.clear()

    def sums(self, driver: Driver) -> dict[str, tuple[float, float]]:
        """Return the weighted sum and the sum of the weights by name, over all ranks. Every rank must call this."""
        self.add_up()
        names = sorted(self._sums, key=lambda name: name != "loss")  # the loss first, the others as they came
        if driver.world_size > 1:  # a rank may lack a name, or have it later
            names = list(dict.fromkeys(name for one in driver.gather(names) for name in one))
        if not names:
            return {}
        nothing = self._zero.expand(2)
        sums = driver.reduce(torch.stack([self._sums.get(name, nothing) for name in names]), "sum").tolist()
        return {name: (total, weight) for name, (total, weight) in zip(names, sums, strict=True)}


def number_of(name: object, value: Any, owner: str) -> float | Tensor | None:
    """Return an output if it is a real number or a tensor of shape (); None for any other value.

    Args:
        name: The name of the output.
        value: The output.
        owner: The name of the evaluation; for messages.

    Raises:
        LossError: The loss has a dimension, or a number is complex.
    """
    if is_array(value) and not value.ndim and not isinstance(value, Tensor):
        value = value.item()
    if name == "loss" and value is not None:
        value = scalar(torch.as_tensor(value))
        if value.ndim:
            raise LossError(f"the loss of {owner!r} must have shape (); got {tuple(value.shape)}: reduce it")
    number = value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, int | float | complex)
    if number and (value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)):
        what = "the loss" if name == "loss" else f"outputs[{name!r}]"
        raise LossError(f"{what} of {owner!r} is complex: expected a real number of shape (); return its abs(), say")
    return value if number else None


def _weighs_nothing(evaluation: str, name: str) -> str:
    return (
        f"{evaluation!r} has no mean {name}: its batches have a total weight of 0. Expected at least one batch with samples "
        "or, where compute reports outputs['weight'], with a weight above 0. Give a loader with such a batch, or raise limit=."
    )

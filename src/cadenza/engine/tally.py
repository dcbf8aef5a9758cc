"""The sums of an evaluation: weighted means of the numbers in its outputs, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.drivers import Driver
from cadenza.drivers.collective_check import alone
from cadenza.drivers.consensus import by_main, by_main_from_all
from cadenza.engine.objective import count_in, on_host, predictions_in, targets_in
from cadenza.engine.step_state import number_on_host
from cadenza.errors import DataError, DistributedError, LossError, nearest
from cadenza.loading.batches import moved
from cadenza.loading.evaluation import (
    Evaluation,
    Metrics,
    Updated,
    load_state,
    reduced_over,
    reduces_itself,
    share_states,
    state_of,
    updated_together,
)
from cadenza.records.scalars import as_numbers, exact_zero, weighted_sum
from cadenza.status.encoding import is_array
from cadenza.status.outputs import Outputs, scalar

if TYPE_CHECKING:
    from cadenza.run import Run

NOT_AVERAGED = frozenset({"weight", "samples", "tokens", "predictions", "targets", "logits", "labels"})
"""The names of outputs that have another meaning, so that no mean of them is reported."""
_REDUCES = ". If the metric reduces over the ranks, give it reduces_itself = True: it then gets the inputs of its rank alone."
T = TypeVar("T")
_PENDING = 512  # batches after which their numbers are added up, so that the lists stay short


# -- metrics ---------------------------------------------------------------------------------------


class MetricTally:
    """The metrics of an evaluation, updated with each batch. Numbers leave the device once, at the end."""

    def __init__(self, driver: Driver, evaluation: Evaluation) -> None:
        self._driver, self._evaluation = driver, evaluation
        self._gathered: list[dict[tuple[str, ...], Any]] = []
        self._metrics = updated_together(evaluation.given_metrics)
        for metric in self._metrics:
            if hasattr(metric.metric, "to"):
                metric.metric.to(driver.device)
            metric.metric.reset()
        alone = driver.world_size == 1
        self._here = [metric for metric in self._metrics if alone or reduces_itself(metric.metric)]
        self._later = [metric for metric in self._metrics if not (alone or reduces_itself(metric.metric))]
        """The metrics that must see the inputs of all ranks, because their states cannot be added up over ranks."""
        self._needed = {metric.inputs: metric for metric in self._metrics}

    def update(self, batch: Any, outputs: Outputs) -> None:
        """Update the metrics with a batch."""
        given = {names: _inputs(value, self._evaluation, batch, outputs) for names, value in self._needed.items()}
        for updated in self._here:
            update, arguments = updated.metric.update, given[updated.inputs]
            update(*arguments)
        if self._later:
            self._gathered.append(
                {updated.inputs: [on_host(value) for value in given[updated.inputs]] for updated in self._later}
            )

    def add_metrics(self, results: dict[str, float]) -> None:
        """Add what the metrics compute, reduced over ranks, to the results, and reset the metrics. Every rank must call this.

        Raises:
            DataError: Two results have the same name.
        """
        name = self._evaluation.name
        if self._later:
            self._update_on_main()
        shards = self._shards_with_batches()
        share_states(metric.metric for metric in self._metrics)
        for key, metric in self._evaluation.metrics.items():
            prefix = name if getattr(metric, "flat", False) else f"{name}/{key}"  # a flat metric returns a mapping of results
            for result, number in self._computed(prefix, metric, shards):
                if result in results:
                    raise DataError(f"two results of {name!r} have the name {result!r}. Give the metric {key!r} another name.")
                results[result] = number
        for updated in self._metrics:
            updated.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metrics, and the inputs of those that must see the inputs of all ranks."""
        share_states([metric.metric for metric in self._metrics])
        held = [[given[updated.inputs] for updated in self._later] for given in self._gathered]
        return {"metrics": [state_of(metric.metric) for metric in self._metrics], "inputs": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for metric, saved in zip(self._metrics, state["metrics"], strict=True):
            load_state(metric.metric, saved, self._driver.device)
        self._gathered = [
            {updated.inputs: held for updated, held in zip(self._later, each, strict=True)} for each in state["inputs"]
        ]

    def _computed(self, prefix: str, metric: Any, shards: Sequence[int] | None) -> list[tuple[str, float]]:
        """Return the results of a metric. If only these shards have batches, torchmetrics reduces over their ranks alone."""
        driver = self._driver
        part = None if getattr(metric, "reduces_itself", False) else shards

        def numbers() -> list[tuple[str, float]]:
            return [*_numbers(prefix, metric.compute())]

        if any(updated.metric is metric for updated in self._later):
            return by_main(driver.meeting, lambda: self._alone(numbers), self._failed)
        with reduced_over([metric], driver.data_group(part)):
            results = numbers() if part is None or driver.data_rank in part else []
        return results if part is None else driver.broadcast(results, source=part[0] * driver.tensor_parallel)

    def _shards_with_batches(self) -> Sequence[int] | None:
        """Return the shards of the data that have batches; None if all have some. Every rank must call this."""
        driver, has = self._driver, self._evaluation.batch > 0
        if driver.world_size == 1 or not self._here or not driver.any_rank(not has):
            return None
        return [shard for shard, has_batches in enumerate(driver.gather_data(has)) if has_batches]

    def _update_on_main(self) -> None:
        driver = self._driver
        gathered = self._gathered

        def update_with(arriving: Iterator[Any]) -> None:
            for given in arriving:
                for updated in self._later:
                    update, arguments = updated.metric.update, [moved(value, driver.device) for value in given[updated.inputs]]
                    self._alone(partial(update, *arguments))

        arriving = driver.in_turns(iter(gathered), len(gathered), first=self._evaluation.first_rank)
        by_main_from_all(driver.meeting, arriving, update_with, self._failed)

    def _alone(self, act: Callable[[], T]) -> T:
        """Call a method of a metric that has the inputs of all ranks, on the main process."""
        with alone(f"a metric of {self._evaluation.name!r}", _REDUCES):
            return act()

    def _failed(self, rank: int, problem: str) -> DistributedError:
        return DistributedError(f"a metric of {self._evaluation.name!r} failed on the main process: {problem}")


def _inputs(updated: Updated, evaluation: Evaluation, batch: Any, outputs: Outputs) -> tuple[Any, ...]:
    """Return the values with which a metric is updated.

    Raises:
        DataError: The outputs, and a batch with names, do not have one of them.
    """
    if not updated.inputs:
        return _predictions_and_targets(evaluation, batch, outputs)
    named = batch if isinstance(batch, Mapping) else {}
    for name in updated.inputs:
        if name not in outputs and name not in named:
            also = f", and the batch has {[*named]}" if named else ""
            raise DataError(
                f"{updated.where} of {evaluation.name!r} needs {name!r}, but compute returned only {[*outputs]}{also}."
                f"{nearest(name, [*outputs, *named])} Return it from compute, or give the metric another name of an input."
            )
    return tuple(outputs[name] if name in outputs else named[name] for name in updated.inputs)


def _predictions_and_targets(evaluation: Evaluation, batch: Any, outputs: Outputs) -> tuple[Any, Any]:
    predictions, targets = predictions_in(outputs), targets_in(batch, outputs)
    if predictions is None or targets is None:
        raise DataError(
            f"the metrics of {evaluation.name!r} need 'predictions' and 'targets' from compute; it returned {list(outputs)}."
            f"{nearest('predictions', outputs)} Give Evaluate(compute=...) that returns a mapping with both, name other "
            "outputs as in metrics={'acc': (metric, 'logits', 'labels')}, or train with supervised(loss_fn)."
        )
    return predictions, targets


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield what a metric computed as plain numbers: one, or one for each entry."""
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from _numbers(f"{name}/{part}", item)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            yield from _numbers(f"{name}/{index}", element)
    elif is_array(value) and value.ndim:
        yield from ((f"{name}/{index}", number) for index, number in enumerate(value.flatten().tolist()))
    else:
        yield name, float(value)


class Tally(MetricTally):
    """Adds up numbers and metrics, those of each loader too if the evaluation is one of a `Mixture`.

    Numbers leave the device once, at the end.
    """

    def __init__(self, driver: Driver, evaluation: Evaluation) -> None:
        super().__init__(driver, evaluation)
        self._means = WeightedMeans(driver.device)
        self._left_out: frozenset[object] = NOT_AVERAGED
        self.unused: Outputs | None = None
        """The outputs of the last batch, if no batch had a number so far; for the warning of an evaluation without a result."""
        parts = evaluation.parts() if evaluation.sources else {}
        self._sources = {name: (part, Tally(driver, part)) for name, part in parts.items()}

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
        if self._sources:
            part, tally = self._sources[self._evaluation.source or ""]
            part.follow(self._evaluation)
            tally.add(batch, outputs)

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
        """Return the weighted means and the metrics, of each loader first, reduced over ranks. Every rank must call this.

        Raises:
            DataError: The batches with a number have a total weight of 0, or two results have the same name.
        """
        name, results, of_sources = self._evaluation.name, dict[str, float](), dict[str, float]()
        for source, (part, tally) in self._sources.items():
            part.first_rank = self._evaluation.first_ranks.get(source, 0)
            of_sources |= tally.results()
        for key, (total, weight) in self._means.sums(self._driver).items():
            if not weight:
                raise DataError(
                    f"{name!r} has no mean {key}: its batches have a total weight of 0. Expected at least one batch with "
                    "samples or, where compute reports outputs['weight'], with a weight above 0. Give a loader with such a "
                    "batch, or raise limit=."
                )
            results[f"{name}/{key}"] = total / weight
        self.add_metrics(results)
        return {**of_sources, **results}

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
        self._zero = exact_zero(device)  # a sum in float32 loses digits after some 10 million tokens
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
        # A rank may lack a name, or have it later.
        names = list(dict.fromkeys(name for rank_value in driver.gather_unequal(names) for name in rank_value))
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


class IntervalMetrics:
    """Metrics of the training over the batches of an interval.

    Args:
        run: The run.
        metrics: The metrics.
        prefix: The first part of the names of their results.
    """

    def __init__(self, run: Run, metrics: Metrics | None, prefix: str) -> None:
        self._driver, self._evaluation = run.driver, Evaluation([None], metrics=metrics)
        self._evaluation.name = prefix
        self.begin()

    def begin(self) -> None:
        """Begin an interval."""
        self._tally, self._evaluation.batch = MetricTally(self._driver, self._evaluation), 0

    def add(self, batch: Any, outputs: Outputs) -> None:
        """Update the metrics with a batch of the training, unless its weight is 0. No gradient flows through them."""
        if number_on_host(dict.get(outputs, "weight")) == 0:
            return
        self._evaluation.batch += 1
        with torch.no_grad():
            self._tally.update(batch, Outputs(pytree.tree_map_only(Tensor, Tensor.detach, {**outputs})))

    def take(self) -> dict[str, float]:
        """Return the results of the interval, over all ranks; none without a batch. Every rank must call this."""
        results: dict[str, float] = {}
        if self._driver.any_rank(self._evaluation.batch > 0):
            self._tally.add_metrics(results)
        self._evaluation.batch = 0
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metrics on this rank."""
        return {"batches": self._evaluation.batch, **self._tally.state_dict()} if self._evaluation.batch else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
        if state:
            self._evaluation.batch = state["batches"]
            self._tally.load_state_dict(state)

"""The metrics of an evaluation or of the training, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.drivers import Driver
from cadenza.engine.outputs import on_host, predictions_in, targets_in
from cadenza.engine.session import Session
from cadenza.engine.window import number_on_host
from cadenza.errors import DataError, nearest
from cadenza.loading.batches import moved
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.metrics import (
    Metrics,
    Updated,
    load_state,
    reduced_over,
    reduces_itself,
    share_states,
    state_of,
    updated_together,
)
from cadenza.status.outputs import Outputs
from cadenza.status.tensor_parts import is_array


class MetricTally:
    """The metrics of an evaluation, updated with each batch. Numbers leave the device once, at the end."""

    def __init__(self, driver: Driver, evaluation: Evaluation) -> None:
        self._driver, self._evaluation = driver, evaluation
        self._gathered: list[dict[tuple[str, ...], Any]] = []
        self._metrics = updated_together(evaluation.given_metrics)
        for one in self._metrics:
            if hasattr(one.metric, "to"):
                one.metric.to(driver.device)
            one.metric.reset()
        alone = driver.world_size == 1
        self._here = [one for one in self._metrics if alone or reduces_itself(one.metric)]
        self._later = [one for one in self._metrics if not (alone or reduces_itself(one.metric))]
        """The metrics that must see the inputs of all ranks, because their states cannot be added up over ranks."""
        self._needed = {one.inputs: one for one in self._metrics}

    def update(self, batch: Any, outputs: Outputs) -> None:
        """Update the metrics with a batch."""
        given = {names: _inputs(one, self._evaluation, batch, outputs) for names, one in self._needed.items()}
        for one in self._here:
            update, arguments = one.metric.update, given[one.inputs]
            update(*arguments)
        if self._later:
            self._gathered.append({one.inputs: [on_host(value) for value in given[one.inputs]] for one in self._later})

    def add_metrics(self, results: dict[str, float]) -> None:
        """Add what the metrics compute, reduced over ranks, to the results, and reset the metrics. Every rank must call this.

        Raises:
            DataError: Two results have the same name.
        """
        name = self._evaluation.name
        if self._later:
            self._update_with_all_ranks()
        self._check_states()
        metrics = [one.metric for one in self._metrics]
        share_states(metrics)
        for key, metric in self._evaluation.metrics.items():
            with catch_warnings(), reduced_over([metric], self._driver.data_group()):
                if not self._evaluation.batch:  # the other ranks have batches
                    filterwarnings("ignore", message="The ``compute`` method of metric")
                value = metric.compute()
            prefix = name if getattr(metric, "flat", False) else f"{name}/{key}"  # a flat metric returns a mapping of results
            for result, number in _numbers(prefix, value):
                if result in results:
                    raise DataError(f"two results of {name!r} have the name {result!r}. Give the metric {key!r} another name.")
                results[result] = number
        for metric in metrics:
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metrics, and the inputs of those that must see the inputs of all ranks."""
        share_states([one.metric for one in self._metrics])
        held = [[given[one.inputs] for one in self._later] for given in self._gathered]
        return {"metrics": [state_of(one.metric) for one in self._metrics], "inputs": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for one, saved in zip(self._metrics, state["metrics"], strict=True):
            load_state(one.metric, saved, self._driver.device)
        self._gathered = [{one.inputs: held for one, held in zip(self._later, each, strict=True)} for each in state["inputs"]]

    def _check_states(self) -> None:
        """Raise `DataError` if a rank has no batch, and a metric of torchmetrics cannot gather the lists of the others."""
        driver, evaluation = self._driver, self._evaluation
        if driver.world_size == 1 or not self._here or not driver.any_rank(not evaluation.batch):
            return
        for key, metric in evaluation.metrics.items():
            if any(isinstance(state, list) for state in getattr(metric, "_defaults", {}).values()):
                raise DataError(
                    f"the metric {key!r} of {evaluation.name!r} keeps a list on each rank, which torchmetrics can gather only "
                    "if each rank has a batch; the loader has fewer batches than ranks. Use smaller batches or fewer ranks."
                )

    def _update_with_all_ranks(self) -> None:
        device = self._driver.device
        everyone, first = self._driver.gather_data(self._gathered), self._evaluation.first_rank
        for turn in zip_longest(*everyone[first:], *everyone[:first]):  # the order of one process
            for given in filter(None, turn):
                for one in self._later:
                    update = one.metric.update
                    update(*(moved(value, device) for value in given[one.inputs]))


def _inputs(one: Updated, evaluation: Evaluation, batch: Any, outputs: Outputs) -> tuple[Any, ...]:
    """Return the values with which a metric is updated.

    Raises:
        DataError: The outputs, and a batch with names, do not have one of them.
    """
    if not one.inputs:
        return _predictions_and_targets(evaluation, batch, outputs)
    named = batch if isinstance(batch, Mapping) else {}
    for name in one.inputs:
        if name not in outputs and name not in named:
            also = f", and the batch has {[*named]}" if named else ""
            raise DataError(
                f"{one.where} of {evaluation.name!r} needs {name!r}, but compute returned only {[*outputs]}{also}."
                f"{nearest(name, [*outputs, *named])} Return it from compute, or give the metric another name of an input."
            )
    return tuple(outputs[name] if name in outputs else named[name] for name in one.inputs)


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
        for part, one in value.items():
            yield from _numbers(f"{name}/{part}", one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _numbers(f"{name}/{index}", one)
    elif is_array(value) and value.ndim:
        yield from ((f"{name}/{index}", number) for index, number in enumerate(value.flatten().tolist()))
    else:
        yield name, float(value)


class IntervalMetrics:
    """Metrics of the training over the batches of an interval.

    Args:
        session: The session of the run.
        metrics: The metrics.
        prefix: The first part of the names of their results.
    """

    def __init__(self, session: Session, metrics: Metrics | None, prefix: str) -> None:
        self._driver, self._evaluation = session.driver, Evaluation([None], metrics=metrics)
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

"""One evaluation: its loader, metrics and results; and the metrics in all accepted forms, with the inputs of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, runtime_checkable

from torch import nn
from torch.utils.data import SequentialSampler

from cadenza.errors import DataError
from cadenza.loading import TensorBatches, resumable
from cadenza.loading.batches import SampleCounter, with_sample_counts
from cadenza.loading.loaders import Limited, check_loader, length_of, one_pass
from cadenza.loading.resumable_base import Composite, is_sharded_stream, separate_source, set_source
from cadenza.loading.shards import Shard
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run


class Evaluation(SampleCounter):
    """One way to evaluate a model: a loader, metrics, and the results of the last pass.

    Of a `cadenza.loading.Mixture`, each loader is read once, to its end, one after another, whatever its mode. `limit` counts
    the batches of each. Each has results of its own, such as ``eval/a/loss``, with separate copies of the metrics, besides
    those of all batches. With the mode ``"zip"``, a batch has the batches of all loaders, and the results are those of all.

    Args:
        loader: Any iterable of batches.
        metrics: A mapping of names to objects with ``update(predictions, targets)``, ``compute()`` and ``reset()``; or a list,
            a ``MetricCollection`` or a single metric. A metric without a name is named by its class, in snake case.
            ``(metric, "logits_a", "labels_a")`` updates a metric with these outputs instead.
        name: The prefix of the results.
        compute: ``compute(model, batch)`` returns a mapping. The mean of each number and tensor of shape () in it is reported,
            weighted by ``weight`` or by samples. Metrics need ``predictions`` and ``targets``, or the names of their inputs.
            The names ``weight``, ``samples``, ``tokens``, ``predictions``, ``targets``, ``logits`` and ``labels`` are not
            averaged. None: the ``compute_loss`` of the run.
        limit: The maximal number of batches; None: all.

    Raises:
        ValueError: `limit` is less than 1, or `name` is empty or contains ``/``.

    >>> from cadenza import Callback, on
    >>> from cadenza.callbacks import Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> @on(Callback.on_eval_end)
    ... def show(run, evaluation):
    ...     print(evaluation.name, evaluation.batch, list(evaluation.results))
    >>> run = tiny_run(callbacks=[Evaluate(tiny_loader()), show])
    eval 5 ['eval/loss']
    """

    own_names: bool = False
    """Whether the results have names of their own, without the name of the evaluation as the first part."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        metrics: Metrics | None = None,
        name: str = "eval",
        compute: Callable[[nn.Module, Any], Any] | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or limit < 1):
            raise ValueError(f"limit must be at least 1 batch, or None for all; got {limit!r}")
        check_loader(loader, f"the loader of {name!r}")
        if not name or "/" in name:
            raise ValueError(f"name must be the first part of the names of the results, without '/'; got {name!r}")
        self.loader: Iterable[Any] = loader
        self.sources: dict[str, Iterable[Any]] = loader.leaves() if isinstance(loader, Composite) else {}
        """By name, the loaders of a `Mixture` that are evaluated one after another; none for other loaders."""
        self.source: str | None = None
        """The name of the loader in `sources` that the current batch comes from, or the last one."""
        self.metrics: dict[str, Any] = by_name(metrics)
        self.name: str = name
        self.given_metrics = metrics
        self.compute: Callable[[nn.Module, Any], Any] | None = compute
        self.limit: int | None = limit
        self.results: dict[str, float] = {}
        """``{"eval/loss": 0.3, "eval/acc": 0.93}`` after the evaluation."""
        self.weights: str | None = None  # the name of the averaged weights that it evaluates; None: those of the model
        self._before = self._number = 0
        self.first_rank = 0
        """The rank that reads the first batch."""
        self.first_ranks: dict[str | None, int] = {}
        """The same for each of the `sources`."""
        self.batch: int = 0
        """The number of completed batches in the current pass, or in the last one."""
        self.ranks: int = 1
        """The number of ranks over which the batches are sharded."""
        self.has_warned = False
        """Whether a warning said that it has no result."""
        self.first_batch: AbstractContextManager[Any] | None = None
        """The context of the computation with the first batch, in which multiple ranks find whether it communicates."""
        self.complete = False
        """Whether the last pass was complete. It is true in ``on_eval_end``, except after an error."""

    def __repr__(self) -> str:
        batches = "" if self.batches is None else f", {counted(self.batches, 'batch')}"
        results = "".join(f", {name} {value:.6g}" for name, value in self.results.items())
        return f"<Evaluation {self.name!r}{batches}{results}>"

    @property
    def batches(self) -> int | None:
        """The number of batches on this rank; some ranks have one less. None if the loader has no length."""
        batches = [length_of(self._limited(loader)) for loader in self._loaders().values()]
        known = [batch for batch in batches if batch is not None]
        return None if len(known) < len(batches) else -(-sum(known) // self.ranks)

    @staticmethod
    def among(callbacks: Iterable[object], name: str) -> Evaluation | None:
        """Return the evaluation of this name that one of the callbacks carries out; None without one."""
        held = (getattr(callback, "evaluation", None) for callback in callbacks)
        return next((metric for metric in held if isinstance(metric, Evaluation) and metric.name == name), None)

    def trial(self, batches: int) -> Evaluation:
        """Return an evaluation of the first `batches` batches, with separate results."""
        limit = batches if self.limit is None else min(batches, self.limit)
        return Evaluation(self.loader, metrics=self.given_metrics, name=self.name, compute=self.compute, limit=limit)

    def parts(self) -> dict[str, Evaluation]:
        """Return an evaluation for each of the `sources`, with copies of the metrics, to add up its results."""
        parts = {name: Evaluation(source, metrics=deepcopy(self.given_metrics)) for name, source in self.sources.items()}
        for name, part in parts.items():
            part.name = f"{self.name}/{name}"
        return parts

    def follow(self, whole: Evaluation) -> None:
        """Count the current batch of the evaluation that this is a part of."""
        self.batch += 1
        self.samples: int | None = whole.samples

    def read(self, run: Run, data_seed: int) -> Iterator[Any]:
        """Yield the batches. On multiple ranks, one rank reads each. The loaders of a `Mixture` follow one another."""
        self.ranks, self._before = run.driver.data_world_size, 0
        if self.ranks > 1:
            run.driver.share_buffers(run.model)  # checkpoints contain those of the main process
        with separate_source():
            for name, loader in self._loaders().items():
                self.source, self._number, self.first_ranks[name] = name, 0, self._before % self.ranks
                set_source(name)
                for batch in self._read(run, loader, data_seed):
                    self._number += 1
                    yield batch
                if name is not None and not self._number and self.ranks == 1:
                    raise DataError(f"the loader {name!r} of {self.name!r} gave no batch. Give one that has at least one.")
                self._before += length_of(self._limited(loader)) or 0

    def check_order(self, ranks: int) -> None:
        """Raise `DataError` if the order of the batches over all ranks is unknown, for predictions."""
        lengths = [length_of(loader) for loader in self._loaders().values()]
        if ranks > 1 and None in lengths[:-1]:
            raise DataError(
                f"{self.name!r}: a loader without a length cannot be followed by another one on multiple ranks, because the "
                "order of the batches would be unknown. Put it last in the Mixture, or call predict with each loader."
            )

    def _loaders(self) -> dict[str | None, Iterable[Any]]:
        return dict(self.sources.items()) or {None: self.loader}

    def _read(self, run: Run, given: Iterable[Any], data_seed: int) -> Iterator[Any]:
        loader, epoch = self._limited(given), run.progress.epoch
        shard = self._shard(run)
        if self.ranks == 1 and not isinstance(given, Composite):
            if isinstance(given, TensorBatches) or is_sharded_stream(given):  # it must not depend on the number of evaluations
                loader = resumable(loader, data_seed).batches(epoch, 0)
            yield from self.counted(one_pass(with_sample_counts(loader)))
            return
        whole = isinstance(given, Composite) and given.begins_new_passes
        source = resumable(loader, data_seed, shard=shard)
        if whole and source.shard.share_data:  # the pairs of new passes are those of one process
            source = resumable(loader, data_seed)
        sized = ((batch, source.size_of(batch)) for batch in source.batches(epoch, 0))
        for batch, samples in sized if source.shard.world_size == self.ranks else shard.shard_batches(sized):
            self.samples = samples
            yield batch

    def indices(self, run: Run, number: int, data_seed: int) -> Sequence[Any] | None:
        """Return the dataset indices of the samples in batch `number`, from 0; None if they are unknown."""
        loader = self._loaders()[self.source]
        number -= self.batch - self._number + 1 if self.source is not None else 0
        sequential = isinstance(getattr(loader, "sampler", None), SequentialSampler)
        if self.ranks == 1 and not sequential and not isinstance(loader, TensorBatches):  # it draws an order of its own
            return None
        return resumable(loader, data_seed, shard=self._shard(run)).indices(run.progress.epoch, number)

    def _shard(self, run: Run) -> Shard:
        """Return the shard of this rank: the batches of all loaders are dealt in one order."""
        shard = run.driver.data_shard().uneven()
        return replace(shard, rank=(shard.rank - self._before) % shard.world_size)

    def _limited(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader if self.limit is None else Limited(loader, self.limit)


@runtime_checkable
class Metric(Protocol):
    """An object with ``update(predictions, targets)``, ``compute()`` and ``reset()``, as in torchmetrics.

    With named inputs, ``update`` receives these outputs instead, as positional arguments.
    """

    update: Callable[..., Any]
    compute: Callable[..., Any]
    reset: Callable[..., Any]


Metrics = Mapping[str, Any] | Sequence[Any] | Metric
"""A mapping by name; or a list, a torchmetrics ``MetricCollection`` or a single metric, named by class.

A tuple of a metric and names, ``(metric, "logits_a", "labels_a")``, stands for a metric that is updated with these outputs.
"""


@dataclass(frozen=True, slots=True, eq=False)  # a metric of torchmetrics returns another metric from ==
class Updated:
    """An object that is updated with each batch: a metric, or a collection of torchmetrics as a whole.

    So the compute groups of a collection share their states.
    """

    metric: Any
    inputs: tuple[str, ...]
    """The names of the outputs that ``update`` receives; none: the predictions and targets."""
    where: str
    """Its position in the argument, such as ``metrics['acc']``; for messages."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    name: str
    metric: Any
    updated: Updated


def by_name(metrics: Metrics | None) -> dict[str, Any]:
    """Return metrics by the name of their results.

    A metric without a name is named by its class, in snake case: ``MulticlassF1Score`` is ``multiclass_f1_score``. The metrics
    of a `MetricCollection` without a name have the names that they have there.

    Raises:
        TypeError: An object is not a metric.
        ValueError: Two metrics have the same name, or one metric has two names.

    >>> by_name(None)
    {}
    >>> by_name({"acc": 3})
    Traceback (most recent call last):
        ...
    TypeError: metrics['acc'] must have update, compute and reset, as torchmetrics have; got 3
    """
    named: dict[str, Any] = {}
    held: dict[int, str] = {}
    for entry in _entries(metrics, "", "metrics"):
        if entry.name in named:
            raise ValueError(
                f"two metrics have the name {entry.name!r}. Give a mapping, such as metrics={{'a': ..., 'b': ...}}"
            )
        if (other := held.setdefault(id(entry.metric), entry.name)) != entry.name:
            raise ValueError(
                f"the metrics {other!r} and {entry.name!r} are one object, which would be updated twice with each batch. "
                "Create a metric for each name."
            )
        named[entry.name] = entry.metric
    return named


def updated_together(metrics: Metrics | None) -> list[Updated]:
    """Return the objects to update, with their inputs."""
    unique = {id(entry.updated.metric): entry.updated for entry in _entries(metrics, "", "metrics")}
    return list(unique.values())


def share_states(metrics: Iterable[Any]) -> None:
    """Give each metric of a collection the state of its compute group. Call it after the last update."""
    for metric in metrics:
        if _is_collection(metric):
            metric.items(copy_state=False)


@contextmanager
def reduced_over(metrics: Iterable[Any], group: Any) -> Iterator[None]:
    """Return a context in which metrics of torchmetrics reduce over the ranks of a process group; None: over all."""
    modules = [part for metric in metrics if group is not None and _is_torchmetrics(metric) for part in metric.modules()]
    set_here = [part for part in modules if getattr(part, "process_group", 0) is None]
    try:
        for part in set_here:
            part.process_group = group
        yield
    finally:
        for part in set_here:
            part.process_group = None


def check_state(metrics: Metrics | None) -> None:
    """Raise `TypeError` for a metric of which a checkpoint cannot hold the state."""
    for updated in updated_together(metrics):
        if not all(callable(getattr(updated.metric, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"{updated.where} must have state_dict and load_state_dict, so that a run can continue inside of an interval; "
                f"got {updated.metric!r}. Use a metric of torchmetrics, or add these methods."
            )


def state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric that was updated; of torchmetrics, also the parts that are not persistent."""
    if not _is_torchmetrics(metric):
        return {"state": metric.state_dict()}
    parts = [part for part in metric.modules() if hasattr(part, "update_count")]
    for part in parts:
        part.persistent(True)
    return {"state": dict(metric.state_dict()), "updates": [part.update_count for part in parts]}


def load_state(metric: Any, state: Mapping[str, Any], device: Any) -> None:
    """Restore what `state_of` returned."""
    parts = [part for part in metric.modules() if hasattr(part, "update_count")] if _is_torchmetrics(metric) else []
    for part in parts:
        part.persistent(True)
    metric.load_state_dict(state["state"])
    for part, count in zip(parts, state.get("updates", ()), strict=True):
        part._update_count, part._computed = count, None
    if hasattr(metric, "to"):
        metric.to(device)


def reduces_itself(metric: object) -> bool:
    """Return whether ``compute`` reduces over all ranks: torchmetrics, and metrics with ``reduces_itself = True``."""
    return bool(getattr(metric, "reduces_itself", False)) or _is_torchmetrics(metric)


def _entries(metrics: Any, name: str, where: str) -> Iterator[_Entry]:
    """Yield each metric with its name and the object to update; `where` is its position in the argument."""
    if metrics is None and not name:
        return
    if isinstance(metrics, Mapping) and not _is_torchmetrics(metrics):
        for key, part in metrics.items():
            if not isinstance(key, str):
                raise TypeError(f"the names of metrics must be strings; got {key!r}")
            yield from _entries(part, _path(name, key), f"{where}[{key!r}]")
        return
    if isinstance(metrics, list | tuple) and not _names_inputs(metrics):
        for index, part in enumerate(metrics):
            yield from _unnamed(part, name, f"{where}[{index}]")
        return
    if not name:
        yield from _unnamed(metrics, name, where)
        return
    updated = _updated(metrics, where)
    yield _Entry(name, updated.metric, updated)


def _unnamed(part: Any, name: str, where: str) -> Iterator[_Entry]:
    """Yield the metrics of a part that has no name of its own."""
    if isinstance(part, list | tuple | Mapping) and not _names_inputs(part) and not _is_torchmetrics(part):
        yield from _entries(part, name, where)
        return
    updated = _updated(part, where)
    if _is_collection(updated.metric):
        for key, metric in updated.metric.items():  # a ModuleDict
            yield _Entry(_path(name, key), metric, updated)
    else:
        yield _Entry(_path(name, _snake_case(type(updated.metric).__name__)), updated.metric, updated)


def _updated(part: Any, where: str) -> Updated:
    metric, inputs = (part[0], tuple(part[1:])) if _names_inputs(part) else (part, ())
    if isinstance(metric, type):
        raise TypeError(f"{where} is the class {metric.__name__}; expected an instance: {metric.__name__}(...)")
    if not isinstance(metric, Metric):
        raise TypeError(f"{where} must have update, compute and reset, as torchmetrics have; got {metric!r}{_hint(metric)}")
    return Updated(metric, inputs, where)


def _names_inputs(part: object) -> bool:
    """Return whether `part` is a metric with the names of its inputs."""
    return isinstance(part, tuple) and len(part) > 1 and all(isinstance(name, str) for name in part[1:])


def _hint(metric: object) -> str:
    if isinstance(metric, str):
        return ". Put the function into a class with these three methods, or use a metric of torchmetrics"
    if callable(metric):
        return (
            ". Return the number from compute, which then reports its weighted mean; or put the function into a class with "
            "these three methods, or use a metric of torchmetrics"
        )
    return ""


def _path(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def _snake_case(name: str) -> str:
    """Return the name of a class in snake case; ``BLEUScore`` is ``bleu_score``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.strip("_")).lower()


def _is_collection(metric: object) -> bool:
    return _is_torchmetrics(metric) and hasattr(metric, "items")


def _is_torchmetrics(metric: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).__mro__)

"""One evaluation: its loader, metrics and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import nn
from torch.utils.data import SequentialSampler

from cadenza.errors import DataError
from cadenza.loading import TensorBatches, resumable
from cadenza.loading.batches import SampleCounter, with_sample_counts
from cadenza.loading.loaders import Limited, check_loader, length_of, one_pass
from cadenza.loading.metrics import Metrics, by_name
from cadenza.loading.mixture import Mixture, separate_source, set_source
from cadenza.loading.shards import Shard, check_enough_batches
from cadenza.loading.streams import is_sharded_stream
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
        mixed = isinstance(loader, Mixture) and loader.mode != "zip"
        self.sources: dict[str, Iterable[Any]] = loader.leaves() if mixed and isinstance(loader, Mixture) else {}
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
        known = [one for one in batches if one is not None]
        return None if len(known) < len(batches) else -(-sum(known) // self.ranks)

    @staticmethod
    def among(callbacks: Iterable[object], name: str) -> Evaluation | None:
        """Return the evaluation of this name that one of the callbacks carries out; None without one."""
        held = (getattr(one, "evaluation", None) for one in callbacks)
        return next((one for one in held if isinstance(one, Evaluation) and one.name == name), None)

    def trial(self, batches: int) -> Evaluation:
        """Return an evaluation of the first `batches` batches, with separate results."""
        limit = batches if self.limit is None else min(batches, self.limit)
        return Evaluation(self.loader, metrics=self.given_metrics, name=self.name, compute=self.compute, limit=limit)

    def parts(self) -> dict[str, Evaluation]:
        """Return an evaluation for each of the `sources`, with copies of the metrics, to add up its results."""
        parts = {name: Evaluation(one, metrics=deepcopy(self.given_metrics)) for name, one in self.sources.items()}
        for name, part in parts.items():
            part.name = f"{self.name}/{name}"
        return parts

    def follow(self, whole: Evaluation) -> None:
        """Count the current batch of the evaluation that this is a part of."""
        self.batch += 1
        self.samples: int | None = whole.samples

    def read(self, run: Run, data_seed: int) -> Iterator[Any]:
        """Yield the batches. On multiple ranks, each batch is read by one rank. The loaders of a `Mixture` follow one another.

        Raises:
            DataError: There are fewer batches than ranks.
        """
        self.ranks, self._before = run.driver.data_world_size, 0
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
        driver, loader, epoch = run.driver, self._limited(given), run.progress.epoch
        shard = self._shard(run)
        if self.ranks == 1 and not isinstance(given, Mixture):
            if isinstance(given, TensorBatches) or is_sharded_stream(given):  # it must not depend on the number of evaluations
                loader = resumable(loader, data_seed).batches(epoch, 0)
            yield from self.counted(one_pass(with_sample_counts(loader)))
            return
        if self.ranks > 1:
            what = f"the loader of {self.name!r}" if self.source is None else f"the loader {self.source!r} of {self.name!r}"
            for one in given.loaders.values() if isinstance(given, Mixture) else [loader]:
                check_enough_batches(one, length_of(one), shard, what)
            driver.share_buffers(run.model)  # checkpoints contain those of the main process
        whole = isinstance(given, Mixture) and given.stop == "longest"
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

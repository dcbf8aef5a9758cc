"""One evaluation: its loader, metrics and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import SequentialSampler

from cadenza.loading import TensorBatches, resumable
from cadenza.loading.arguments import check_loader
from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.metrics import Metrics, by_name
from cadenza.loading.sample_counts import SampleCounter, with_sample_counts
from cadenza.loading.shards import check_enough_batches
from cadenza.status.counting import counted

if TYPE_CHECKING:
    from cadenza.run import Run


class Evaluation(SampleCounter):
    """One way to evaluate a model: a loader, metrics, and the results of the last pass.

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

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        metrics: Metrics | None = None,
        name: str = "eval",
        compute: Callable[[nn.Module, Any], Any] | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 batch, or None for all; got {limit!r}")
        check_loader(loader, f"the loader of {name!r}")
        if not name or "/" in name:
            raise ValueError(f"name must be the first part of the names of the results, without '/'; got {name!r}")
        self.loader: Iterable[Any] = loader
        self.metrics: dict[str, Any] = by_name(metrics)
        self.name: str = name
        self.given_metrics = metrics
        self.compute: Callable[[nn.Module, Any], Any] | None = compute
        self.limit: int | None = limit
        self.results: dict[str, float] = {}
        """``{"eval/loss": 0.3, "eval/acc": 0.93}`` after the evaluation."""
        self.weights: str | None = None  # the name of the averaged weights that it evaluates; None: those of the model
        self.batch = 0
        """The number of completed batches in the current pass, or in the last one."""
        self.ranks: int = 1
        """The number of ranks over which the batches are sharded."""
        self.complete = False
        """Whether the last pass was complete. It is true in ``on_eval_end``, except after an error."""

    def __repr__(self) -> str:
        batches = "" if self.batches is None else f", {counted(self.batches, 'batch')}"
        results = "".join(f", {name} {value:.6g}" for name, value in self.results.items())
        return f"<Evaluation {self.name!r}{batches}{results}>"

    @property
    def batches(self) -> int | None:
        """The number of batches on this rank; some ranks have one less. None if the loader has no length."""
        batches = length_of(self._limited())
        return None if batches is None else -(-batches // self.ranks)

    def trial(self, batches: int) -> Evaluation:
        """Return an evaluation of the first `batches` batches, with separate results."""
        limit = batches if self.limit is None else min(batches, self.limit)
        return Evaluation(self.loader, metrics=self.given_metrics, name=self.name, compute=self.compute, limit=limit)

    def read(self, run: Run, data_seed: int) -> Iterator[Any]:
        """Yield the batches. On several ranks, each batch is read by one rank.

        Raises:
            DataError: There are fewer batches than ranks.
        """
        driver, loader = run.driver, self._limited()
        self.ranks = driver.world_size
        if self.ranks == 1:
            if isinstance(self.loader, TensorBatches):  # the order must not depend on the number of evaluations
                loader = resumable(loader, data_seed).batches(run.progress.epoch, 0)
            yield from self.counted(with_sample_counts(loader))
            return
        shard = driver.data_shard().uneven()
        check_enough_batches(loader, length_of(loader), shard, f"the loader of {self.name!r}")
        driver.share_buffers(run.model)  # checkpoints contain those of the main process
        source = resumable(loader, data_seed, shard=shard)
        for batch in source.batches(run.progress.epoch, 0):
            self.samples: int = source.size_of(batch)
            yield batch

    def indices(self, run: Run, number: int, data_seed: int) -> Sequence[Any] | None:
        """Return the dataset indices of the samples in batch `number`, from 0; None if they are unknown."""
        sequential = isinstance(getattr(self.loader, "sampler", None), SequentialSampler)
        if self.ranks == 1 and not sequential and not isinstance(self.loader, TensorBatches):  # it draws an order of its own
            return None
        return resumable(self.loader, data_seed, shard=run.driver.data_shard().uneven()).indices(run.progress.epoch, number)

    def _limited(self) -> Iterable[Any]:
        return self.loader if self.limit is None else Limited(self.loader, self.limit)

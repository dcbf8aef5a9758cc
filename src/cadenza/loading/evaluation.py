"""One evaluation: its loader, metrics and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import SequentialSampler

from cadenza.loading import TensorBatches, positioned
from cadenza.loading.batches import Limited, length_of
from cadenza.loading.checks import check_loader
from cadenza.loading.counting import Counts, counting
from cadenza.loading.metrics import Metrics, by_name
from cadenza.loading.shards import check_enough

if TYPE_CHECKING:
    from cadenza.run import Run


class Evaluation(Counts):
    """One way to judge a model: a loader, metrics, and the results of the last time.

    Args:
        loader: Any iterable of batches.
        metrics: By name, objects with ``update(predictions, targets)``, ``compute()`` and ``reset()``. A list, a torchmetrics
            ``MetricCollection`` or a single metric are named by their classes.
        name: The results' prefix.
        compute: ``compute(model, batch)`` returns a mapping; with ``loss`` (shape ()) a mean loss is reported, and metrics
            need ``predictions`` and ``targets``. None: the run's own ``compute_loss``.
        limit: At most this many batches.
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
            raise ValueError(f"an evaluation's name is the first part of its results' names, without '/'; got {name!r}")
        self.loader, self.metrics, self.name = loader, by_name(metrics), name
        self.compute, self.limit = compute, limit
        self.results: dict[str, float] = {}
        """``{"eval/loss": 0.3, "eval/acc": 0.93}`` once it is done."""
        self.weights: str | None = None  # the averaged weights that it judges, by name; None: the model's own
        self.batch = 0
        """Batches done, of the time under way or the last one."""
        self.ranks = 1
        """How many processes share its batches."""
        self.complete = False
        """Whether the last time went through to its end; true when ``on_eval_end`` fires, unless an error cut it short."""

    @property
    def batches(self) -> int | None:
        """How many batches it will have on this rank, or one less; None if the loader does not say."""
        batches = length_of(self._limited())
        return None if batches is None else -(-batches // self.ranks)

    def trial(self, batches: int) -> Evaluation:
        """Return the same evaluation of a few batches, with results of its own."""
        limit = batches if self.limit is None else min(batches, self.limit)
        return Evaluation(self.loader, metrics=self.metrics, name=self.name, compute=self.compute, limit=limit)

    def read(self, run: Run, data_seed: int) -> Iterator[Any]:
        """Yield its batches: on several ranks this one's, each batch on one of them alone.

        Raises:
            DataError: There are fewer batches than ranks.
        """
        driver, loader = run.driver, self._limited()
        self.ranks = driver.world_size
        if self.ranks == 1:
            if isinstance(self.loader, TensorBatches):  # an order that does not depend on how often one evaluates
                loader = positioned(loader, data_seed).batches(run.progress.epoch, 0)
            yield from self.counted(counting(loader))
            return
        share = driver.share().uneven()
        check_enough(loader, length_of(loader), share, f"the loader of {self.name!r}")
        driver.share_buffers(run.model)  # those of the main process are the ones that are saved
        source = positioned(loader, data_seed, share=share)
        for batch in source.batches(run.progress.epoch, 0):
            self.samples = source.size_of(batch)
            yield batch

    def indices(self, run: Run, number: int, data_seed: int) -> Sequence[Any] | None:
        """Return the indices in the data set of the samples in a batch, from 0; None if the loader does not know them."""
        in_turn = isinstance(self.loader, TensorBatches) or isinstance(getattr(self.loader, "sampler", None), SequentialSampler)
        if self.ranks == 1 and not in_turn:  # the loader draws its own order
            return None
        return positioned(self.loader, data_seed, share=run.driver.share().uneven()).indices(run.progress.epoch, number)

    def _limited(self) -> Iterable[Any]:
        return self.loader if self.limit is None else Limited(self.loader, self.limit)

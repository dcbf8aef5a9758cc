"""An evaluation with the events of pytorch-accelerated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.engine.session import session_of
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.metrics import Metrics

if TYPE_CHECKING:
    from cadenza.run import Run


class EvalEpoch(Evaluation):
    """An evaluation epoch of pytorch-accelerated."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        compute: Callable[[nn.Module, Any], Any] | None,
        metric: str = "eval_loss_epoch",
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(loader, name=name, compute=compute, metrics=metrics)
        self.metric = metric
        """The name of its loss in the run history, without a prefix."""

    @property
    def is_intermediate(self) -> bool:
        """Whether it runs inside a training epoch."""
        return self.metric == "intermediate_eval_loss"


def is_intermediate(run: Run, evaluation: Evaluation) -> bool:
    """Return whether an evaluation runs inside a training epoch."""
    return evaluation.is_intermediate if isinstance(evaluation, EvalEpoch) else session_of(run).cursor.in_epoch

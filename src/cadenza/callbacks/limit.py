"""Use a few batches of each loader, for a quick test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least_or_none
from cadenza.hooks.order import Phase
from cadenza.loading.loaders import Limited

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class Limit(Callback):
    """Use only the first batches of each loader, for a quick test of the whole run.

    With multiple ranks: limits the batches of each rank in training, and of all ranks together in an evaluation; it does not
    communicate.

    Args:
        train: The number of batches in an epoch. None: all.
        evaluation: The number of batches in an evaluation or prediction. None: all.

    Raises:
        ValueError: A number is below 1; or `train` is given in a loop of ``cadenza.attach``, which has no loader.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[Limit(train=3)], epochs=2).progress.batch
    6
    """

    phase: Phase | None = Phase.LENGTH

    def __init__(self, train: int | None = None, evaluation: int | None = None) -> None:
        self.train: int | None = at_least_or_none(1, "train", train)
        self.evaluation: int | None = at_least_or_none(1, "evaluation", evaluation)
        self._given: dict[Evaluation, int | None] = {}

    def on_setup(self, run: Run) -> None:
        if self.train is not None:
            if not run.progress.has_epochs:
                raise ValueError(
                    f"Limit(train={self.train}) limits the batches of a loader, and a loop of cadenza.attach(...) has none. "
                    "Give attach(max_steps=...), and Limit(evaluation=...) for evaluations."
                )
            run.replace_loader(Limited(run.loader, self.train))

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        self._given[evaluation] = evaluation.limit
        if self.evaluation is not None:
            evaluation.limit = min(self.evaluation, evaluation.limit or self.evaluation)

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation in self._given:  # it is missing if another callback failed before
            evaluation.limit = self._given.pop(evaluation)

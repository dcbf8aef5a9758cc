"""A quick try: a few batches of each loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.loading.loaders import Limited

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class Limit(Callback):
    """Use only the first batches of each loader, to see in a minute whether everything works.

    Args:
        train: Batches in an epoch; None leaves the training loader alone.
        evaluation: Batches in an evaluation or prediction; None leaves them alone.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[Limit(train=3)], epochs=2).progress.batch
    6
    """

    phase = Phase.LENGTH

    def __init__(self, train: int | None = None, evaluation: int | None = None) -> None:
        for name, count in (("train", train), ("evaluation", evaluation)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, or None; got {count!r}")
        self.train, self.evaluation = train, evaluation
        self._given: dict[Evaluation, int | None] = {}

    def on_setup(self, run: Run) -> None:
        if self.train is not None:
            run.replace_loader(Limited(run.loader, self.train))

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        self._given[evaluation] = evaluation.limit
        if self.evaluation is not None:
            evaluation.limit = min(self.evaluation, evaluation.limit or self.evaluation)

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation in self._given:  # not if another callback failed before
            evaluation.limit = self._given.pop(evaluation)

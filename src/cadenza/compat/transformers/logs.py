"""The values of ``on_log``: the mean loss of the training, and the names of results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.compat.adapter.view import OfRun
from cadenza.engine.evaluation import Prediction
from cadenza.engine.step_state import mean_loss
from cadenza.records.scalars import as_number, weighted_sum

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_NAMES = {"train/loss": "loss", "train/lr": "learning_rate", "train/grad_norm": "grad_norm"}

SPEEDS = frozenset(f"train/{name}" for name in ("samples_per_s", "steps_per_s", "tokens_per_s"))
"""Values that `LogTraining` logs and transformers does not."""

MOST_PENDING = 512
"""The number of steps after which losses are summed, to keep the lists short."""

NO_INPUT = (TypeError, KeyError, IndexError, AttributeError)
"""The errors of reading the main input of a batch that has none."""


def as_logs(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the values of a native record under the names of transformers, which adds ``train/`` in its trackers."""
    return {_NAMES.get(name, name.removeprefix("train/")): value for name, value in values.items() if name not in given}


def prefix_of(evaluation: Evaluation, names: Collection[str]) -> str:
    """Return the prefix of the results of an evaluation: ``eval``, or ``eval_NAME`` for one of several."""
    if isinstance(evaluation, Prediction):
        return "test"
    return evaluation_prefix(evaluation.name, names)


def evaluation_prefix(name: str, names: Collection[str]) -> str:
    """Return the prefix of the results of the evaluation `name`, one of `names`."""
    if name == "eval" or name.startswith("eval_"):
        return name
    return "eval" if len(names) < 2 else f"eval_{name}"


class TrainingLogs(OfRun):
    """The sum of the losses since the last log, and the number of floating point operations.

    Args:
        run: The run.
    """

    names: frozenset[str] = frozenset(_NAMES)
    """The native names of what it logs."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.total: Tensor = torch.zeros((), device=run.device)
        """The sum of the losses of the steps since the last log, on this rank, of steps already summed."""
        self.losses: list[tuple[list[Tensor], list[float | Tensor]]] = []
        """The losses and weights of batches of steps not yet summed."""
        self.shapes: defaultdict[torch.Size, int] = defaultdict(int)
        """The shapes of main inputs with elements not yet summed, with the number of batches of each shape."""
        self.logged_at: int = 0
        """The step of the last log."""
        self.main_input: str | None = None
        """The name of the input with counted elements; None for a model without ``num_parameters``."""
        self.by_batch: bool = False
        """Whether a step may have multiple batches with elements to count."""
        self._all = 0.0
        self._tokens = 0
        self._flops = 0.0

    def begin(self, run: Run) -> None:
        """Start the training."""
        model: Any = run.model
        if hasattr(model, "num_parameters"):
            self.main_input = getattr(model, "main_input_name", "input_ids")
            self._flops = 6.0 * model.num_parameters(exclude_embeddings=True)  # the formula of transformers, for one token
        self.by_batch = self.main_input is not None and self.session.step.most > 1
        if not run.progress.step:
            self.logged_at, self._all = 0, 0.0

    def add_up(self) -> None:
        """Add the losses and the elements of the steps since the last time to the sums. Every rank must call this."""
        steps, self.losses = self.losses, []
        if steps and self.session.sync.together:
            self.total = self.total + self._of_all_ranks(steps)
            steps = []
        for losses, weights in steps:
            if not losses:
                continue
            (loss, *others), weight = losses, weights[0] if weights else 1.0
            if not others and type(weight) is float:  # most steps return here without a call
                self.total = self.total + loss if weight else self.total
            else:
                self.total = self.total + (_mean_or_0(losses, weights) if weights else sum(losses) / len(losses))
        for shape, count in self.shapes.items():
            self._tokens += shape.numel() * count
        self.shapes.clear()

    def _of_all_ranks(self, steps: Sequence[tuple[list[Tensor], list[float | Tensor]]]) -> Tensor:
        """Return the sum of the mean losses of steps, each over the batches of all ranks. Every rank must call this."""
        own = self.total.new_zeros((2, len(steps)))  # the weighted loss of each step on this rank, and its weight
        for index, (losses, weights) in enumerate(steps):
            counted = weights or [1.0] * len(losses)
            for loss, weight in zip(losses, counted, strict=True):
                own[0, index] += weighted_sum(loss, as_number(weight, loss.device))
                own[1, index] += weight
        sums = self.session.driver.reduce(own, "sum")
        return (sums[0] / (sums[1] + (sums[1] == 0))).sum()

    def take(self, step: int) -> dict[str, Any]:
        """Return the mean loss since the last log, over all ranks. Every rank must call this."""
        total = self._reduced()
        loss = total / (step - self.logged_at)
        self._all += total
        self.logged_at = step
        self.total = torch.zeros_like(self.total)
        return {"loss": loss}

    def mean_of_all(self, steps: int) -> float:
        """Return the mean loss over the `steps` steps of the run. Every rank must call this."""
        return (self._all + self._reduced()) / max(steps, 0.001)

    def flos(self, before: float) -> float:
        """Return the number of floating point operations on all ranks. Every rank must call this."""
        self.add_up()
        tokens, self._tokens = self._tokens, 0
        if not self._flops:
            return float(before)
        if self.session.driver.world_size > 1:
            counted = torch.tensor(float(tokens), dtype=torch.float64, device=self.session.driver.device)
            tokens = int(self.session.driver.reduce(counted, "sum").item())
        return before + self._flops * tokens

    def average(self) -> None:
        """Make the sum equal on all ranks for a checkpoint, which saves the main process's. Every rank must call this."""
        driver = self.session.driver
        self.add_up()
        if driver.world_size > 1:
            self.total = driver.reduce(self.total, "mean")

    def _reduced(self) -> float:
        self.add_up()
        driver = self.session.driver
        return float((driver.reduce(self.total, "mean") if driver.world_size > 1 else self.total).item())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        self.add_up()
        state = {"total": self.total, "all": self._all, "logged_at": self.logged_at, "tokens": self._tokens}
        session = self.session
        if session.driver.world_size > 1 and session.sync.together:  # not after an error on one rank
            state["ranks"] = session.driver.gather((self.total.cpu(), self._tokens))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        driver, state = self.session.driver, dict(state)
        ranks = state.get("ranks", [])
        if len(ranks) == driver.world_size:
            state["total"], state["tokens"] = ranks[driver.rank]
        elif ranks:  # the number of ranks differs: use the mean and the sum
            state["total"] = torch.stack([total for total, _ in ranks]).mean(0)
            state["tokens"] = sum(tokens for _, tokens in ranks) if driver.is_main else 0
        self.total = state["total"].to(self.session.driver.device)
        self._all, self.logged_at, self._tokens = state["all"], state["logged_at"], state["tokens"]


def _mean_or_0(losses: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the mean loss of a step; 0 if all its weights are 0, as transformers counts a loss that is NaN."""
    mean = mean_loss(losses, weights)
    return torch.where(as_number(sum(weights), mean.device) == 0, 0.0, mean)

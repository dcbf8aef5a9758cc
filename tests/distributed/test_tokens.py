"""Tokens on several ranks: their sum is the same on all of them after every step on which something depends."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, SequenceLength
from cadenza.testing import launch
from tests.distributed.parts import trainer
from tests.distributed.standing import on_ranks

LENGTHS = [3, 5, 2, 7, 4, 6, 1, 8, 9, 2, 5, 3]
RANKS = (1, 2, 3)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def with_tokens(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    return {"loss": loss_of(model, batch), "tokens": batch.numel()}


def step_of(run: Run, batch: Tensor) -> dict[str, Any]:
    loss = loss_of(run.model, batch)
    run.backward(loss)
    run.update()
    return {"loss": loss, "tokens": batch.numel()}


WAYS: dict[str, dict[str, Any]] = {
    "outputs": {"compute_loss": with_tokens},
    "function": {"compute_loss": loss_of, "tokens": torch.Tensor.numel},
    "step_fn": {"step_fn": step_of},
}


def fit(*callbacks: Callback, resume: Any = False, **arguments: Any) -> Run:
    torch.manual_seed(0)
    batches = [torch.linspace(-1, 1, length).unsqueeze(1) for length in LENGTHS]
    arguments = {"max_epochs": None, "seed": 1, "optimizer": descent, "compute_loss": None, **arguments}
    return trainer(batches, model=nn.Linear(1, 1), callbacks=callbacks, **arguments).fit(resume=resume)


def descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def in_steps(ranks: int) -> list[int]:
    """Return the tokens after each step of an epoch."""
    return [*accumulate(sum(LENGTHS[first : first + ranks]) for first in range(0, len(LENGTHS), ranks))]


class Noted(Callback):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_step_end(self, run: Run) -> None:
        self.tokens.append(run.progress.tokens)


def ended(way: str) -> list[tuple[int, int, list[int]]]:
    found = []
    for limit in (9, 21, 40, 60):
        noted = Noted()
        run = fit(noted, max_tokens=limit, **WAYS[way])
        found.append((run.progress.step, run.progress.tokens, noted.tokens))
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_end_with_the_step_that_reaches_max_tokens(ranks: int) -> None:
    epoch = in_steps(ranks)
    after = [*epoch, *(tokens + epoch[-1] for tokens in epoch)]
    expected = []
    for limit in (9, 21, 40, 60):
        steps = next(index for index, tokens in enumerate(after, 1) if tokens >= limit)
        expected.append((steps, after[steps - 1], after[:steps]))
    for seen in on_ranks(lambda: [ended(way) for way in WAYS], ranks) if ranks > 1 else [[ended(way) for way in WAYS]]:
        assert seen == [expected] * len(WAYS)


def test_tokens_are_summed_over_ranks() -> None:
    """Without a limit the ranks may leave exchanges out."""

    def counts(way: str) -> tuple[int, int]:
        whole = fit(max_epochs=2, **WAYS[way]).progress.tokens
        return whole, whole if way == "step_fn" else fit(max_epochs=2, accumulate=2, **WAYS[way]).progress.tokens

    assert on_ranks(lambda: [counts(way) for way in WAYS]) == [[(2 * sum(LENGTHS),) * 2] * 3] * 2


def test_a_batch_that_all_ranks_train_on_counts_once() -> None:
    def whole() -> int:
        rows: Any = [torch.ones(4) for _ in range(3)]
        data: Any = DataLoader(rows, batch_size=1)  # 3 samples for 2 ranks
        model = nn.Linear(4, 1)
        return trainer(data, model=model, compute_loss=loss_of, max_epochs=1, tokens=Tensor.numel).fit().progress.tokens

    assert on_ranks(whole) == [12] * 2


def test_a_run_that_resumes_on_several_ranks_ends_where_the_whole_run_does(tmp_path: Path) -> None:
    def runs() -> list[Any]:
        found: list[Any] = []
        for way in ("outputs", "function"):
            whole = fit(max_tokens=50, **WAYS[way])
            fit(Checkpoint(1), max_steps=3, directory=tmp_path / way, **WAYS[way])
            rest = fit(Checkpoint(1), max_tokens=50, directory=tmp_path / way, resume="auto", **WAYS[way])
            found += [
                rest.progress.now() == whole.progress.now(),
                all(map(torch.equal, rest.model.parameters(), whole.model.parameters())),
            ]
        return found

    assert on_ranks(runs, 2) == [[True] * 4] * 2


def test_the_error_of_a_rank_that_does_not_count_ends_all() -> None:
    def partly(model: nn.Module, batch: Tensor) -> Any:
        return with_tokens(model, batch) if batch.numel() != LENGTHS[3] else loss_of(model, batch)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: fit(compute_loss=partly, max_tokens=40) and None, 2)
    assert "max_tokens=40 needs the number of tokens in each batch" in repr(caught.value.exceptions[0])


def test_schedules_of_tokens_are_due_at_the_step_that_reaches_them() -> None:
    def due(way: str) -> list[int]:
        steps: list[int] = []
        note = on(Callback.on_step_end, every="10 tokens")(lambda run: steps.append(run.progress.step))
        fit(note, max_epochs=1, **WAYS[way])
        return steps

    after = [0, *in_steps(2)]
    expected = [step for step in range(1, len(after)) if after[step] // 10 > after[step - 1] // 10]
    assert on_ranks(lambda: [due(way) for way in WAYS], 2) == [[expected] * len(WAYS)] * 2


def test_points_in_samples_and_tokens_are_reached_in_time_although_no_callback_is_due_for_many_steps() -> None:
    def reached(point: str, **arguments: Any) -> list[int]:
        data = [torch.ones(2, 1)] * 200  # 4 samples and 4 tokens a step
        run = trainer(data, model=nn.Linear(1, 1), compute_loss=with_tokens, max_epochs=1, **arguments).fit()
        return [one.when.step for one in run.decisions if one.what in ("accumulation changed", "sequence length changed")]

    def all_reached() -> list[list[int]]:
        points = ("200 samples", "200 tokens")
        changed = [reached(point, accumulate={0: 1, point: 2}) for point in points]
        return changed + [reached(point, callbacks=[SequenceLength({0: 2, point: 1})]) for point in points]

    assert on_ranks(all_reached, 2) == [[[50]] * 4] * 2

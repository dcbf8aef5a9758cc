"""What waits for other ranks in a step besides requests and records: schedules, weights, skips, loops of one's own, streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.hooks.schedule import Every, Schedule, When
from cadenza.testing import launch
from tests.distributed.parts import loader, trainer, weights_of
from tests.distributed.parts import own_rank as rank
from tests.scale.test_steps import plain_steps


def never(run: Run) -> bool:
    return False


class Skips(Callback):
    """A callback that may skip batches, and does not."""

    def on_batch_start(self, run: Run, batch: Any) -> None: ...
    def on_before_backward(self, run: Run, outputs: Any) -> None: ...


class Logs(Skips):
    skips = False


def scheduled(function: Callable[[Run], bool]) -> Callback:
    return on(Callback.on_step_end, every=function)(lambda run: None)


CASES: dict[str, tuple[int, int, Callable[[], list[Callback]], dict[str, Any]]] = {
    "two schedules that are functions": (0, 4, lambda: [scheduled(never), Checkpoint(never)], {}),
    "a callback that may skip": (2, 4, lambda: [Skips()], {}),
    "a callback that skips nothing": (0, 2, lambda: [Logs()], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_waits_of_a_plain_step_are_those_of_the_guide(name: str, tmp_path: Path) -> None:
    expected, most, make, arguments = CASES[name]
    for waited, started in launch(lambda: plain_steps(make, tmp_path / "run", **arguments)):
        assert waited == [expected] * 5
        assert max(started) <= most


# -- schedules that are functions -------------------------------------------------------------------


def due_at(function: Callable[[Run], bool] | Schedule, data: Any = None, **arguments: Any) -> list[int]:
    """Return the steps after which a listener with this schedule is called on this rank, in two epochs of 4 steps."""
    steps: list[int] = []
    note = on(Callback.on_step_end, every=function)(lambda run: steps.append(run.progress.step))
    trainer(loader(4 * 2 * 4) if data is None else data, callbacks=[note], **arguments).fit()
    return steps


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (lambda run: run.progress.step in (2, 3, 8), [2, 3, 8]),  # on all ranks: at once
        (lambda run: rank() == 1 and run.progress.step in (2, 6), [3, 7]),  # on one: a step later
        (lambda run: run.progress.step == 2 + rank(), [3, 4]),  # on one, then on the other
        (lambda run: rank() == 0 and run.progress.step in (4, 8), [4, 8]),  # at the end of an epoch all ranks wait
    ],
)
def test_a_schedule_that_is_a_function_is_due_at_the_same_steps_on_all_ranks(
    own: Callable[[Run], bool], expected: list[int]
) -> None:
    assert launch(lambda: due_at(own)) == [expected] * 2


def test_a_function_that_is_part_of_a_schedule_is_due_at_once_if_it_is_on_one_rank() -> None:
    part = When(lambda run: rank() == 1 and run.progress.step == 2)
    assert launch(lambda: due_at(part | Every("5 steps"))) == [[2, 5]] * 2


class Stream:
    """Batches of a loader, without a length."""

    def __iter__(self) -> Any:
        return iter(loader(4 * 2 * 4, shuffle=False))


@pytest.mark.parametrize(("limits", "expected"), [({"max_epochs": 2}, [4, 8]), ({"max_steps": 8, "max_epochs": None}, [5, 8])])
def test_a_function_that_is_true_on_one_rank_in_the_last_step_of_a_stream_is_not_lost(
    limits: dict[str, Any], expected: list[int]
) -> None:
    assert launch(lambda: due_at(lambda run: rank() == 1 and run.progress.step in (4, 8), Stream(), **limits)) == [expected] * 2


def test_a_checkpoint_holds_that_a_schedule_is_due_at_the_next_step(tmp_path: Path) -> None:
    def trained(resume: Any) -> tuple[Tensor, list[int]]:
        calls: list[int] = []

        @on(Callback.on_step_end, every=lambda run: rank() == 1 and run.progress.step % 3 == 2)
        def halve(run: Run) -> None:
            calls.append(run.progress.step)
            run.optimizers[0].param_groups[0]["lr"] *= 0.5

        folder = tmp_path / ("again" if resume else "whole")
        one = trainer(loader(96), max_steps=9, directory=folder, callbacks=[halve, Checkpoint("5 steps", keep_last=9)])
        one.fit(resume=resume)
        return weights_of(one), calls

    def both() -> Any:
        whole = trained(False)
        (saved,) = (tmp_path / "whole" / "checkpoints").glob("*5")
        return whole, trained(saved)

    for (weights, calls), (others, later) in launch(both):
        assert (calls, later) == ([3, 6, 9], [6, 9])
        assert weights.equal(others)

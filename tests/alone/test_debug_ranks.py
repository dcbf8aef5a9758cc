"""``Trainer(debug_ranks=True)``: calls that do not match are named on all ranks before they run, and no process hangs."""

from __future__ import annotations

import time
from collections.abc import Callable as Function
from typing import Any

import pytest
import torch
from torch import distributed as dist

from cadenza import Callback, Run, on
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.drivers.sharding import whole
from cadenza.engine.arguments import checked_debugging
from cadenza.errors import DistributedError
from cadenza.testing import launch
from tests.distributed.parts import own_rank, trainer, weights_of

FLOATS = torch.zeros(3)


def each_in_its_order(run: Run) -> None:
    calls: list[Function[[], object]] = [lambda: dist.all_reduce(FLOATS), lambda: dist.broadcast(FLOATS, 0)]
    for call in calls if run.is_main else reversed(calls):
        call()


def fail(run: Run) -> None:
    if own_rank() == 1:
        raise ValueError("on purpose")
    run.driver.barrier()


def come_late(run: Run) -> None:
    if own_rank() == 1:
        time.sleep(1.5)
    run.driver.barrier()


PLANTED: dict[str, Function[[Run], object]] = {
    "on_rank_0_only": lambda run: run.is_main and dist.all_reduce(FLOATS),
    "on_rank_1_only": lambda run: run.is_main or run.driver.reduce(FLOATS),
    "in_other_order": each_in_its_order,
    "of_other_shape": lambda run: dist.all_reduce(torch.zeros(2 + own_rank())),
    "of_other_dtype": lambda run: dist.all_reduce(torch.zeros(2, dtype=torch.float64 if run.is_main else torch.float32)),
    "of_other_kind": lambda run: dist.all_reduce(FLOATS, dist.ReduceOp.MAX if run.is_main else dist.ReduceOp.SUM),
    "from_another_rank": lambda run: dist.broadcast(FLOATS, own_rank()),
    "after_an_early_return": lambda run: own_rank() == 1 or run.driver.gather("mine"),
    "after_an_exception": fail,
    "on_a_slow_rank": come_late,
}


def fit(moment: Any, name: str) -> str:
    """Return the error of a run with a planted mismatch; an empty string if it has none."""

    def once(run: Run) -> None:
        if run.progress.step == 1 and not done:
            done.append(True)
            PLANTED[name](run)

    def with_batch(run: Run, batch: Any) -> None:
        once(run)

    done: list[bool] = []
    once.__name__ = with_batch.__name__ = name
    mine = on(moment)(with_batch if moment is Callback.on_batch_start else once)
    one = trainer(callbacks=[mine], driver=DdpDriver("cpu", timeout_s=60), debug_ranks=1.0, max_epochs=1)
    try:
        one.fit()
    except (DistributedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def expected(moment: str, name: str, rank: int) -> tuple[str, ...]:
    """Return what an error, or a warning, says."""
    here = f"at step 1 in `{name}.{moment}` (test_debug_ranks.py:"
    if name == "after_an_exception":
        return ("ValueError: on purpose",) if rank == 1 else ("rank 0 ends because", "rank 1: ValueError: on purpose")
    if name == "on_a_slow_rank":
        return "rank 0 calls all_reduce", f"rank 1 is {here}", "has not called it yet"
    return "DistributedError", "rank 0 calls", "rank 1 calls", here  # first the rank that saw it


@pytest.mark.parametrize(
    "moment",
    ["on_step_end", *(pytest.param(name, marks=pytest.mark.long) for name in ("on_batch_start", "on_before_optimizer_step"))],
)
def test_each_of_ten_planted_mismatches_is_named_on_all_ranks(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    def fits() -> list[str]:
        said = []
        for name in PLANTED:
            caplog.clear()
            said.append(fit(getattr(Callback, moment), name) or "; ".join(caplog.messages))
            dist.barrier()  # no collective is left behind
        return said

    for rank, said in enumerate(launch(fits)):
        for name, text in zip(PLANTED, said, strict=True):
            if name != "on_a_slow_rank" or rank == 0:  # the first rank that waits shows the warning
                for part in expected(moment, name, rank):
                    assert part in text, (rank, name, text)


def test_a_rank_that_waits_alone_for_the_shards_of_a_weight_is_named_and_not_taken_for_a_slow_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sharded tensors communicate without functions of torch.distributed that could be compared."""

    def fits() -> tuple[str, list[str]]:
        @on(Callback.on_step_end, at=1)
        def gather(run: Run) -> None:
            if run.is_main:
                whole(next(run.model.parameters()))

        one = trainer(callbacks=[gather], driver=FsdpDriver("cpu", timeout_s=5), debug_ranks=0.5)
        with pytest.raises(DistributedError) as caught:
            one.fit()
        return str(caught.value), caplog.messages

    for said, warned in launch(fits):
        assert "rank 0 is at step 1 in `gather.on_step_end` (test_debug_ranks.py:" in said
        assert "waits for the others there, and calls none" in said
        assert not [text for text in warned if "has not called it yet" in text]


def test_a_run_without_mismatch_is_the_same_and_the_functions_of_torch_are_restored() -> None:
    def fits() -> bool:
        before = dist.all_reduce
        during: list[bool] = []

        @on(Callback.on_step_end)
        def exchange(run: Run) -> None:
            during.append(dist.all_reduce is not before)
            dist.all_gather_object([None, None], "mine")

        weights = []
        for debug_ranks in (False, True):
            one = trainer(callbacks=[exchange], debug_ranks=debug_ranks)
            one.fit()
            weights.append(weights_of(one))
        assert during == [False] * 6 + [True] * 6
        return torch.equal(*weights) and dist.all_reduce is before

    assert launch(fits) == [True, True]


def test_debug_ranks_is_true_or_a_number_of_seconds() -> None:
    assert (checked_debugging(False), checked_debugging(True), checked_debugging(3)) == (None, 10.0, 3.0)
    with pytest.raises(ValueError, match="debug_ranks must be True, False or a number of seconds greater than 0; got 0"):
        checked_debugging(0)

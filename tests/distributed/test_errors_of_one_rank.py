"""An error in a hook of one rank ends the run on all ranks, at once, also where no exchange follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from cadenza.testing import launch
from tests.distributed.parts import loader as made_loader
from tests.distributed.parts import own_rank, squared_error, trainer
from tests.distributed.standing import on_ranks

WAITS_S = 60.0
"""The time limit of the drivers: what is told takes less than a twentieth of it."""

ddp, fsdp = partial(DdpDriver, "cpu", timeout_s=WAITS_S), partial(FsdpDriver, "cpu", timeout_s=WAITS_S)

MOMENTS = (
    "on_setup on_sanity_start on_sanity_end on_fit_start on_eval_start on_eval_end on_epoch_end on_fit_end on_save at_end "
    "after_step"
)


def raising(moment: str, which: int) -> Callback:
    """Return a callback that raises an error on one rank."""

    def fail(*_: Any) -> None:
        if own_rank() == which:
            raise ZeroDivisionError("on purpose")

    if moment in ("at_end", "after_step"):
        return on(Callback.on_fit_start)(lambda run: getattr(run, moment)(fail))
    return on(getattr(Callback, moment))(fail)


def problem_of(act: Callable[[], object]) -> tuple[str, float]:
    """Return the error of `act`, and when it came."""
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "no error", time.monotonic()


def check(results: list[tuple[str, float]], which: int) -> None:
    own, other = results[which], results[1 - which]
    assert own[0] == "ZeroDivisionError: on purpose"
    assert other[0].startswith(f"DistributedError: rank {1 - which} ends because another process ended. rank {which}: {own[0]}")
    assert abs(own[1] - other[1]) < 3


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("make", [ddp, fsdp])
@pytest.mark.parametrize("moment", MOMENTS.split())
def test_an_error_in_a_hook_of_one_rank_reaches_the_other(
    moment: str, make: Callable[[], Driver], which: int, tmp_path: Path
) -> None:
    def work() -> tuple[str, float]:
        evaluate = Evaluate(made_loader(16), sanity_batches=1)
        callbacks = [evaluate, Checkpoint("2 steps"), raising(moment, which)]
        return problem_of(trainer(callbacks=callbacks, driver=make(), max_steps=4, directory=tmp_path).fit)

    check(launch(work), which)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("strict", [False, True])
def test_an_error_before_a_save_of_all_ranks_ends_a_rank_that_waits_in_it(strict: bool, which: int, tmp_path: Path) -> None:
    def work() -> tuple[str, float]:
        writes = Checkpoint("2 steps", background=False, strict=strict)
        callbacks = [writes, raising("on_save", which)]
        return problem_of(trainer(callbacks=callbacks, driver=ddp(), max_steps=4, directory=tmp_path).fit)

    check(launch(work), which)


class Unsaved(Callback):
    """Has a state that cannot be collected on one rank once the training has begun."""

    each_rank = True

    def __init__(self, which: int) -> None:
        self._which, self._began = which, False

    def on_step_end(self, run: Run) -> None:
        self._began = True

    def state_dict(self) -> dict[str, Any]:
        if self._began and own_rank() == self._which:
            raise ZeroDivisionError("on purpose")
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("options", [{}, {"background": False}, {"strict": True}, {"weights_only": True}])
@pytest.mark.parametrize("make", [ddp, fsdp])
@pytest.mark.parametrize("fail", [partial(raising, "on_save"), Unsaved])
def test_an_error_in_the_save_at_the_end_of_one_rank_reaches_the_other(
    fail: Callable[[int], Callback], make: Callable[[], Driver], options: dict[str, bool], which: int, tmp_path: Path
) -> None:
    def work() -> tuple[str, float]:
        callbacks = [Checkpoint("50 steps", **options), fail(which)]  # type: ignore[arg-type]
        return problem_of(trainer(callbacks=callbacks, driver=make(), max_epochs=1, directory=tmp_path).fit)

    check(on_ranks(work), which)


@pytest.mark.parametrize("strict", [False, True])
def test_a_full_disk_of_the_only_rank_that_writes_reaches_the_other_at_the_end(strict: bool, tmp_path: Path) -> None:
    def work() -> str:
        fills = on(Callback.on_save)(lambda run, snapshot: full(LocalFiles) if own_rank() == 0 else None)
        saves = Checkpoint("50 steps", weights_only=True, strict=strict)
        return problem_of(trainer(callbacks=[saves, fills], driver=ddp(), max_epochs=1, directory=tmp_path).fit)[0]

    def full(files: type[LocalFiles]) -> None:
        def write(*_: Any) -> None:
            raise OSError(ENOSPC, "No space left on device")

        setattr(files, "_write", write)  # noqa: B010  # in this process only

    own, other = launch(work)
    assert own.startswith("OSError: [Errno 28]" if strict else "CheckpointLostError")
    assert other.startswith(
        "DistributedError: rank 1 ends because another process ended. rank 0: OSError: [Errno 28] No space left on device"
        if strict
        else "CheckpointLostError"
    )


@pytest.mark.parametrize("moment", ["on_fit_end", "at_end"])
def test_the_outcome_of_all_ranks_is_that_the_run_failed(moment: str, tmp_path: Path) -> None:
    def work() -> str:
        one = trainer(callbacks=[raising(moment, 1)], driver=ddp(), max_steps=2, directory=tmp_path)
        problem_of(one.fit)
        outcome = one.run.outcome
        assert outcome is not None
        return outcome.kind

    assert on_ranks(work) == ["failed", "failed"]
    assert '"failed"' in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("act", ["evaluate", "predict"])
def test_an_error_at_the_end_of_an_evaluation_reaches_the_other_rank(act: str, which: int) -> None:
    def work() -> tuple[str, float]:
        one = trainer(callbacks=[raising("on_eval_end", which)], driver=ddp())
        compute = squared_error if act == "evaluate" else lambda model, batch: model(batch[0])
        return problem_of(partial(getattr(one, act), made_loader(16), compute=compute))

    check(on_ranks(work), which)


def test_a_run_that_no_error_ends_goes_on_to_the_next_one() -> None:
    def work() -> list[str]:
        kinds = list[str]()
        for _ in range(2):
            run: Run = trainer(driver=ddp(), max_steps=2).fit()
            assert run.outcome is not None
            kinds.append(run.outcome.kind)
        return kinds

    assert on_ranks(work) == [["finished"] * 2] * 2

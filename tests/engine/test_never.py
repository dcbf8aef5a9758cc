"""A listener that never fires is named before the first step: the verdict is what a real run then does."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.engine.plan import never
from cadenza.engine.session import session_of
from cadenza.hooks.counting import counting_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment, moments_of
from cadenza.testing import tiny_run

COUNTED = [moment for moment in moments_of(Callback).values() if counting_of(moment).unit != "time"]
RUNS = [
    {"epochs": 2, "batches": 5},
    {"epochs": 2, "batches": 5, "accumulate": 2},
    {"steps": 3, "batches": 5},
    {"steps": 7, "batches": 5},
    {"steps": 10, "batches": 5},
    {"steps": 6, "batches": 5, "accumulate": 2},
    {"steps": 5, "batches": 5, "accumulate": 2},
    {"epochs": 2, "steps": 7, "batches": 5},
    {"epochs": 1, "steps": 7, "batches": 5},
    {"epochs": 2, "steps": 10, "batches": 5},
]


class Logs(Callback):
    """A record at each step, so that on_log comes."""

    def on_step_end(self, run: Run) -> None:
        run.log("x", 1)


def counting(moment: Moment, **filter: int) -> Callback:
    def seen(*_: Any) -> None:
        pass

    return on(moment, **filter)(seen)  # type: ignore[arg-type]  # moments of every shape


@pytest.mark.parametrize("length", RUNS, ids=str)
def test_the_verdict_is_what_the_run_does(length: dict[str, int]) -> None:
    filters = [{name: count} for name in ("every", "at") for count in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12)]
    run = tiny_run(callbacks=[Logs(), *(counting(moment, **filter) for moment in COUNTED for filter in filters)], **length)
    silent = {(name, str(one)) for name, one in heard(run) if not one.calls}
    judged = {str(one) for one, _ in never(hooks_of(run), run.progress, session_of(run).step.window.size)}
    assert {text for _, text in silent} == judged
    assert silent


def heard(run: Run) -> list[tuple[str, Any]]:
    listeners = [one for each in hooks_of(run).by_moment.values() for one in each]
    return [(one.moment.__name__, one) for one in listeners if one.schedule is not None]

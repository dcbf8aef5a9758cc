"""Who sleeps stands aside: callbacks that are seldom due are called when they are due, in order, and are not asked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cadenza import Callback
from cadenza.callbacks import Warmup
from cadenza.hooks.cadence import Cadence
from cadenza.hooks.dispatch import Hooks, hooks_of, on, periodic
from cadenza.hooks.fan_out import Rota
from cadenza.hooks.listener import Listener
from cadenza.run import Run
from cadenza.status.progress import Counters, Progress
from cadenza.testing import tiny_run, tiny_trainer


class Noting(Callback):
    """Notes name and step at a cadence."""

    def __init__(self, name: str, every: str, seen: list[tuple[str, int]]) -> None:
        self.name, self.every, self.seen = name, every, seen

    def listeners(self) -> list[Listener]:
        return [periodic(self.every, self._note)]

    def _note(self, run: Run) -> None:
        assert self.name is not None
        self.seen.append((self.name, run.progress.step))


def expected(cadences: dict[str, int], steps: int) -> list[tuple[str, int]]:
    """Return what callbacks with these intervals note, from the rule alone."""
    return [(name, step) for step in range(1, steps + 1) for name, count in cadences.items() if step % count == 0]


@pytest.mark.parametrize(
    "cadences", [{"a": 10, "b": 15}, {"a": 30, "b": 1, "c": 10, "d": 12}, {"a": 500, "b": 600}, {"a": 11, "b": 11, "c": 2}]
)
def test_each_is_called_when_it_is_due_and_in_the_order_of_the_list(cadences: dict[str, int]) -> None:
    seen: list[tuple[str, int]] = []
    tiny_run(callbacks=[Noting(name, f"{count} steps", seen) for name, count in cadences.items()], steps=70)
    assert seen == expected(cadences, 70)


def test_counters_of_all_kinds_sleep_side_by_side() -> None:
    seen: list[tuple[str, int]] = []
    cadences = {"steps": "12 steps", "batches": "30 batches", "samples": "44 samples", "quarters": "0.5 epoch"}
    callbacks = [Noting(name, every, seen) for name, every in cadences.items()]
    tiny_run(callbacks=callbacks, epochs=3, batches=20, accumulate=2)
    assert [step for name, step in seen if name == "steps"] == [12, 24]
    assert [step for name, step in seen if name == "batches"] == [15, 30]
    assert [step for name, step in seen if name == "samples"] == [11, 22]
    assert [step for name, step in seen if name == "quarters"] == [5, 10, 15, 20, 25, 30]


def test_those_that_sleep_are_not_in_the_list_that_is_called() -> None:
    seen: list[tuple[str, int]] = []
    lengths: list[int] = []

    @on(Callback.on_epoch_end)
    def look(run: Run) -> None:
        lengths.append(len(hooks_of(run)._rotas[Callback.on_step_end].calls))

    callbacks = [Noting("far", "1000 steps", seen), Noting("near", "2 steps", seen), Noting("also far", "900 steps", seen)]
    tiny_run(callbacks=[*callbacks, look], epochs=2)
    assert lengths == [1, 1]  # the near one


def test_one_that_is_disabled_while_others_sleep_is_not_called_any_more() -> None:
    seen: list[tuple[str, int]] = []

    class Failing(Noting):
        on_fault = "disable"

        def _note(self, run: Run) -> None:
            super()._note(run)
            raise RuntimeError("broken")

    callbacks = [Noting("a", "10 steps", seen), Failing("broken", "20 steps", seen), Noting("c", "20 steps", seen)]
    run = tiny_run(callbacks=callbacks, steps=60)
    assert [name for name, _ in seen].count("broken") == 1
    assert [step for name, step in seen if name == "c"] == [20, 40, 60]
    assert [fault.callback for fault in run.faults] == ["broken"]


def test_a_warm_up_that_is_over_is_not_called_any_more() -> None:
    counts: list[int] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        counts.append(len(hooks_of(run)._rotas[Callback.on_before_optimizer_step].calls))

    tiny_run(callbacks=[Warmup("3 steps"), look], steps=6)
    assert counts == [1, 1, 1, 1, 0, 0]  # asked once more when it is over


def test_a_moment_at_which_all_sleep_is_as_one_that_nobody_hears_until_somebody_wakes() -> None:
    seen: list[tuple[str, int]] = []
    heard: list[bool] = []

    @on(Callback.on_batch_end)
    def look(run: Run, batch: Any, outputs: Any) -> None:
        heard.append("on_step_end" in vars(hooks_of(run)))

    tiny_run(callbacks=[Noting("far", "20 steps", seen), Noting("farther", "60 steps", seen), look], steps=64)
    assert seen == [("far", 20), ("far", 40), ("far", 60), ("farther", 60)]
    assert heard[0]  # it was not asked yet
    assert not any(heard[4:19])
    assert sum(heard) < 10


def test_a_run_that_is_moved_is_looked_at_anew() -> None:
    rings: list[int] = []
    progress = Progress(max_steps=100)
    progress.wake_at(50, lambda: rings.append(progress.step))
    progress.begin(Counters(step=70), None)
    assert rings == [70]


def test_a_clock_of_minutes_is_looked_at_about_once_a_second() -> None:
    progress = Progress(max_steps=10_000)
    gate = Cadence.parse("10 min").gated(lambda run: None)
    rota = Rota([gate])

    def look_after(steps: int, seconds: float) -> float | None:
        for _ in range(steps):
            progress.finish_step()
        progress._began -= seconds
        return rota.look(progress)

    assert look_after(0, 0.0) is None  # its pace is not known
    assert look_after(200, 2.0) == pytest.approx(200 + 100, abs=2)  # a hundred steps a second
    assert look_after(5000, 50.0) == pytest.approx(5200 + 100, abs=2)
    assert look_after(1, 600.0) is None  # the time is up, and somebody is awake
    assert rota.calls == [gate]


@pytest.mark.parametrize("make", [lambda: Hooks([]), lambda: Hooks(tiny_trainer().callbacks)])
def test_a_moment_with_nobody_who_sleeps_has_no_rota_in_its_function(make: Callable[[], Any]) -> None:
    assert not make()._rotas

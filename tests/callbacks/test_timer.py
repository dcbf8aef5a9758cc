"""`Timer`: the seconds of the stages of a run, over all its fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, Timer
from cadenza.callbacks import timer as module
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


class Clock:
    """The time, which passes only where a test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def lasting(self, seconds: float, moment: Any) -> Callback:
        def last(*_: Any) -> None:
            self.now += seconds

        return on(moment)(last)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def costs(clock: Clock) -> list[Callback]:
    """Return callbacks with which a batch takes 2 s, an evaluation 30 s, and the start of an epoch 100 s."""
    return [
        clock.lasting(2, Callback.on_batch_start),
        clock.lasting(30, Callback.on_eval_batch_end),
        clock.lasting(100, Callback.on_epoch_start),
    ]


def test_each_stage_has_its_time_and_its_count(clock: Clock, tmp_path: Path) -> None:
    timer = Timer("2 steps")
    saves = clock.lasting(500, Callback.on_save)
    callbacks = [timer, *costs(clock), saves, Evaluate(tiny_loader(1), every="1 epoch"), Checkpoint("1 epoch")]
    run = tiny_run(epochs=2, batches=4, accumulate=2, callbacks=callbacks, directory=tmp_path)
    counts = {stage: timer.count(stage) for stage in ("fit", "epoch", "step", "evaluation", "save")}
    assert counts == {"fit": 1, "epoch": 2, "step": 4, "evaluation": 2, "save": 2}
    assert timer.elapsed_s("step") == 4 * 4
    assert timer.elapsed_s("epoch") == 2 * (100 + 8)
    assert timer.elapsed_s("evaluation") == 2 * 30
    assert timer.elapsed_s("save") == 2 * 500
    assert timer.elapsed_s("fit") == timer.elapsed_s() == 216 + 60 + 1000
    assert timer.elapsed_s("train") == 216
    assert run.history["time/step_s"] == [(2, 4.0), (4, 4.0)]
    assert run.history["time/epoch_s"] == [(2, 108.0), (4, 108.0)]
    assert run.history["time/eval_s"] == [(2, 30.0), (4, 30.0)]
    assert [step for step, _ in run.history["time/fit_s"]] == [2, 4]


def test_the_time_that_a_step_waits_for_data_is_its_own(clock: Clock) -> None:
    timer = Timer()
    tiny_run(batches=3, callbacks=[timer, clock.lasting(5, Callback.on_fetch_end)])
    assert timer.elapsed_s("step") == 3 * 5, "the fetch that finds no batch belongs to no step"


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_resumed_run_counts_on(clock: Clock, tmp_path: Path, cut: int) -> None:
    def fit(steps: int) -> Timer:
        timer = Timer()
        callbacks = [timer, *costs(clock), Checkpoint("1 step")]
        tiny_trainer(steps=steps, batches=3, callbacks=callbacks, directory=tmp_path).fit(resume="auto")
        return timer

    assert fit(cut).elapsed_s("step") == 2 * cut
    clock.now += 1e6  # the time between the fits
    timer = fit(6)
    assert (timer.count("step"), timer.elapsed_s("step")) == (6, 12)
    assert timer.count("epoch") == 2
    starts = 3 if cut != 3 else 2  # on_epoch_start fires again in an epoch that is continued
    assert timer.elapsed_s("fit") == 12 + 100 * starts


def test_another_run_of_the_same_instance_counts_from_zero(clock: Clock) -> None:
    timer = Timer()
    for _ in range(2):
        tiny_run(batches=3, callbacks=[timer, *costs(clock)])
        assert (timer.count("step"), timer.elapsed_s("fit")) == (3, 106)


def test_the_stage_under_way_counts_too(clock: Clock) -> None:
    timer, seen = Timer(), list[float]()
    look = on(Callback.on_step_end)(lambda run: seen.append(timer.elapsed_s("fit")))
    tiny_run(batches=3, callbacks=[timer, clock.lasting(2, Callback.on_batch_start), look])
    assert seen == [2, 4, 6]


def test_after_an_error_the_times_end_there(clock: Clock) -> None:
    timer = Timer()

    @on(Callback.on_batch_end, at=2)
    def fail(run: Run, batch: Any, outputs: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_run(callbacks=[timer, *costs(clock), fail])
    clock.now += 1000
    assert timer.elapsed_s("fit") == 104


def test_a_block_of_other_code_is_measured(clock: Clock) -> None:
    timer = Timer()
    for _ in range(2):
        with timer.measure("export"):
            clock.now += 7
    assert (timer.count("export"), timer.elapsed_s("export")) == (2, 14)
    with pytest.raises(ValueError, match="Timer measures 'step' already: give the block another name"), timer.measure("step"):
        pass


def test_an_unknown_stage_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=re.escape("Timer has no 'trian'; it has 'fit', 'train',") + r".*mean 'train'\?"):
        Timer().elapsed_s("trian")

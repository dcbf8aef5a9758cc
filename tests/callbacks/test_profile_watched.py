"""A run that is watched does what it does unwatched: order, faults, authors, results."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.callbacks.profile import Profile
from cadenza.hooks.dispatch import hooks_of
from cadenza.status.decisions import decide
from cadenza.testing import Recorder, tiny_loader, tiny_run
from tests.callbacks.profiled import NAP_S, callbacks, nap


def test_moments_come_in_the_same_order_with_the_same_counters() -> None:
    plain, watched = Recorder(), Recorder()
    tiny_run(callbacks=[plain, Evaluate(tiny_loader(2))], epochs=2, accumulate=2)
    tiny_run(callbacks=[Profile(), watched, Evaluate(tiny_loader(2))], epochs=2, accumulate=2)
    assert watched.seen == plain.seen


def test_the_weights_are_the_same_bits() -> None:
    plain, watched = tiny_run(epochs=2, seed=1), tiny_run(callbacks=[Profile()], epochs=2, seed=1)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_authors_are_known_and_errors_are_named_as_ever() -> None:
    @on(Callback.on_step_end)
    def judge(run: Run) -> None:
        decide(run, "noticed", "just so")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Profile(), judge])
    assert caught.value.__notes__ == ["raised in judge.on_step_end (callback 2 of 2) at epoch 0, step 1, batch 1"]


def test_the_profile_of_a_run_that_failed_is_complete() -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        nap()
        raise ValueError("broken")

    profile = Profile()
    live: list[Run] = []
    with pytest.raises(ValueError, match="broken"):
        tiny_run(callbacks=[profile, on(Callback.on_fit_start)(live.append), fail])
    assert callbacks(live[0])["fail", "on_step_end"] >= (1, NAP_S)
    assert profile.table == live[0].profile


def test_a_callback_that_is_disabled_is_called_no_more_and_keeps_its_row(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Callback):
        on_fault = "disable"

        def on_step_end(self, run: Run) -> None:
            nap()
            raise OSError("tracker down")

        def on_fit_end(self, run: Run) -> None:
            raise AssertionError("called though it is disabled")

    after = Recorder(Callback.on_step_end)
    with caplog.at_level(logging.CRITICAL, logger="cadenza"):
        run = tiny_run(callbacks=[Profile(), Fragile(), after], steps=4)
    assert len(run.faults) == 1
    assert len(after.names) == 4
    count, seconds = callbacks(run)["Fragile", "on_step_end"]
    assert count == 1
    assert seconds >= NAP_S
    assert ("Fragile", "on_fit_end") not in callbacks(run)


def test_an_end_moment_reaches_all_though_one_failed() -> None:
    @on(Callback.on_fit_end)
    def fail(run: Run) -> None:
        raise ValueError("broken")

    after = Recorder(Callback.on_fit_end)
    with pytest.raises(ValueError, match="broken"):
        tiny_run(callbacks=[Profile(), fail, after], steps=1)
    assert after.names == ["on_fit_end"]


def test_an_evaluation_that_fails_ends_its_span() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("broken")

    judge = Evaluate(tiny_loader(2), compute=compute)

    @on(Callback.on_step_end)
    def careful(run: Run) -> None:
        with pytest.raises(ValueError, match="broken"):
            judge.evaluate(run)
        nap()

    run = tiny_run(callbacks=[Profile(), careful], steps=2)
    assert callbacks(run)["careful", "on_step_end"] >= (2, 2 * NAP_S)


def test_when_the_run_is_over_its_hooks_are_no_longer_measured() -> None:
    run = tiny_run(callbacks=[Profile(), Callback()], steps=1)
    assert hooks_of(run).profiler is None
    assert hooks_of(run).on_step_start.__func__ is Callback.on_step_start  # type: ignore[attr-defined]  # a method again

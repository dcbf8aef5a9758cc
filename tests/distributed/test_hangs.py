"""A rank that stops is named on all ranks: with its last step, its callback and the line of its code."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable as Function
from collections.abc import Iterator
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.drivers import DdpDriver, posts
from cadenza.errors import DistributedError
from cadenza.testing import launch, launching
from tests.distributed.parts import loader, rank, trainer


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_on() -> None:
    end = time.monotonic() + 6
    while time.monotonic() < end:
        pass


HANGS = {
    kill: r"rank 1 ended without an error message \(killed, or crashed\); last seen at step 1 in `hang\.",
    pause: r"rank 1 did not reach step 2 within 2 s; last seen at step 1 in `hang\..* and it posts no more: paused, or killed",
    loop_on: r"rank 1 did not reach step 2 within 2 s; last seen at step 1 in `hang\.on_step_end` \(test_hangs\.py:\d+\)",
}


@pytest.mark.parametrize("stop", HANGS)
def test_the_rank_that_stops_is_named(stop: Function[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fit() -> None:
        @on(Callback.on_step_end, at=1)
        def hang(run: Run) -> None:
            if rank() == 1:
                time.sleep(0.3)  # until its next post
                stop()

        trainer(callbacks=[hang], driver=DdpDriver("cpu", timeout_s=2)).fit()

    monkeypatch.setattr(posts, "EVERY_S", 0.1)
    monkeypatch.setattr(launching, "GRACE_S", 0.1 if stop is pause else 20)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(fit)
    told = [str(error) for error in caught.value.exceptions if isinstance(error, DistributedError)]
    assert len(told) == (2 if stop is loop_on else 1)
    for text in told:
        assert re.search(HANGS[stop], text), text


def test_a_rank_that_waits_for_its_data_is_named_with_the_line_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(loader()):
                if number == 3 and rank() == 1:
                    time.sleep(6)
                yield batch

    def fit() -> str:
        with pytest.raises(DistributedError) as caught:
            trainer(Slow(), driver=DdpDriver("cpu", timeout_s=2)).fit()
        return str(caught.value)

    monkeypatch.setattr(posts, "EVERY_S", 0.1)
    for text in launch(fit):
        assert "rank 1 did not reach step 2 within 2 s; last seen at step 1 in the training loader (test_hangs.py:" in text


@pytest.mark.parametrize("alone", ["fit", "evaluate"])
def test_a_rank_that_does_not_come_to_the_start_of_a_run_or_to_an_evaluation_is_named(alone: str) -> None:
    def call() -> str:
        one = trainer(driver=DdpDriver("cpu", timeout_s=2), max_epochs=1)
        if alone == "evaluate":
            one.fit()
        if rank() == 1:
            time.sleep(3)
            return ""
        with pytest.raises(DistributedError) as caught:
            one.fit() if alone == "fit" else one.evaluate(loader())
        return str(caught.value)

    where = {"fit": "at the start of a run", "evaluate": "in evaluate"}[alone]
    said, _ = launch(call)
    assert said.startswith(
        f"rank 0 waited 2 s {where}, and rank 1 did not come. Every rank must call Trainer, fit, evaluate and"
    )

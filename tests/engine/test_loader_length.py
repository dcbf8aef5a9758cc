"""A loader of which the length is wrong: it is told once, and what counts in fractions of an epoch is put right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Swa, Warmup
from cadenza.hooks.listener import Listener
from cadenza.hooks.subscription import periodic
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


class Lying:
    """A loader with another number of batches than it says, and of which a position can be had."""

    def __init__(self, says: int, has: int) -> None:
        self.says, self.has = says, has

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_loader(self.has))


class AtFractions(Callback):
    """Notes at which steps a cadence is due."""

    def __init__(self, every: str) -> None:
        self.every, self.steps = every, list[int]()

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, lambda run: self.steps.append(run.progress.step))]


@pytest.mark.parametrize(("says", "in_first"), [(8, [4]), (2, [1, 2, 3, 4])])
def test_it_is_told_once_and_fractions_are_right_from_the_second_epoch_on(
    says: int, in_first: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    halves = AtFractions("0.5 epoch")
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = tiny_run(loader=Lying(says, 4), epochs=3, callbacks=[halves])
    assert halves.steps == [*in_first, 6, 8, 10, 12]
    assert run.progress.batches_per_epoch == 4
    assert run.progress.total("step") == run.progress.step == 12
    told = f"the length of the training loader says {says} batches, but epoch 1 had 4"
    assert run.why("length corrected").endswith(told)
    assert caplog.text.count(told) == caplog.text.count("the length of the training loader") == 1
    assert f"warm-ups that were made for {says} do not change" in caplog.text


@pytest.mark.parametrize("ends", ["request", "limit", "true"])
def test_an_epoch_that_is_cut_short_says_nothing_of_the_loader(ends: str) -> None:
    @on(Callback.on_step_end, at=2)
    def leave(run: Run) -> None:
        run.end_epoch("enough")

    callbacks = [leave] if ends == "request" else []
    run = tiny_run(loader=Lying(5, 5), epochs=1, steps=3 if ends == "limit" else None, callbacks=callbacks)
    assert not any(decision.what == "length corrected" for decision in run.decisions)


@pytest.mark.parametrize("cut", [3, 4, 5, 7])
def test_a_run_that_continues_goes_on_with_what_was_found(tmp_path: Path, cut: int) -> None:
    """The loader says 8 again: that is no other loader, and fractions, warm-up and averaging are those of one run."""

    def fit(directory: Path, kill_at: int) -> tuple[Run | None, list[int]]:
        quarters = AtFractions("0.25 epoch")

        @on(Callback.on_step_start)
        def kill(run: Run) -> None:
            if run.progress.step == kill_at:
                raise KeyboardInterrupt

        callbacks = [quarters, Warmup("1 epoch"), Swa(0.25, "1 step"), Checkpoint("1 step"), kill]
        made = tiny_trainer(loader=Lying(8, 4), epochs=3, callbacks=callbacks, directory=directory)
        run = None
        with suppress(KeyboardInterrupt):
            run = made.fit(resume="auto", replay=True)
        return run, quarters.steps

    whole, at_once = fit(tmp_path / "whole", kill_at=-1)
    killed, before = fit(tmp_path / "cut", kill_at=cut)
    run, after = fit(tmp_path / "cut", kill_at=-1)
    assert killed is None
    assert run is not None
    assert whole is not None
    assert before + after == at_once
    assert run.progress.now() == whole.progress.now()
    assert all(a.equal(b) for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True))

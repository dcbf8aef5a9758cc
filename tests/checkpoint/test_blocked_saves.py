"""run.block_saves: a save waits until the last block is left, and a state inside of one is never saved."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.hooks.moments import Moment
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import decided, manifest, names


class Between(Callback):
    """Blocks saves from one moment of a step to another moment of a later one."""

    def __init__(self, first: int, last: int, name: str | None = None) -> None:
        self.first, self.last, self.name, self.stack = first, last, name, ExitStack()

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.first:
            self.stack.enter_context(run.block_saves("a partial state"))

    def on_batch_start(self, run: Run, batch: Any) -> None:
        if run.progress.step == self.last:
            self.stack.close()


def test_a_save_that_is_due_in_a_block_follows_at_the_end_of_the_step_in_which_the_block_ends(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, steps=9, callbacks=[Between(2, 3), Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["04", "06", "08", "09"]
    assert decided(run, "save postponed") == ["every 2 steps: saves are blocked by Between, since step 2 (a partial state)"]


def test_several_saves_of_one_block_are_one_and_keep_their_reasons(tmp_path: Path) -> None:
    ask = on(Callback.on_step_end, at=3)(lambda run: run.save("I want it"))
    tiny_run(directory=tmp_path, steps=5, callbacks=[Between(2, 4), ask, Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["05"]
    assert manifest(tmp_path, "05")["reason"].startswith("every 2 steps")


def test_blocks_of_several_callbacks_and_nested_ones_hold_until_the_last_is_left(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def nested(run: Run) -> None:
        with run.block_saves(), run.block_saves("twice"):
            pass

    callbacks = [nested, Between(2, 3, "one"), Between(2, 4, "other"), Checkpoint("2 steps", keep_last=None)]
    tiny_run(directory=tmp_path, steps=7, callbacks=callbacks)
    assert names(tmp_path) == ["05", "06", "07"]


def test_a_run_that_is_resumed_at_a_postponed_checkpoint_ends_in_the_same_bits(tmp_path: Path) -> None:
    def make(steps: int) -> Any:
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=[Between(2, 3), Checkpoint("2 steps")])

    make(4).fit()
    resumed, whole = make(8).fit(resume="auto"), tiny_run(steps=8, seed=1)
    assert [one.tolist() for one in resumed.model.parameters()] == [one.tolist() for one in whole.model.parameters()]


def test_a_block_that_is_open_at_the_end_leaves_no_checkpoint_of_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(directory=tmp_path, steps=5, callbacks=[Between(3, 99), Checkpoint("2 steps")])
    assert names(tmp_path) == ["02"]
    assert run.why("not saved").endswith("step 5: saves are blocked by Between, since step 3 (a partial state)")
    assert "the run ended while saves were blocked by Between, since step 3 (a partial state)" in caplog.text


def test_a_block_that_is_left_in_the_last_moment_is_no_obstacle(tmp_path: Path) -> None:
    class ToTheEnd(Between):
        def on_fit_end(self, run: Run) -> None:
            self.stack.close()

    tiny_run(directory=tmp_path, steps=5, callbacks=[ToTheEnd(3, 99), Checkpoint("2 steps")])
    assert names(tmp_path) == ["02", "05"]


@pytest.mark.parametrize("moment", [Callback.on_step_start, Callback.on_step_end, Callback.on_epoch_end])
def test_an_error_inside_of_a_block_leaves_the_checkpoint_before(tmp_path: Path, moment: Moment) -> None:
    def fail(run: Run) -> None:
        if run.progress.step == 5:
            with run.block_saves("half a swap"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, epochs=2, callbacks=[on(moment)(fail), Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["02", "04"]
    told = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    [why] = [one["why"] for one in told if one["what"] == "not saved"]
    assert why == "step 5: the error ZeroDivisionError() left the block of fail, since step 5 (half a swap)"


def test_after_an_error_in_a_block_a_save_that_was_postponed_is_dropped(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=4)
    def fail(run: Run) -> None:
        run.save("before the error")
        with run.block_saves():
            raise ZeroDivisionError

    for on_exception in (True, False):
        folder = tmp_path / str(on_exception)
        callbacks = [Between(2, 99), fail, Checkpoint("2 steps", keep_last=None, on_exception=on_exception)]
        with pytest.raises(ZeroDivisionError):
            tiny_run(directory=folder, steps=9, callbacks=callbacks)
        assert not (folder / "checkpoints").exists() or names(folder) == []


def test_an_error_that_a_callback_handles_does_not_prevent_the_next_save(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def handled(run: Run) -> None:
        with pytest.raises(ZeroDivisionError), run.block_saves():
            raise ZeroDivisionError

    @on(Callback.on_batch_start)
    def fail(run: Run, batch: Any) -> None:
        if run.progress.step == 3:
            raise KeyError("another one")

    with pytest.raises(KeyError):
        tiny_run(directory=tmp_path, callbacks=[handled, fail, Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["02", "03"]


def on_one_rank(folder: str, rank: int) -> list[int]:
    class OnOneRank(Between):
        def on_step_end(self, run: Run) -> None:
            if run.driver.rank == rank:
                super().on_step_end(run)

    saves = Checkpoint("2 steps", keep_last=None)
    tiny_run(directory=folder, steps=8, batches=16, driver="auto", callbacks=[OnOneRank(2, 4), saves])
    return [saved.step for saved in Store(f"{folder}/checkpoints").saved()]


def test_a_block_on_one_rank_holds_for_all(tmp_path: Path) -> None:
    assert launch(lambda: [on_one_rank(str(tmp_path / str(rank)), rank) for rank in (0, 1)]) == [[[5, 6, 8]] * 2] * 2

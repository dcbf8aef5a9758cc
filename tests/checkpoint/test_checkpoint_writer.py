"""What a run does about a write that fails: the best checkpoint is the one before, and the same state may be saved again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint import attempts
from cadenza.testing import tiny_run
from tests.callbacks.test_checkpoint import Scripted, bests, failing


def failing_at(keep: Checkpoint, step: int) -> Callback:
    """Return a callback after which the first write of a step fails."""
    failed: list[int] = []

    @on(Callback.on_fit_start)
    def begin(run: Run) -> None:
        write = keep.store.write

        def sometimes(content: Any) -> Any:
            if content.facts["step"] == step and not failed:
                failed.append(step)
                raise OSError("no space")
            return write(content)

        keep.store.write = sometimes  # type: ignore[method-assign]

    return begin


def test_after_a_lost_best_a_value_that_is_better_than_the_one_before_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (60.0,))
    keep = Checkpoint("100 steps", background=False, keep_best=("eval/acc", "max"))
    script = Scripted(acc=[0.5, 0.9, 0.7, 0.6])
    tiny_run(directory=tmp_path, steps=4, callbacks=[script, failing_at(keep, 2), keep])
    assert bests(keep) == {"eval/acc": ("step-00000003", 0.7)}


def test_a_state_that_could_not_be_written_is_saved_again_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (60.0,))
    keep = Checkpoint("3 steps", background=False)
    run = tiny_run(directory=tmp_path, steps=3, callbacks=[failing_at(keep, 3), keep])
    assert [one.why for one in run.decisions if one.what == "saved"] == ["step-00000003: the end of the run"]


def test_an_error_in_the_step_after_a_checkpoint_leaves_another_one_that_holds_the_gradients(tmp_path: Path) -> None:
    keep = Checkpoint("3 steps", keep_last=None)
    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, steps=9, callbacks=[failing(Callback.on_after_backward, 3), keep])
    whole, cut = keep.store.saved()
    assert (whole.name, cut.name) == ("step-00000003", "step-00000003-2")
    assert [keep.store.manifest(one)["exact"] for one in (whole, cut)] == [True, False]
    assert [len(keep.store.read(one).state["gradients"]) for one in (whole, cut)] == [0, 2]


def test_a_result_that_gets_better_after_a_save_of_the_same_state_is_saved_as_the_best(tmp_path: Path) -> None:
    keep, script = Checkpoint("3 steps", keep_best=("eval/acc", "max")), Scripted(acc=[0.5, 0.4, 0.4, 0.9])

    @on(Callback.on_fit_end)
    def evaluate(run: Run) -> None:
        script.report(run, 3)

    tiny_run(directory=tmp_path, steps=3, callbacks=[script, evaluate, keep])
    assert bests(keep) == {"eval/acc": ("step-00000003-2", 0.9)}


def test_a_late_write_of_the_best_is_the_best_and_is_not_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (60.0,))
    keep, script = Checkpoint("100 steps", keep_best=("eval/acc", "max"), background=False), Scripted(acc=[0.5, 0.9])

    @on(Callback.on_fit_end)
    def again(run: Run) -> None:
        keep.writer.finish()  # the last attempts succeed
        keep.writer.save("the end")

    run = tiny_run(directory=tmp_path, steps=2, callbacks=[script, failing_at(keep, 2), again, keep])
    assert bests(keep) == {"eval/acc": ("step-00000002", 0.9)}
    assert len([one for one in run.decisions if one.what == "saved"]) == 2


@pytest.mark.parametrize("background", [True, False])
def test_with_strict_the_error_of_a_write_ends_the_run_and_nothing_is_tried_again(tmp_path: Path, background: bool) -> None:
    keep = Checkpoint("2 steps", background=background, strict=True, on_exception=False)
    with pytest.raises(OSError, match="no space"):
        tiny_run(directory=tmp_path, steps=9, callbacks=[failing_at(keep, 2), keep])
    assert keep.store.saved() == []


def test_with_strict_a_save_that_was_due_when_the_error_arrived_is_not_made(tmp_path: Path) -> None:
    keep, arrives = Checkpoint("2 steps", strict=True, on_exception=False, keep_last=None), threading.Event()

    @on(Callback.on_fit_start)
    def begin(run: Run) -> None:
        write = keep.store.write

        def late(content: Any) -> Any:
            if content.facts["step"] == 2 and arrives.wait(60):
                raise OSError("no space")
            return write(content)

        keep.store.write = late  # type: ignore[method-assign]

    @on(Callback.on_step_end, at=4)
    def arrive(run: Run) -> None:
        arrives.set()
        keep.writer.attempts.stop()  # the thread has reported the error, and its save is due at this step boundary

    with pytest.raises(OSError, match="no space"):
        tiny_run(directory=tmp_path, steps=9, callbacks=[begin, arrive, keep])
    assert keep.store.saved() == []

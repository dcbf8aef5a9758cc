"""The live run: what hooks read, and what happens at its very end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.engine.session import session_of
from cadenza.testing import tiny_run


def test_hooks_see_the_batch_and_the_parts_and_the_loss_waits_for_nobody() -> None:
    seen: list[Any] = []

    @on(Callback.on_batch_end, at=1)
    def look(run: Run, batch: Any, outputs: Any) -> None:
        seen.append((run.batch is batch, run.outputs is outputs, run.device, run.is_main, run.info.directory, run.outcome))

    before = on(Callback.on_fit_start)(lambda run: seen.append(run.loss))
    run = tiny_run(callbacks=[look, before], seed=4)
    assert seen == [None, (True, True, torch.device("cpu"), True, None, None)]
    assert (run.info.arguments["seed"], run.info.accumulate, len(run.optimizers)) == (4, 1, 1)
    assert run.loss is not None
    assert run.loss.shape == ()
    assert not run.loss.requires_grad


def test_what_was_opened_is_closed_after_the_last_record_the_last_one_first() -> None:
    order: list[str] = []

    class Opening(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_fit_start(self, run: Run) -> None:
            run.at_end(lambda: order.append(f"close {self.name}"))

        def on_fit_end(self, run: Run) -> None:
            run.log(f"{self.name}/end", 1)

        def on_log(self, run: Run, record: Any) -> None:
            order.append(f"log {self.name}")

    tiny_run(callbacks=[Opening("a"), Opening("b")])
    assert order == ["log a", "log b", "close b", "close a"]


class Opening(Callback):
    """Closes twice, of which the second fails; and fails itself if it is asked to."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.closed = fails, 0

    def on_fit_start(self, run: Run) -> None:
        run.at_end(self.close)
        run.at_end(lambda: 1 / 0)

    def on_step_end(self, run: Run) -> None:
        if self.fails:
            raise RuntimeError("the first")

    def close(self) -> None:
        self.closed += 1


def test_what_was_opened_is_closed_after_an_error_too_and_an_error_in_closing_has_its_owner() -> None:
    fails, closes = Opening(fails=True), Opening(fails=False)
    with pytest.raises(RuntimeError, match="the first") as caught:
        tiny_run(callbacks=[fails])
    assert any("Opening.at_end failed as well: ZeroDivisionError" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError) as alone:
        tiny_run(callbacks=[closes])
    assert alone.value.__notes__[0].startswith("raised in Opening.at_end")
    assert (fails.closed, closes.closed) == (1, 1)


def test_what_a_hook_asks_to_have_done_later_has_its_author_and_its_on_fault() -> None:
    class Later(Callback):
        on_fault = "disable"

        def on_step_end(self, run: Run) -> None:
            run.after_step(lambda: run.stop("after the step"))
            run.after_step(lambda: 1 / 0)
            run.at_end(lambda: run.at_end(lambda: run.stop("a closer that a closer adds")))

    run = tiny_run(callbacks=[Later()])
    assert [(one.what, one.who, one.why) for one in run.decisions] == [
        ("stopped", "Later", "after the step"),
        ("disabled", "Later", "after_step raised ZeroDivisionError('division by zero')"),
        ("stopped", "Later", "a closer that a closer adds"),
    ]


def test_a_save_that_fails_is_no_fault_of_the_callback_that_requested_it() -> None:
    class Broken:
        def request(self, reason: str) -> None:
            raise ZeroDivisionError(reason)

    class Asking(Callback):
        on_fault = "disable"

        def on_setup(self, run: Run) -> None:
            session_of(run).savers.append(Broken())

        def on_step_end(self, run: Run) -> None:
            run.save("asked")

    with pytest.raises(ZeroDivisionError):
        tiny_run(callbacks=[Asking()])


def test_at_end_outside_of_a_hook_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="must be called inside a hook, such as on_fit_start"):
        tiny_run(steps=1).at_end(print)


def test_what_a_user_prints_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def show(run: Run) -> None:
        run.log("mine/step", run.progress.step)
        run.print("at", run.progress, 1.5)

    run = tiny_run(callbacks=[on(Callback.on_step_end)(show)], steps=1)
    assert "at epoch 0, step 1, batch 1 1.5\n" in capsys.readouterr().out
    assert repr(run).startswith("<Run: epoch 0, step 1, batch 1; Outcome(kind='finished'")
    assert list(run.history) == ["mine/step"]
    assert repr(run.history) == "<History: step 1: mine/step>"

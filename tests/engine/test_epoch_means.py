"""The training loss of each epoch that a trainer logs without a LogTraining in its list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, attach, on
from cadenza.callbacks import Checkpoint, Derive, LogTraining
from cadenza.engine.training_log import EpochMeans
from cadenza.errors import CallbackError
from cadenza.testing import Recorder, launch, tiny_run, tiny_trainer
from tests.callbacks.test_interval_means import LOSSES, WEIGHTS, mean, numbered, scripted
from tests.distributed.parts import driver

SIX = LOSSES[:6]


def trainer(
    *callbacks: Any, losses: Sequence[float] = SIX, weights: Sequence[float] | None = None, **arguments: Any
) -> Trainer:
    model = nn.Linear(1, 1)
    given = {
        "compute_loss": scripted(SIX, weights),
        "max_epochs": None if "max_steps" in arguments else 1,
        "progress": False,
        **({} if "driver" in arguments else {"device": "cpu"}),
        **arguments,
    }
    return Trainer(model, lambda ones: torch.optim.SGD(ones, 0.0), numbered(6), callbacks=callbacks, **given)


def test_each_epoch_has_a_record_with_the_mean_loss_and_the_means_of_other_numbers() -> None:
    run = trainer(weights=WEIGHTS, max_epochs=2, accumulate=4).fit()
    loss, index = mean(SIX, WEIGHTS[:6]), mean(range(6), WEIGHTS[:6])
    assert run.history["train/loss"] == [(2, loss), (4, loss)]
    assert run.history["train/index"] == [(2, index), (4, index)]
    assert run.history.names == ["train/loss", "train/index"], "no weights, learning rates or speeds"


def test_the_record_is_that_of_the_last_step_and_comes_with_what_hooks_of_the_epoch_log() -> None:
    seen: list[dict[str, float]] = []
    end = on(Callback.on_epoch_end)(lambda run: run.log("mine", 1.0))
    look = on(Callback.on_log)(lambda run, record: seen.append(dict(record.values)))
    trainer(end, look).fit()
    assert seen == [{"train/loss": mean(SIX), "train/index": 2.5, "mine": 1.0}]


def test_a_run_that_ends_inside_of_an_epoch_logs_there_too() -> None:
    run = trainer(max_steps=8).fit()
    assert run.history["train/loss"] == [(6, mean(SIX)), (8, mean(SIX[:2]))]
    stop = on(Callback.on_step_end, at=4)(lambda run: run.stop("enough"))
    assert trainer(stop).fit().history["train/loss"] == [(4, mean(SIX[:4]))]
    end = on(Callback.on_step_end, at=4)(lambda run: run.end_epoch("enough"))
    assert trainer(end, max_epochs=2).fit().history["train/loss"] == [(4, mean(SIX[:4])), (10, mean(SIX))]


def test_skipped_batches_do_not_count_and_without_a_batch_there_is_no_value() -> None:
    skip = on(Callback.on_batch_start)(lambda run, batch: run.skip_batch("a test"))
    assert trainer(skip).fit().history.names == []


def test_numbers_alone_are_logged_and_not_what_hooks_derive_or_names_that_begin_with_an_underscore() -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = model(batch[0]).sum()
        others = {"predictions": loss, "tokens": 3, "list": [1], "wide": torch.ones(2), "complex": 1j, "name": "x", "_own": 1}
        return {"loss": loss, "right": torch.tensor(True), "size": 2, **others}

    read = on(Callback.on_batch_end)(lambda run, batch, outputs: outputs["double"])
    run = trainer(Derive(double=lambda run: run.outputs["loss"] * 2), read, compute_loss=compute).fit()
    assert {name: run.history.latest[name] for name in run.history.names if name != "train/loss"} == {
        "train/right": 1.0,
        "train/size": 2.0,
    }


def test_a_log_training_in_the_list_replaces_it() -> None:
    for callbacks in ([LogTraining("2 steps", throughput=False, lr=False)], [LogTraining(outputs=(), throughput=False)]):
        one = trainer(*callbacks)
        assert one.callbacks == callbacks
    assert trainer(LogTraining("2 steps", throughput=False, lr=False)).fit().history["train/loss"] == [
        (2, 2.25),
        (4, 4.625),
        (6, 2.25),
    ]


@pytest.mark.parametrize("options", [{}, {"reduce": "mean"}])
@pytest.mark.parametrize("moment", [Callback.on_epoch_end, Callback.on_step_end, Callback.on_batch_end])
def test_a_hook_that_logs_the_loss_replaces_it(moment: Any, options: Any, tmp_path: Path) -> None:
    log = on(moment)(lambda run, *_: run.log("train/loss", -1.0, **options))
    run = trainer(log, max_epochs=2).fit()
    assert {value for _, value in run.history["train/loss"]} == {-1.0}
    assert run.history["train/index"] == [(6, 2.5), (12, 2.5)], "another name is logged"


def test_a_hook_that_logged_before_a_resume_still_replaces_it(tmp_path: Path) -> None:
    def fit(steps: int) -> Run:
        log = on(Callback.on_step_end, at=2)(lambda run: run.log("train/loss", -1.0))
        return trainer(log, Checkpoint("1 step"), max_steps=steps, directory=tmp_path).fit(resume="auto")

    fit(4)
    assert fit(6).history["train/loss"] == [(2, -1.0)]


def test_the_whole_epoch_counts_after_a_resume_inside_of_it(tmp_path: Path) -> None:
    def fit(steps: int, folder: str) -> Run:
        made = trainer(Checkpoint("1 step"), weights=WEIGHTS, max_epochs=2, max_steps=steps, directory=tmp_path / folder)
        return made.fit(resume="auto")

    fit(4, "cut")
    whole, cut = fit(12, "whole").history, fit(12, "cut").history
    for name in ("train/loss", "train/index"):
        assert [one for one in cut[name] if one[0] != 4] == whole[name]


def test_it_is_a_line_of_the_plan_and_changes_no_position_in_messages() -> None:
    [line] = [line for line in str(trainer().plan()).splitlines() if "LogTraining" in line]
    assert line.split() == ["on_epoch_end", "LogTraining", "(every", "epoch,", "added)"]
    with pytest.raises(CallbackError, match=r"callbacks\[0\]"):
        trainer("no callback")
    recorder, alone = Recorder(), Recorder()
    trainer(recorder).fit()
    tiny_run(callbacks=[alone], batches=6)
    assert [name for name in recorder.names if name != "on_log"] == alone.names


def test_loops_without_epochs_and_the_testing_kit_do_not_have_it() -> None:
    model = nn.Linear(1, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=2, progress=False, device="cpu") as loop:
        while not loop.over():
            with loop.step():
                loop.backward(model(torch.ones(1, 1)).sum())
                loop.update()
    assert loop.run.history.names == []
    assert not any(isinstance(one, EpochMeans) for one in tiny_trainer().callbacks)


def test_a_loop_over_steps_and_a_step_fn_have_it() -> None:
    one = trainer(compute_loss=None)
    for step in one.steps():
        for batch in step:
            step.backward(one.model(batch[0]).sum() * 0.0 + SIX[int(batch[0].item())])
    assert one.run.history["train/loss"] == [(6, mean(SIX))]

    def own_step(run: Run, batch: Any) -> dict[str, Any]:
        loss = run.model(batch[0]).sum() * 0.0 + SIX[int(batch[0].item())]
        run.backward(loss)
        run.update()
        return {"loss": loss, "error": 2.0}

    run = trainer(compute_loss=None, step_fn=own_step).fit()
    assert (run.history["train/loss"], run.history["train/error"]) == ([(6, mean(SIX))], [(6, 2.0)])


def test_after_an_error_nothing_is_logged() -> None:
    @on(Callback.on_step_end, at=3)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    one = trainer(fail)
    with pytest.raises(ZeroDivisionError):
        one.fit()
    assert one.run.history.names == []


def test_several_ranks_log_the_mean_of_all_and_one_that_logs_the_loss_replaces_it_on_all() -> None:
    def work() -> Any:
        run = trainer(weights=WEIGHTS, driver=driver()).fit()

        @on(Callback.on_step_end, at=1)
        def step(run: Run) -> None:
            if run.is_main:
                run.log("train/loss", -1.0)

        return run.history["train/loss"], trainer(step, driver=driver()).fit().history["train/loss"]

    for own, replaced in launch(work):
        assert own == [(3, pytest.approx(mean(SIX, WEIGHTS[:6]), rel=1e-15))]
        assert replaced == [(1, -1.0)]

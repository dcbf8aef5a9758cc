"""A loss that is not finite is named with its true step, and a step in which no batch counts has no loss."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import Callback, Run, attach, on
from cadenza.callbacks import Alert, Checkpoint, Evaluate, FindLearningRate, LogTraining, Recover, StopOnNonFinite
from cadenza.drivers import DdpDriver
from cadenza.engine.metric_log import LossBuffer, StepLoss
from cadenza.profiling.host_reads import observed_reads
from cadenza.status.decisions import Decision
from cadenza.testing import launch, tiny_loader, tiny_model, tiny_run, tiny_trainer

NAN = math.nan
LOG = LogTraining("1 step", throughput=False, lr=False)


def told(run: Run) -> list[Decision]:
    return [decision for decision in run.decisions if decision.what == "loss not finite"]


def reason(run: Run) -> str:
    assert run.outcome is not None
    return run.outcome.reason


def given(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the batch as the loss."""
    return sum(weight.sum() for weight in model.parameters()) * 0.0 + batch


def by_fit(losses: Sequence[float], **arguments: Any) -> Run:
    resume = arguments.pop("resume", False)
    return tiny_trainer(loader=[torch.tensor(loss) for loss in losses], compute_loss=given, **arguments).fit(resume=resume)


def by_step_fn(losses: Sequence[float], **arguments: Any) -> Run:
    """Train with losses that are all in the same memory, as a CUDA graph leaves them."""
    memory = torch.zeros(())

    def step_fn(run: Run, batch: Tensor) -> Tensor:
        run.backward(given(run.model, batch))
        run.update()
        return memory.copy_(batch)

    return tiny_run(loader=[torch.tensor(loss) for loss in losses], step_fn=step_fn, **arguments)


def by_steps(losses: Sequence[float], **arguments: Any) -> Run:
    trainer = tiny_trainer(loader=[torch.tensor(loss) for loss in losses], compute_loss=None, **arguments)
    for step in trainer.steps():
        for batch in step:
            step.backward(given(trainer.model, batch))
    return trainer.run


def by_attach(losses: Sequence[float], **arguments: Any) -> Run:
    model = tiny_model()
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=len(losses), progress=False, **arguments) as loop:
        for loss in losses:
            with loop.step():
                loop.backward(given(model, torch.tensor(loss)))
                loop.update()
    return loop.run


LOOPS = [by_fit, by_step_fn, by_steps, by_attach]


# -- the first step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", LOOPS)
@pytest.mark.parametrize("callbacks", [[], [LogTraining("4 steps", throughput=False)]], ids=["no records", "records"])
def test_the_outcome_names_the_first_step_of_a_loss_that_is_not_finite(
    train: Callable[..., Run], callbacks: list[Callback], tmp_path: Path
) -> None:
    lasting = train([1.0, 1.0, math.inf, *[NAN] * 7], callbacks=callbacks, directory=tmp_path)
    assert [(one.why, one.data["step"]) for one in told(lasting)] == [("the loss is inf at step 3", 3)]
    assert reason(lasting).endswith("; the loss was not finite from step 3 on")
    assert json.loads((tmp_path / "run.json").read_text())["outcome"]["reason"] == reason(lasting)
    once = train([1.0, 1.0, NAN, 1.0, 1.0, NAN], callbacks=callbacks)
    assert reason(once).endswith("; the loss was not finite at step 3")


@pytest.mark.parametrize("train", LOOPS)
def test_an_error_in_a_later_step_and_its_outcome_name_the_first_step_too(train: Callable[..., Run], tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=5)
    def fail(run: Run) -> None:
        raise ValueError("invalid values")

    with pytest.raises(ValueError, match="invalid values") as error:
        train([1.0, 1.0, *[NAN] * 7], callbacks=[fail], directory=tmp_path)
    assert error.value.__notes__.count("the loss was not finite from step 3 on") == 1
    outcome = json.loads((tmp_path / "run.json").read_text())["outcome"]
    assert outcome == {"kind": "failed", "reason": "ValueError('invalid values'); the loss was not finite from step 3 on"}


@pytest.mark.parametrize("train", LOOPS)
def test_a_long_epoch_without_records_is_checked_every_100_steps(train: Callable[..., Run]) -> None:
    run = train([1.0, 1.0, *[NAN] * 103])
    assert [(one.why, one.when.step) for one in told(run)] == [("the loss is nan at step 3", 100)]


def test_to_keep_a_loss_launches_no_kernel_and_all_are_read_at_once() -> None:
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            launched.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    launched, reads, got = list[str](), list[str](), list[StepLoss]()
    losses = LossBuffer()
    losses.readers.append(got.append)
    with Operators():  # type: ignore[no-untyped-call]
        for step in range(1, 100):
            loss = torch.full((), float(step))
            launched.clear()
            losses.keep(step, [loss], [])
            assert launched == (["aten::clone"] if step == 1 else [])
    with observed_reads(lambda how, tensor: reads.append(how)):
        losses.deliver(wait=True)
    assert reads == ["tolist"]
    assert [(one.step, one.loss) for one in got] == [(step, step) for step in range(1, 100)]


def test_the_first_batch_with_a_loss_that_is_not_finite_counts_with_its_step() -> None:
    for train in (by_fit, by_steps):
        run = train([1.0, 1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1.0], accumulate=2)
        assert reason(run).endswith("; the loss was not finite at step 3")


@pytest.mark.parametrize("last", [NAN, 1.0])
def test_a_run_that_continues_inside_of_the_100_steps_names_the_step_of_the_whole_run(last: float, tmp_path: Path) -> None:
    losses = [1.0, 1.0, NAN, *[last] * 7]
    whole = by_fit(losses, steps=10)
    by_fit(losses, steps=6, directory=tmp_path, callbacks=[Checkpoint("4 steps")])
    rest = by_fit(losses, steps=10, directory=tmp_path, callbacks=[Checkpoint("4 steps")], resume="auto")
    assert reason(rest) == reason(whole)
    if math.isnan(last):
        assert [one.why for one in told(rest)] == ["the loss is nan at step 3"]


def test_losses_in_records_are_checked_by_their_names_and_the_training_loss_before_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = tiny_run(losses=[1.0, 2.0, math.inf, NAN, NAN], callbacks=[LOG], directory=tmp_path)
    assert [str(decision.why) for decision in told(run)] == ["train/loss is inf at step 3"]
    assert caplog.text.count("train/loss is inf at step 3, and training goes on") == 1
    assert "StopOnNonFinite()" in caplog.text
    assert reason(run) == "the limit is reached; train/loss was not finite from step 3 on"
    run = tiny_run(callbacks=[Evaluate(tiny_loader(1), compute=lambda model, batch: {"loss": torch.tensor(NAN)})], epochs=2)
    assert [one.why for one in told(run)] == ["eval/loss is nan at step 5"]
    assert not told(tiny_run(callbacks=[on(Callback.on_step_end)(lambda run: run.log("train/score", NAN))]))


def test_what_stop_on_non_finite_says_is_not_said_twice() -> None:
    for action in ("stop", "skip"):
        run = tiny_run(losses=[1.0, NAN], callbacks=[StopOnNonFinite(cast("Any", action)), LOG])
        assert not told(run)
        assert reason(run) == ("the loss is nan" if action == "stop" else "the limit is reached")


def test_a_trial_that_diverges_and_one_overflow_in_fp16_are_no_fault_and_a_lasting_one_is_mentioned_by_any_outcome() -> None:
    """In fp16 the scaler leaves out the update of an overflow."""
    assert not told(tiny_run(callbacks=[FindLearningRate(start=1.0, end=1e30, steps=30), LOG]))
    stop = on(Callback.on_step_end, at=3)(lambda run: run.stop("enough"))
    run = tiny_run(losses=[1.0, NAN, NAN, NAN], callbacks=[LOG, stop])
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough; train/loss was not finite from step 2 on")
    for callbacks, name in (([LOG], "train/loss"), ([], "the loss")):
        assert not told(tiny_run(losses=[1.0, math.inf, 1.0, 1.0], precision="fp16", callbacks=callbacks))
        lasting = tiny_run(losses=[1.0, math.inf, NAN, NAN], precision="fp16", callbacks=callbacks)
        assert reason(lasting).endswith(f"; {name} was not finite from step 2 on")


# -- a step in which no batch counts -------------------------------------------------------------------


def masked(model: nn.Module, batch: tuple[Tensor, int]) -> dict[str, Any]:
    """Return a loss of 1.0 of a batch with labels, and as a mean over no labels returns it, NaN."""
    weight = batch[1]
    return {"loss": given(model, torch.tensor(1.0 if weight else NAN)), "weight": torch.tensor(weight)}


@pytest.mark.parametrize("on_device", [False, True], ids=["weights on the host", "weights on a device"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_weight_0_has_no_loss_and_one_warning_says_so(
    on_device: bool, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if on_device:  # such weights are not read in a step
        monkeypatch.setattr("cadenza.engine.step_state.number_on_host", lambda weight: None)
    seen, alerts = list[float](), list[Any]()
    look = on(Callback.on_step_end)(lambda run: seen.append(float(cast("Tensor", run.loss))))
    run = tiny_run(
        loader=[(None, weight) for weight in (3, 0, 2, 0) for _ in range(accumulate)],
        compute_loss=masked,
        accumulate=accumulate,
        callbacks=[LOG, look, Recover(), Checkpoint("1 step"), Alert("non-finite", to=[alerts.append])],
        directory=tmp_path,
    )
    assert seen == pytest.approx([1.0, NAN, 1.0, NAN], nan_ok=True)
    assert run.history["train/loss"] == [(1, 1.0), (3, 1.0)]
    assert (reason(run), told(run), alerts) == ("the limit is reached", [], [])
    assert caplog.text.count("the weights of all batches of step 2 are 0, so nothing was trained in it") == 1
    assert caplog.text.count("weights of all batches") == 1


@pytest.mark.parametrize("loop", ["step_fn", "attach"])
def test_a_step_of_weight_0_has_no_loss_in_a_loop_of_ones_own_either(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without labels, the user's code computes a loss of 0, which would be the best of the run."""
    weights, model = [3, 0, 2, 0], tiny_model()

    def outputs(step: int) -> dict[str, Any]:
        return {"loss": given(model, torch.tensor(min(1.0, weights[step]))), "weight": weights[step]}

    def step_fn(run: Run, batch: Any) -> dict[str, Any]:
        computed = outputs(run.progress.step)
        run.backward(computed["loss"])
        run.update()
        return computed

    if loop == "step_fn":
        run = tiny_run(model=model, loader=weights, step_fn=step_fn, callbacks=[LOG])
    else:
        with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=4, progress=False, callbacks=[LOG]) as attached:
            while not attached.over():
                with attached.step():
                    attached.backward(outputs(attached.run.progress.step))
                    attached.update()
        run = attached.run
    assert run.history["train/loss"] == [(1, 1.0), (3, 1.0)]
    assert (told(run), caplog.text.count("weights of all batches of step 2 are 0")) == ([], 1)


@pytest.mark.parametrize(("of_other_rank", "records"), [(0, 0), (2, 2)])
def test_a_step_counts_if_the_weight_of_another_rank_is_above_0(of_other_rank: int, records: int) -> None:
    def work() -> tuple[int, int]:
        told = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("cadenza").addHandler(handler)

        def step_fn(run: Run, batch: Any) -> dict[str, Any]:
            run.backward(given(run.model, torch.tensor(1.0)))
            run.update()
            return {"loss": torch.tensor(1.0), "weight": of_other_rank if run.driver.rank else 0}

        run = tiny_run(loader=[0] * 4, step_fn=step_fn, callbacks=[LOG], driver=DdpDriver("cpu"))
        number = len(run.history["train/loss"]) if "train/loss" in run.history.names else 0
        return number, sum("weights of all batches" in text for text in told)

    assert launch(work)[0] == (records, 0)  # a step_fn does not exchange the weights, so a warning could be wrong


def test_a_trial_of_learning_rates_leaves_out_a_step_of_weight_0() -> None:
    find = FindLearningRate(steps=30)
    tiny_run(loader=[(None, weight) for weight in (3, 0, 2)], compute_loss=masked, callbacks=[find])
    assert find.losses == [1.0] * 30

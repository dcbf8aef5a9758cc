"""The live run: what hooks read, what happens at its very end, and after an error."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Ema, Evaluate, LogTraining, Profile
from cadenza.engine.session import session_of
from cadenza.hooks.moments import moments_of
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.test_contract import FACTORIES


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

    run = tiny_run(callbacks=[Opening("a"), Opening("b")])
    assert order == ["log a", "log b", "close b", "close a"]
    with pytest.raises(RuntimeError, match="must be called inside a hook, such as on_fit_start"):
        run.at_end(print)


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


def test_what_a_user_prints_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def show(run: Run) -> None:
        run.log("mine/step", run.progress.step)
        run.print("at", run.progress, 1.5)

    run = tiny_run(callbacks=[on(Callback.on_step_end)(show)], steps=1)
    assert "at epoch 1, step 1, batch 1 1.5\n" in capsys.readouterr().out
    assert repr(run).startswith("<Run: epoch 1, step 1, batch 1; Outcome(kind='finished'")
    assert list(run.history) == ["mine/step"]
    assert repr(run.history) == "<History: step 1: mine/step>"


# -- errors: every start has its end, and the first error is the one that comes out ----------------


def failing_at(moment: Callable[..., None], error: BaseException) -> Callback:
    def fail(*_: Any) -> None:
        raise error

    class Failing(Callback):
        pass

    setattr(Failing, moment.__name__, fail)
    return Failing()


PAIRS = {
    "on_fit_start": "on_fit_end",
    "on_epoch_start": "on_epoch_end",
    "on_fetch_start": "on_fetch_end",
    "on_step_start": "on_step_end",
    "on_batch_start": "on_batch_end",
    "on_eval_start": "on_eval_end",
    "on_eval_batch_start": "on_eval_batch_end",
    "on_sanity_start": "on_sanity_end",
}


def unclosed(names: Iterable[str]) -> list[str]:
    """Return the ends that are missing; raise if an end comes without its start."""
    waiting: list[str] = []
    for name in names:
        if name in PAIRS:
            waiting.append(PAIRS[name])
        elif name in PAIRS.values():
            assert waiting.pop() == name
    return waiting


MOMENTS = {name: moment for name, moment in moments_of(Callback).items() if name not in ("on_save", "on_load", "on_exception")}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_every_start_has_its_end_wherever_a_callback_fails(moment: Callable[..., None], error: BaseException) -> None:
    error = type(error)(*error.args)  # a fresh one for each: notes are added to it
    stopping = [on(Callback.on_step_end)(lambda run: run.stop("enough"))] if moment is Callback.on_stop else []
    evaluate = Evaluate(tiny_loader(1), sanity_batches=1, every="1 step")
    recorder = Recorder()
    with pytest.raises(type(error)) as caught:
        tiny_run(callbacks=[recorder, evaluate, failing_at(moment, error), *stopping], batches=2)
    assert caught.value is error
    assert not unclosed(recorder.names)
    if moment not in (Callback.on_setup, Callback.on_fit_end):
        # What was logged before the error still comes out, after the end.
        assert [name for name in recorder.names if name != "on_log"][-2:] == ["on_exception", "on_fit_end"]


def broken_loss(model: nn.Module, batch: Any) -> Tensor:
    raise FloatingPointError("broken")


class Broken:
    """A loader that fails after its first batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from tiny_loader(1)
        raise OSError("disk gone")


def test_after_an_error_inner_ends_come_first_then_on_exception_then_on_fit_end() -> None:
    arguments: dict[str, Any]
    for arguments, error, last in (
        (
            {"callbacks": [failing_at(Callback.on_after_backward, RuntimeError("broken"))]},
            RuntimeError("broken"),
            "on_after_backward on_batch_end on_step_end on_epoch_end on_exception on_fit_end",
        ),
        ({"loader": Broken()}, OSError("disk gone"), "on_fetch_start on_fetch_end on_epoch_end on_exception on_fit_end"),
    ):
        recorder = Recorder()
        with pytest.raises(type(error), match=str(error)):
            tiny_run(**{**arguments, "callbacks": [recorder, *arguments.get("callbacks", ())]})
        assert recorder.names[-len(last.split()) :] == last.split()


def test_an_error_of_the_loss_function_leaves_the_counters_at_completed_work() -> None:
    recorder = Recorder(Callback.on_batch_end, Callback.on_step_end, Callback.on_epoch_end)
    with pytest.raises(FloatingPointError):
        tiny_run(callbacks=[recorder], compute_loss=broken_loss)
    assert [(seen.at.batch, seen.at.step, seen.at.epoch) for seen in recorder.seen] == [(0, 0, 0)] * 3


def test_the_first_error_is_never_replaced_and_later_ones_are_attached() -> None:
    class Fragile(Callback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            raise ValueError("the first")

        def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
            raise KeyError("the second")

        def on_exception(self, run: Run, error: BaseException) -> None:
            raise OSError("the third")

        def on_fit_end(self, run: Run) -> None:
            raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(ValueError, match="the first") as caught:
        tiny_run(callbacks=[Fragile(), recorder])
    raised, *later = caught.value.__notes__
    assert raised == "raised in Fragile.on_batch_start (callback 1 of 2) at the start"
    assert later == [
        "then Fragile.on_batch_end failed as well: KeyError('the second')",
        "then Fragile.on_exception failed as well: OSError('the third')",
        "then Fragile.on_fit_end failed as well: KeyboardInterrupt()",
    ]
    assert recorder.names[-5:] == ["on_batch_end", "on_step_end", "on_epoch_end", "on_exception", "on_fit_end"]


def test_an_end_reaches_all_though_two_of_them_fail_and_the_second_error_is_attached_to_the_first() -> None:
    recorder = Recorder(Callback.on_step_end)
    callbacks = [failing_at(Callback.on_step_end, error) for error in (ValueError("first"), KeyError("second"))]
    with pytest.raises(ValueError, match="first") as caught:
        tiny_run(callbacks=[*callbacks, recorder])
    assert recorder.names == ["on_step_end"]
    assert "then Failing#2.on_step_end failed as well: KeyError('second')" in caught.value.__notes__


def test_a_keyboard_interrupt_is_shown_to_the_callbacks_and_comes_through() -> None:
    shown: list[object] = []

    class Watching(Callback):
        def on_exception(self, run: Run, error: BaseException) -> None:
            shown.append(error)

        def on_fit_end(self, run: Run) -> None:
            shown.append(run.outcome and run.outcome.kind)

    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[Watching(), failing_at(Callback.on_batch_end, interrupt)])
    assert shown == [interrupt, "failed"]


def test_a_run_started_while_another_error_is_being_handled_raises_its_own_error() -> None:
    older, failing = OSError("an older one"), failing_at(Callback.on_step_end, KeyError("its own"))
    try:
        raise older
    except OSError:
        with pytest.raises(KeyError, match="its own"):
            tiny_run(callbacks=[failing])
    assert not hasattr(older, "__notes__")


class FullDisk(Callback):
    """Fails in its first hook."""

    def __init__(self, on_fault: Any = "raise") -> None:
        self.on_fault = on_fault

    def on_step_end(self, run: Run) -> None:
        raise OSError("the disk is full")


def fit(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    trainer = tiny_trainer(callbacks=callbacks, epochs=2, **arguments)
    with suppress(OSError):
        trainer.fit()
    return trainer


def fit_with_everything(folder: Path) -> Trainer:
    parts = Evaluate(tiny_loader()), Ema(0.9, every="1 epoch"), EarlyStopping("eval/loss", "min", patience=2), LogTraining(2)
    return fit(folder, *parts, Checkpoint(every="4 steps"), Profile(), directory=folder)


def step_by_step(run: Run, batch: Any) -> Tensor:
    loss: Tensor = run.model(batch[0]).square().mean()
    run.backward(loss)
    run.update()
    return loss


def evaluate_and_predict(folder: Path) -> Trainer:
    trainer = tiny_trainer(callbacks=[Ema()])
    trainer.evaluate(tiny_loader())
    trainer.predict(tiny_loader(), compute=lambda model, batch: model(batch[0]))
    return trainer


def loop_over_steps(folder: Path) -> Trainer:
    trainer = tiny_trainer()
    with suppress(OSError):
        for step in trainer.steps():
            for inputs, _ in step:
                step.backward(trainer.model(inputs).sum())
            if step.run.progress.step == 2:
                raise OSError
    return trainer


def loop_of_ones_own(folder: Path) -> Trainer:
    model = nn.Linear(1, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=3, progress=False) as loop:
        while not loop.over():
            with loop.step():
                loop.backward(model(torch.ones(1, 1)).sum())
                loop.update()
    return loop.trainer


WAYS: dict[str, Callable[[Path], Trainer]] = {
    "a fit": fit,
    "a fit with an error": lambda folder: fit(folder, FullDisk()),
    "a fit with a callback that is disabled": lambda folder: fit(folder, FullDisk("disable")),
    "a fit with many callbacks": fit_with_everything,
    "a step_fn": lambda folder: fit(folder, step_fn=step_by_step),
    "evaluate and predict": evaluate_and_predict,
    "steps, left with an error": loop_over_steps,
    "attach": loop_of_ones_own,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_model_is_free_once_its_trainer_is_deleted_without_a_garbage_collection(
    way: Callable[[Path], Trainer], tmp_path: Path
) -> None:
    way(tmp_path / "first")  # modules that torch imports late hold the frames of their import
    gc.collect()
    gc.disable()
    try:
        models = [weakref.ref(way(tmp_path / str(number)).model) for number in range(3)]
        alive = [model for model in models if model() is not None]
    finally:
        gc.enable()
    assert not alive


@pytest.mark.parametrize("name", FACTORIES)
def test_no_callback_keeps_a_model_alive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where SavePredictions writes
    for factory in FACTORIES[name]:
        model = tiny_model()
        gc.collect()
        gc.disable()
        try:
            tiny_trainer(model=model, callbacks=[Evaluate(tiny_loader()), factory()], directory=tmp_path / "run").fit()
            alive = weakref.ref(model)
            del model
            assert alive() is None
        finally:
            gc.enable()
        shutil.rmtree(tmp_path / "run")


def test_a_run_holds_what_it_shows_after_its_trainer_is_deleted() -> None:
    gc.collect()
    run = tiny_run(callbacks=[Evaluate(tiny_loader()), EarlyStopping("eval/loss", "min", patience=2)], epochs=2)
    gc.collect()
    assert [step for step, _ in run.history["eval/loss"]] == [5, 10]
    assert "0 of 2 evaluations without gain" in run.why_not("stopped").reasons[2]
    assert run.model(torch.ones(1, 1)).shape == (1, 1)
    assert session_of(run).run is run

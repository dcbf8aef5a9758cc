"""Checkpoint: when it writes, what it keeps and holds, and what it does about errors."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, load_weights, on
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.errors import CheckpointError, CheckpointMismatchError, StateError
from cadenza.files.disk import Unflushed
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment
from cadenza.status.encoding import same
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.waiting import until


def names(directory: Path) -> list[str]:
    return [saved.name.removeprefix("step-000000") for saved in Store(directory / "checkpoints").saved()]


def manifest(directory: Path, step: str) -> dict[str, Any]:
    store = Store(directory / "checkpoints")
    return store.verify(next(saved for saved in store.saved() if saved.name == f"step-000000{step}"))


def decided(run: Run, what: str) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == what]


def bests(keep: Checkpoint) -> dict[str, tuple[str, float]]:
    """Return the name and the value of the best checkpoint by each monitor."""
    return {one["monitor"]: (one["checkpoint"], one["value"]) for one in keep.writer.retention.bests()}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [("3 steps", 7, ["03", "06", "07"]), ("1 epoch", 10, ["05", "10"]), ("4 batches", 4, ["04"]),
     ("0.5 epoch", 5, ["03", "05"]),
     ("100 steps", 2, ["02"]), (lambda run: run.progress.step == 1, 3, ["01", "03"])],
)  # fmt: skip
def test_it_writes_at_its_cadence_and_at_the_end(
    tmp_path: Path, every: str | Callable[[Run], bool], steps: int, expected: list[str], background: bool
) -> None:
    own = Checkpoint(every, keep_last=None, background=background, directory=tmp_path / "checkpoints")  # enough without a run's
    tiny_run(steps=steps, callbacks=[own])
    assert names(tmp_path) == expected


def test_the_last_one_holds_the_end_of_the_last_epoch_and_what_was_evaluated_then(tmp_path: Path) -> None:
    """The 5th step and the end of the epoch have one step number, and are not the same."""

    def trainer() -> Trainer:
        return tiny_trainer(directory=tmp_path, seed=1, callbacks=[Evaluate(tiny_loader(1)), Checkpoint("5 steps")])

    history = trainer().fit().history["eval/loss"]
    assert names(tmp_path) == ["05-2"]  # of one step, the newer is kept
    recorder = Recorder()
    again = trainer()
    again.callbacks.append(recorder)
    assert again.fit(resume="auto").history["eval/loss"] == history
    assert recorder.names == []


def test_a_save_can_be_asked_for_and_is_done_at_the_border(tmp_path: Path) -> None:
    ask = on(Callback.on_batch_start, at=3)(lambda run, batch: run.save("I want it"))
    message = r"run\.save\(...\) needs a callback that writes checkpoints\. Add Checkpoint\(...\)"
    with pytest.raises(RuntimeError, match=message):
        tiny_run(callbacks=[ask])
    keep = Checkpoint("9 steps", keep_last=None)
    run = tiny_run(directory=tmp_path, accumulate=2, batches=6, callbacks=[ask, keep])
    assert names(tmp_path) == ["02", "03"]
    assert manifest(tmp_path, "02")["reason"] == "I want it"
    assert manifest(tmp_path, "02")["exact"] is True
    assert decided(run, "saved") == ["step-00000002: I want it", "step-00000003: the end of the run"]


def test_a_save_that_is_asked_for_in_the_end_is_waited_for(tmp_path: Path) -> None:
    ask, keep = on(Callback.on_fit_end)(lambda run: run.save("late")), Checkpoint("9 steps", on_exception=False)
    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, callbacks=[keep, ask, failing(Callback.on_step_end, 2)])
    assert names(tmp_path) == ["02"]
    assert "saved" in (tmp_path / "decisions.jsonl").read_text()
    assert not [thread for thread in threading.enumerate() if thread.name == "cadenza-checkpoint"]


@pytest.mark.parametrize(
    ("keep_last", "expected"), [(1, ["06", "99"]), (2, ["05", "06", "99"]), (4, ["03", "04", "05", "06", "99"])]
)
def test_the_last_are_kept_and_a_damaged_one_takes_no_place_among_them(
    tmp_path: Path, keep_last: int, expected: list[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000099").mkdir(parents=True)
    run = tiny_run(directory=tmp_path, steps=6, callbacks=[Checkpoint("1 step", keep_last=keep_last)])
    assert names(tmp_path) == expected
    assert len(decided(run, "pruned")) == 6 - keep_last
    assert not list((tmp_path / "checkpoints").glob(".t*"))


class Scripted(Callback):
    """Reports the next value of each name at the end of each step, or sets the weights to NaN before."""

    def __init__(self, **values: Sequence[float]) -> None:
        self.values = values
        self.poisoned_at: int | None = None

    def on_setup(self, run: Run) -> None:
        self.evaluation = Evaluate([]).evaluation
        run.evaluations["eval"] = self.evaluation

    def on_step_end(self, run: Run) -> None:
        step = run.progress.step
        if step == self.poisoned_at:
            run.model.get_parameter("bias").data.fill_(math.nan)
        elif step - 1 == self.poisoned_at:
            run.model.get_parameter("bias").data.fill_(0.0)
            run.model.get_parameter("weight").data.fill_(0.0)
        self.report(run, step - 1)

    def report(self, run: Run, index: int) -> None:
        self.evaluation.results = {f"eval/{name}": values[index] for name, values in self.values.items()}
        hooks_of(run).on_eval_end(run, self.evaluation)


def test_the_best_is_saved_at_the_evaluation_that_got_better_and_kept(tmp_path: Path) -> None:
    script = Scripted(acc=[0.1, 0.5, 0.4, 0.9, 0.9, 0.2, 0.3])
    keep = Checkpoint("100 steps", keep_last=1, keep_best=("eval/acc", "max"))
    run = tiny_run(directory=tmp_path, steps=7, callbacks=[script, keep])
    assert names(tmp_path) == ["04", "07"]
    assert manifest(tmp_path, "04")["reason"] == "eval/acc is 0.9, the best so far"
    assert [why.split(":")[0][-2:] for why in decided(run, "saved")] == ["01", "02", "04", "07"]


def test_several_bests_are_kept_each_and_survive_a_resume_by_the_names_of_their_values(tmp_path: Path) -> None:
    values = {"acc": [0.1, 0.9, 0.2, 0.3, 0.4, 0.5], "loss": [5.0, 4.0, 1.0, 2.0, 2.0, 0.5]}
    pairs: list[Any] = [("eval/acc", "max"), ("eval/loss", "min")]

    def fit(steps: int, keep_best: Any) -> dict[str, tuple[str, float]]:
        keep = Checkpoint("1 step", keep_last=1, keep_best=keep_best)
        tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=[Scripted(**values), keep]).fit(resume="auto")
        return bests(keep)

    assert fit(4, pairs) == {"eval/acc": ("step-00000002", 0.9), "eval/loss": ("step-00000003", 1.0)}
    assert names(tmp_path) == ["02", "03", "04"]
    fit(5, pairs[::-1])
    assert names(tmp_path) == ["02", "03", "05"]
    fit(6, pairs)
    assert names(tmp_path) == ["02", "06"]  # the loss got better, the accuracy did not


def test_weights_that_are_not_finite_are_saved_and_flagged_and_never_the_best(tmp_path: Path) -> None:
    script = Scripted(acc=[0.1, 0.9, 0.5, 0.2])
    script.poisoned_at = 2
    keep = Checkpoint("1 step", keep_last=None, keep_best=("eval/acc", "max"))
    tiny_run(directory=tmp_path, steps=4, callbacks=[script, keep])
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)] == [True, False, True, True]
    assert bests(keep) == {"eval/acc": ("step-00000003", 0.5)}


def test_two_share_a_place_and_each_keeps_its_own(tmp_path: Path) -> None:
    both = [Checkpoint("3 steps", keep_last=None), Checkpoint("1 step", keep_last=1)]
    run = tiny_run(directory=tmp_path, steps=6, callbacks=both)
    assert decided(run, "not saved") == []
    assert names(tmp_path) == ["03", "06"]
    store = Store(tmp_path / "checkpoints")
    assert [store.verify(saved)["asked_by"] for saved in store.saved()] == [["Checkpoint", "Checkpoint#2"]] * 2
    for steps in (3, 2):  # of two runs without an id
        tiny_run(steps=steps, callbacks=[Checkpoint("1 step", keep_last=1, directory=tmp_path / "other")])
    assert [saved.step for saved in Store(tmp_path / "other").saved()] == [2, 3]


class SlowFiles(LocalFiles):
    """Files that wait for a sign before the manifest is written, and count how many are being written at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.threads: set[str] = set()

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        self.go.wait()
        return super().write(path, content, later)


class Slow(Checkpoint):
    def on_setup(self, run: Run) -> None:
        super().on_setup(run)
        self.store.files = self.files = SlowFiles((run.info.directory or Path()) / "checkpoints")


def test_the_training_goes_on_while_a_checkpoint_is_written_and_it_holds_what_was_then(tmp_path: Path) -> None:
    slow, seen = Slow("2 steps", keep_last=None), []
    weights: dict[int, Any] = {}

    @on(Callback.on_step_end)
    def watch(run: Run) -> None:
        weights[run.progress.step] = {name: value.clone() for name, value in run.model.state_dict().items()}
        if run.progress.step in (3, 4):
            seen.append((run.progress.step, names(tmp_path)))
        if run.progress.step == 4:
            slow.files.go.set()

    tiny_run(directory=tmp_path, steps=5, callbacks=[watch, slow])
    assert seen == [(3, []), (4, [])]
    assert names(tmp_path) == ["02", "04", "05"]
    store = Store(tmp_path / "checkpoints")
    assert all(same(store.read(saved).model, weights[saved.step]) for saved in store.saved())
    assert slow.files.threads == {"cadenza-checkpoint"}


def test_at_most_one_is_being_written_the_next_waits_and_says_so(tmp_path: Path) -> None:
    slow = Slow("1 step", keep_last=None)

    def let_go(run: Run) -> None:
        try:
            until(lambda: decided(run, "waited"))
        finally:
            slow.files.go.set()

    sign = on(Callback.on_step_end, at=2)(lambda run: threading.Thread(target=let_go, args=(run,)).start())
    run = tiny_run(directory=tmp_path, steps=3, callbacks=[sign, slow])
    assert names(tmp_path) == ["01", "02", "03"]
    assert decided(run, "waited")[0] == "the last checkpoint is still being written"
    assert run.decisions[0].what == "waited"


def test_background_and_blocking_writes_give_the_same_files(tmp_path: Path) -> None:
    for folder, background in (("a", True), ("b", False)):
        callbacks = [Ema(0.5), Checkpoint("2 steps", background=background)]
        tiny_run(directory=tmp_path / folder, steps=4, seed=1, callbacks=callbacks)
    for step in ("step-00000002", "step-00000004"):
        left, right = (tmp_path / folder / "checkpoints" / step for folder in ("a", "b"))
        for file in ("model.safetensors", "state.safetensors"):
            assert (left / file).read_bytes() == (right / file).read_bytes()
        one, other = (Store(path.parent).read(Saved(int(step[5:]), 1, step)).state for path in (left, right))
        for state in (one, other):
            del state["offsets"]  # decisions are told at the next border when written in the background
        assert same(one, other)


INSIDE = [Callback.on_step_start, Callback.on_batch_start, Callback.on_before_backward, Callback.on_before_optimizer_step,
          Callback.on_after_optimizer_step, Callback.on_step_end, Callback.on_epoch_end]  # fmt: skip
BETWEEN = [Callback.on_fetch_start, Callback.on_fetch_end]


def failing(moment: Moment, step: int) -> Callback:
    def fail(run: Run, *_: Any) -> None:
        raise ZeroDivisionError

    return on(moment, when=lambda run: run.progress.step == step)(fail)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The weights after two epochs without an error."""
    return dict(tiny_run(epochs=2, seed=1).model.state_dict())


@pytest.mark.parametrize("moment", [*INSIDE, *BETWEEN])
def test_an_error_leaves_a_checkpoint_that_is_not_continued_by_itself_if_it_is_of_the_middle_of_a_step(
    tmp_path: Path, moment: Moment, caplog: pytest.LogCaptureFixture, whole: dict[str, Any]
) -> None:
    step, exact = 5 if moment is Callback.on_epoch_end else 3, moment in BETWEEN
    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, epochs=2, seed=1, callbacks=[failing(moment, step), Checkpoint("2 steps")])
    assert names(tmp_path)[-1] == f"0{step}"
    last = manifest(tmp_path, f"0{step}")
    assert (last["exact"], last["reason"]) == (exact, "an error: ZeroDivisionError()")
    run = tiny_trainer(directory=tmp_path, epochs=2, seed=1, callbacks=[Checkpoint("2 steps")]).fit(resume="auto")
    assert run.why("resumed").endswith(f"at step-0000000{step if exact else step - 1}")
    reason = f"step-0000000{step}: written in the middle of a step (an error: ZeroDivisionError())"
    assert (f"skipped a checkpoint: {reason}" in caplog.messages) is not exact
    assert same(dict(run.model.state_dict()), whole)


def test_one_that_is_not_exact_is_marked_and_can_be_left_out_or_continued_by_its_path(tmp_path: Path) -> None:
    for name, on_exception, steps in (("without", False, ["02"]), ("with", True, ["02", "03"])):
        keep = Checkpoint("2 steps", on_exception=on_exception)
        with pytest.raises(ZeroDivisionError):
            tiny_run(directory=tmp_path / name, steps=5, callbacks=[failing(Callback.on_batch_start, 3), keep])
        assert names(tmp_path / name) == steps
    trainer = tiny_trainer(directory=tmp_path / "with", steps=5, callbacks=[Checkpoint()])
    assert trainer.fit(resume=tmp_path / "with" / "checkpoints" / "step-00000003").progress.step == 5

    ask = on(Callback.on_batch_start, at=3)(lambda run, batch: run.save("before the error"))
    callbacks = [ask, failing(Callback.on_batch_start, 2), Checkpoint("9 steps", on_exception=False)]
    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path / "asked", callbacks=callbacks)
    assert manifest(tmp_path / "asked", "02")["exact"] is False


def test_weights_only_writes_the_model_alone_and_no_run_continues_there(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[Checkpoint("5 steps", weights_only=True)], seed=1)
    saved = tmp_path / "checkpoints" / "step-00000005"
    assert json.loads((saved / "state.json").read_text(encoding="utf-8")) == {}
    model = tiny_model()
    load_weights(saved, model)
    assert torch.equal(model.weight, cast("nn.Linear", run.model).weight)
    with pytest.raises(CheckpointError, match="step-00000005: it holds weights only"):
        tiny_trainer(directory=tmp_path, epochs=2, seed=1).fit(resume="auto")
    with pytest.raises(CheckpointMismatchError, match="holds weights only, and a run cannot continue there: use load_weights"):
        tiny_trainer(directory=tmp_path / "other", epochs=2, seed=1).fit(resume=saved)


def test_a_state_that_cannot_be_saved_is_named_before_the_first_step(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"open": {"file": print}}

    recorder = Recorder(Callback.on_step_start)
    with pytest.raises(StateError, match=r"Odd\.open\.file cannot be saved: .* got builtin_function_or_method"):
        tiny_run(directory=tmp_path, callbacks=[recorder, Odd(), Checkpoint()])
    assert not recorder.seen

"""What users test their callbacks with."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from cadenza import Callback, Evaluation, Run
from cadenza.callbacks import EarlyStopping, LogTraining
from cadenza.errors import StateError
from cadenza.testing import Recorder, check_callback, launch, simulate, tiny_run


class Counts(Callback):
    """Counts steps, and loses the count when the run is cut."""

    def on_setup(self, run: Run) -> None:
        self.steps = 0

    def on_step_end(self, run: Run) -> None:
        self.steps += 1


class Forgetful(Counts):
    """Does not take its state back."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


class Saves(Forgetful):
    """Takes it back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Broken(Callback):
    def on_step_end(self, run: Run) -> None:
        raise ValueError("broken")


class Unsavable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}


class Clumsy(Callback):
    """Fails when a run has failed."""

    def on_fit_end(self, run: Run) -> None:
        if run.outcome is not None and run.outcome.kind == "failed":
            raise KeyError("unprepared")


class BestRestored(EarlyStopping):
    """Ends with the best weights, and keeps those of an earlier run."""

    def __init__(self) -> None:
        super().__init__("eval/loss", mode="min", restore_best=True)

    def on_setup(self, run: Run) -> None:
        best, self.best = self.best, None
        super().on_setup(run)
        self.best = best


class Once(Callback):
    """Acts in its first run alone."""

    done = False

    def on_step_end(self, run: Run) -> None:
        if not self.done:
            run.log("acted", 1)
        self.done = True


class Grown(Callback):
    """Changes the model by how long it has lived."""

    steps = 0

    def on_step_end(self, run: Run) -> None:
        self.steps += 1
        nn.init.constant_(run.model.get_parameter("bias"), self.steps)


class Decays(Callback):
    """Changes the learning rate by its own count."""

    def on_setup(self, run: Run) -> None:
        self.seen = [0]

    def on_step_end(self, run: Run) -> None:
        self.seen[0] += 1
        run.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + self.seen[0])


class Accumulates(Callback):
    """Counts the steps of several batches, and logs their number."""

    several = 0

    def on_setup(self, run: Run) -> None:
        self.several = 0

    def on_step_end(self, run: Run) -> None:
        self.several += run.progress.batch > run.progress.step
        if run.progress.batch > run.progress.step:
            run.log("several", self.several)


class Reads(Callback):
    """Waits for the device in each step."""

    def on_step_end(self, run: Run) -> None:
        if run.loss is not None:
            run.log("own", run.loss.item())


class ReadsSeldom(Callback):
    """Waits for the device in every 5th step."""

    def on_step_end(self, run: Run) -> None:
        if run.loss is not None and run.progress.step % 5 == 0:
            run.log("own", run.loss.item())


class Depends(Callback):
    """Replaces the learning rate that `LogTraining` logged, if that was called before."""

    def on_step_end(self, run: Run) -> None:
        run.log("train/lr", 0.0)


class DependsAsDeclared(Depends):
    after = (LogTraining,)


class Keeps(Callback):
    """Keeps a value from one run for the next."""

    runs = 0

    def on_fit_start(self, run: Run) -> None:
        self.runs += 1

    def on_step_end(self, run: Run) -> None:
        run.log("runs", self.runs)


EARLIER_RUN = "gives another result than a new one: runs.*"


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (Forgetful, AssertionError, r"after load_state_dict, state_dict returns something else: steps: 0 and \d"),
        (Unsavable, StateError, r"Unsavable\.state_dict\(\)\.function cannot be saved"),
        (Clumsy, AssertionError, r"the callback failed in a run that failed: .*unprepared"),
        (Broken, ValueError, "broken"),
        (BestRestored, AssertionError, EARLIER_RUN + r"model.weight: .* and .*\[1\.9"),
        (Once, AssertionError, EARLIER_RUN + "history: keys"),
        (Grown, AssertionError, EARLIER_RUN + "model.bias: "),
        (
            Keeps,
            AssertionError,
            r"an instance of Keeps that has served other runs.*Attributes with another value: runs \(.*Reset in on_setup",
        ),
        (Counts, AssertionError, r"Counts has state that no checkpoint has: .*: steps \(12 in a whole run, 9 here\)"),
        (Accumulates, AssertionError, r"Accumulates has state that no checkpoint has: .* differs in the run"),
        (
            Decays,
            AssertionError,
            r"Decays has state that no checkpoint has: .* differs in the run.*Return these values from state_dict",
        ),
        (
            Reads,
            AssertionError,
            r"Reads reads the device in each step.*on_step_end did in each of 3 sampled steps \(tensor.item\(\) at test_",
        ),
        (
            Depends,
            AssertionError,
            r"Depends gives other results at the start of the list than at its end.*train/lr.*Declare after",
        ),
    ],
)
def test_a_planted_defect_is_found_and_named(factory: Callable[[], Callback], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_callback(factory)


@pytest.mark.parametrize(
    ("factory", "options"), [(Saves, {}), (ReadsSeldom, {}), (DependsAsDeclared, {}), (Reads, {"reads": True})]
)
def test_a_callback_without_the_defect_passes(factory: Callable[[], Callback], options: dict[str, Any]) -> None:
    check_callback(factory, **options)


# -- scripts, recorders and processes --------------------------------------------------------------------


def test_a_script_is_played_as_evaluations() -> None:
    seen: list[tuple[int, Mapping[str, float]]] = []

    class Watching(Callback):
        def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
            seen.append((run.progress.epoch, dict(evaluation.results)))

    run = simulate([Watching()], metrics={"eval/loss": [3.0, 2.0], "eval/acc": [0.1, 0.2], "test/loss": [4.0, 5.0]})
    assert seen == [
        (1, {"eval/loss": 3.0, "eval/acc": 0.1}),
        (1, {"test/loss": 4.0}),
        (2, {"eval/loss": 2.0, "eval/acc": 0.2}),
        (2, {"test/loss": 5.0}),
    ]
    assert run.history["test/loss"] == [(2, 4.0), (4, 5.0)]


def test_a_script_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"metrics\['eval/loss'\] has 2 values for 3 epochs; give one for each"):
        simulate([], metrics={"eval/loss": [1.0, 2.0]}, epochs=3)


def test_losses_can_be_written_down() -> None:
    losses: list[float] = []

    class Keeping(Callback):
        def on_step_end(self, run: Run) -> None:
            losses.append(float(run.outputs["loss"].detach()))

    tiny_run(losses=[3.0, 2.0, 1.0], callbacks=[Keeping()])
    assert losses == [3.0, 2.0, 1.0]


def test_a_recorder_may_hear_only_some_moments() -> None:
    recorder = Recorder(Callback.on_epoch_end)
    tiny_run(callbacks=[recorder], epochs=3)
    assert [(seen.moment, seen.at.epoch) for seen in recorder.seen] == [("on_epoch_end", epoch) for epoch in (1, 2, 3)]


class Held:
    """Garbage that is destroyed by the process that made it alone: its destructor may wait for a thread of it."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(3)


def test_what_is_garbage_in_this_process_is_not_destroyed_in_the_others() -> None:
    gc.disable()
    try:
        Held()
        assert launch(gc.collect, 2) is not None
    finally:
        gc.enable()


def test_a_process_that_ends_before_it_has_begun_is_an_error_that_says_how() -> None:
    with pytest.raises(BaseExceptionGroup, match="2 of 2 ranks failed") as caught, patch.object(os, "fork", ended(os.fork)):
        launch(gc.collect, 2)
    assert "rank 0 ended without a result: exit code 7" in {str(error) for error in caught.value.exceptions}


def ended(fork: Callable[[], int]) -> Callable[[], int]:
    """Return a fork whose child ends at once, before the parent goes on."""

    def forks() -> int:
        if child := fork():
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            return child
        os._exit(7)

    return forks

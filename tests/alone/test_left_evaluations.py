"""A signal during an evaluation: it is left at the next batch, the run is saved, and the resume repeats the evaluation."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    SavePredictions,
    Warmup,
)
from cadenza.checkpoint.store import Store
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import BaseCallback
from cadenza.hooks.schedule import Schedule
from cadenza.loading.evaluation import Evaluation
from cadenza.status.encoding import first_difference
from tests.checkpoint.store.contents import latest
from tests.engine.test_calendar import continued
from tests.long import LONG

CLOCKS = ("time", "train/samples_per_s", "train/steps_per_s")
Every = str | Schedule | Callable[[Run], bool]
DATA = TensorDataset(torch.linspace(-1, 1, 48).reshape(12, 4), torch.arange(12) % 2)


class Tells(Callback):
    """Writes down what it is called for, keeps it in checkpoints, logs it, and changes the weights: its place matters."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, list[str]()

    def _tell(self, run: Run, moment: str) -> None:
        self.calls.append(f"{moment} {run.progress.step}: {run.history.latest.get('eval/loss')}")
        run.log(f"{self.name}/loss", run.loss if run.loss is not None else -1.0)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.999)

    def on_step_end(self, run: Run) -> None:
        self._tell(run, f"step {float(run.outputs['predictions'].detach().sum()):.6f}")

    def on_epoch_end(self, run: Run) -> None:
        self._tell(run, "epoch")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = list(state["calls"])


class Signals(Callback):
    """Sends a signal in a batch of the evaluation at a step, as often as `times` says."""

    def __init__(self, step: int, batch: int, number: int = signal.SIGTERM, evaluation: str = "eval") -> None:
        self.at, self.number, self.evaluation = (step, batch), number, evaluation
        self.seen: list[int] = []
        self.ends: list[tuple[bool, dict[str, float]]] = []

    def on_eval_batch_start(self, run: Run, evaluation: Evaluation, batch: Any) -> None:
        self.seen.append(run.progress.step)
        if (run.progress.step, evaluation.batch, evaluation.name) == (*self.at, self.evaluation):
            os.kill(os.getpid(), self.number)

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        self.ends.append((evaluation.complete, dict(evaluation.results)))


def trainer(directory: Path, *more: BaseCallback, every: Every = "1 epoch", **options: Any) -> Trainer:
    """Return a training of 12 steps in which each callback's place in the list changes the result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(DATA, batch_size=2, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=3,
        seed=3,
        directory=directory,
        device="cpu",
        progress=False,
        callbacks=[
            *more,
            Checkpoint("100 steps", keep_best=("eval/loss", "min")),
            LogTraining("1 step"),
            Tells("before"),
            LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.5), every="1 epoch"),
            EarlyStopping("eval/loss", mode="min", patience=30),
            Ema(0.9),
            Evaluate(DataLoader(DATA, batch_size=2), every=every),
            Evaluate(DataLoader(DATA, batch_size=4), every=every, name="averaged", weights="ema"),
            Warmup("3 steps"),
            BestWeights("averaged/loss", "min"),
            EarlyStopping("averaged/loss", mode="min", patience=30),
            Tells("after"),
        ],
        **options,
    )


def ended(one: Trainer) -> dict[str, Any]:
    """Do the run, or go on with it; return all that it ends with."""
    run = one.fit(resume="auto")
    assert run.outcome is not None
    assert run.info.directory is not None
    rows = [json.loads(line) for line in (run.info.directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "outcome": [run.outcome.kind, run.outcome.reason],
        "model": dict(one.model.state_dict()),
        "callbacks": {
            name: callback.state_dict() for name, callback in hooks_of(run).callbacks.items() if name != "Checkpoint"
        },
        "history": {name: run.history[name] for name in run.history.names if name not in CLOCKS},
        "rows": [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows],
        "evaluated": [str(one) for one in decisions(run.info.directory, "evaluated")],
        "random": torch.rand(3),
    }


def decisions(directory: Path, what: str) -> list[dict[str, Any]]:
    lines = (directory / "decisions.jsonl").read_text().splitlines()
    return [one for line in lines if (one := json.loads(line))["what"] == what]


def outcome_in(directory: Path) -> Any:
    return json.loads((directory / "run.json").read_text())["outcome"]


CADENCES: dict[str, Every] = {
    "epochs": "1 epoch",
    "steps": "3 steps",
    "the clock": "0.001 s",  # in each step
    "a function": lambda run: run.loss is not None and run.progress.step % 4 == 0,
}


SIGNALS = [("eval", signal.SIGTERM), ("averaged", signal.SIGINT)]
CASES = [(cadence, *SIGNALS[index % 2]) for index, cadence in enumerate(CADENCES)]


@pytest.mark.parametrize(
    ("cadence", "evaluation", "number"), [(cadence, *one) for cadence in CADENCES for one in SIGNALS] if LONG else CASES
)
def test_it_is_left_at_the_next_batch_and_repeated_to_the_same_bits(
    tmp_path: Path, cadence: str, evaluation: str, number: signal.Signals
) -> None:
    step = 12
    whole = ended(trainer(tmp_path / "whole", every=CADENCES[cadence]))
    directory, signals = tmp_path / "run", Signals(step, 1, number, evaluation)
    with pytest.raises(SystemExit) as end:
        trainer(directory, signals, every=CADENCES[cadence]).fit()
    assert end.value.code == 128 + number
    assert outcome_in(directory)["kind"] == ("interrupted" if number == signal.SIGINT else "preempted")
    batches = {"eval": [2], "averaged": [6, 2]}[evaluation]
    assert signals.seen.count(step) == sum(batches)  # no batch after the one in which the signal came
    assert signals.ends[-1] == (False, {})
    [left] = decisions(directory, "evaluation left")
    assert (left["step"], left["why"]) == (
        step,
        f"{evaluation!r} was left after 2 batches; it is repeated when the run continues",
    )
    newest, skipped = latest(Store(directory / "checkpoints"))
    assert newest is not None
    assert (newest.step, skipped) == (step, [])
    assert first_difference(ended(trainer(directory, every=CADENCES[cadence])), whole) is None


def test_it_may_be_left_again_and_again(tmp_path: Path) -> None:
    whole, directory = ended(trainer(tmp_path / "whole")), tmp_path / "run"
    for step, batch, evaluation in ((6, 0, "eval"), (6, 5, "eval"), (6, 1, "averaged"), (18, 2, "averaged")):
        with pytest.raises(SystemExit):
            trainer(directory, Signals(step, batch, evaluation=evaluation)).fit(resume="auto")
        newest, _ = latest(Store(directory / "checkpoints"))
        assert newest is not None
        assert newest.step == step
    assert first_difference(ended(trainer(directory)), whole) is None


def test_a_stop_that_a_callback_asked_for_in_the_same_moment_is_taken_after_the_resume(tmp_path: Path) -> None:
    def stopping(directory: Path, *more: BaseCallback) -> Trainer:
        stop = on(Callback.on_eval_end, when=lambda run: run.progress.step == 12 and "eval/loss" in run.history.names)
        return trainer(directory, *more, stop(lambda run, evaluation: run.stop("enough")))

    whole, directory = ended(stopping(tmp_path / "whole")), tmp_path / "run"
    assert whole["outcome"] == ["stopped", "enough"]
    with pytest.raises(SystemExit):
        stopping(directory, Signals(12, 1, evaluation="averaged")).fit()  # the stop is asked for in the evaluation before
    assert outcome_in(directory)["kind"] == "preempted"
    assert first_difference(ended(stopping(directory)), whole) is None


def test_a_prediction_that_a_hook_makes_with_the_trainer_is_completed_before_the_run_is_saved(tmp_path: Path) -> None:
    def predicting(directory: Path, *more: BaseCallback) -> tuple[Trainer, list[int]]:
        rows: list[int] = []
        loader = DataLoader(DATA, batch_size=2)
        predict = on(Callback.on_step_end, at=5)(lambda run: rows.append(len(one.predict(loader))))
        one = trainer(directory, *more, predict, SavePredictions(directory.with_suffix(".csv")))
        return one, rows

    whole = ended(predicting(tmp_path / "whole")[0])
    directory, signals = tmp_path / "run", Signals(0, 3, evaluation="predict")
    first, rows = predicting(directory, signals)
    with pytest.raises(SystemExit):
        first.fit()
    assert (rows, len(signals.seen)) == ([12], 6)
    assert directory.with_suffix(".csv").exists()
    newest, _ = latest(Store(directory / "checkpoints"))
    assert newest is not None
    assert newest.step == 5
    again, rows = predicting(directory)
    assert first_difference(ended(again), whole) is None
    assert rows == []


def test_with_a_signal_in_the_sanity_check_nothing_is_saved_and_the_next_start_begins_anew(tmp_path: Path) -> None:
    def checking(directory: Path, *more: BaseCallback) -> Trainer:
        one = trainer(directory, *more)
        one.callbacks.append(Evaluate(DataLoader(DATA, batch_size=2), name="first", sanity_batches=6))
        return one

    whole, directory, checked = ended(checking(tmp_path / "whole")), tmp_path / "run", list[int]()

    @on(Callback.on_sanity_start)
    def send(run: Run, evaluation: Evaluation) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    @on(Callback.on_sanity_end)
    def count(run: Run, evaluation: Evaluation) -> None:
        checked.append(evaluation.batch)

    with pytest.raises(SystemExit):
        checking(directory, send, count).fit()
    assert checked == [0]
    assert outcome_in(directory) == {"kind": "preempted", "reason": "signal SIGTERM"}
    assert Store(directory / "checkpoints").saved() == []
    assert first_difference(ended(checking(directory)), whole) is None


@pytest.mark.parametrize("moment", [Callback.on_before_optimizer_step, Callback.on_fit_end])
def test_inside_a_step_and_at_the_very_end_an_evaluation_is_completed(tmp_path: Path, moment: Callable[..., None]) -> None:
    results: list[dict[str, float]] = []

    @on(moment, when=lambda run: run.progress.step in (4, 18))
    def judge(run: Run) -> None:
        results.append(one.evaluate(DataLoader(DATA, batch_size=2), name="inside"))

    one = trainer(tmp_path / "run", Signals(0, 1, evaluation="inside"), judge)
    with pytest.raises(SystemExit):
        one.fit()
    assert [set(found) for found in results] == [{"inside/loss"}]
    newest, _ = latest(Store(tmp_path / "run" / "checkpoints"))
    assert newest is not None
    assert newest.step == (18 if moment is Callback.on_fit_end else 5)


def test_a_hook_that_is_not_due_stays_so_when_two_evaluations_are_left_one_after_the_other(tmp_path: Path) -> None:
    def rows(directory: Path, *more: BaseCallback) -> Any:
        one = trainer(directory, *more, Evaluate(DataLoader(DATA, batch_size=2), every="4 steps", name="often"))
        one.callbacks.append(LogTraining("3 steps", throughput=False, prefix="seldom"))
        return ended(one)["rows"]

    whole = rows(tmp_path / "whole")
    for step in (4, 8):
        with pytest.raises(SystemExit):
            rows(tmp_path / "left", Signals(step, 1, evaluation="often"))
    assert rows(tmp_path / "left") == whole


def test_what_the_repeated_evaluation_gave_rise_to_is_saved_though_no_step_followed(tmp_path: Path) -> None:
    def newest(directory: Path, *more: BaseCallback) -> dict[str, Any]:
        stop = on(Callback.on_eval_end)(lambda run, evaluation: run.stop("good enough"))
        one = trainer(directory, *more, stop, every="4 steps")
        one.callbacks = [callback for callback in one.callbacks if not isinstance(callback, Checkpoint)]
        one.callbacks.append(Checkpoint("100 steps"))  # none that saves because a result is the best
        ended(one)
        store = Store(directory / "checkpoints")
        saved, _ = latest(store)
        assert saved is not None
        state = store.read(saved).state
        return {"requests": state["requests"], "step": state["progress"]["step"], "history": state["history"]["eval/loss"]}

    whole = newest(tmp_path / "whole")
    with pytest.raises(SystemExit):
        newest(tmp_path / "left", Signals(4, 1))
    assert first_difference(whole, newest(tmp_path / "left")) is None
    assert whole["requests"]["stop"]["why"] == "good enough"


@pytest.mark.parametrize(("evaluation", "batch"), [("eval", 1), ("steps", 1), ("averaged", 0)])
def test_at_the_last_step_of_an_epoch_those_of_the_step_and_those_of_the_epoch_run_once(
    tmp_path: Path, evaluation: str, batch: int
) -> None:
    def saving(directory: Path, *more: BaseCallback) -> Trainer:
        one = trainer(directory, *more, Evaluate(DataLoader(DATA, batch_size=4), every="3 steps", name="steps"))
        one.callbacks += [Checkpoint("3 steps", keep_last=9), Checkpoint("1 epoch", keep_last=9)]
        return one

    whole, directory = ended(saving(tmp_path / "whole")), tmp_path / "run"
    with pytest.raises(SystemExit):
        saving(directory, Signals(12, batch, evaluation=evaluation)).fit()
    assert first_difference(ended(saving(directory)), whole) is None


def test_with_a_signal_in_the_hooks_before_it_an_evaluation_does_not_begin_a_batch(tmp_path: Path) -> None:
    whole, directory, seen = ended(trainer(tmp_path / "whole")), tmp_path / "run", Signals(0, 0)
    send = on(Callback.on_epoch_end, at=2)(lambda run: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer(directory, seen, send).fit()
    assert 12 not in seen.seen
    assert first_difference(ended(trainer(directory)), whole) is None


def test_an_act_that_a_hook_gave_to_the_boundary_is_carried_out_once_and_saved(tmp_path: Path) -> None:
    def acting(directory: Path, acts: list[int], *more: BaseCallback) -> Trainer:
        @on(Callback.on_epoch_end, at=2)
        def ask(run: Run) -> None:
            run.after_step(lambda: acts.append(run.progress.step))
            run.after_step(lambda: run.state.update(acted=True))

        return trainer(directory, *more, ask)

    acts: list[int] = []
    with pytest.raises(SystemExit):
        acting(tmp_path / "run", acts, Signals(12, 1)).fit()
    run = acting(tmp_path / "run", acts).fit(resume="auto")
    assert acts == [12]
    assert run.state["acted"]


def test_an_evaluation_whose_callback_is_gone_is_named_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        trainer(tmp_path / "run", Signals(12, 1, evaluation="averaged")).fit()
    again = trainer(tmp_path / "run")
    again.callbacks = [one for one in again.callbacks if "averaged" not in repr(one)]
    run = again.fit(resume="auto")
    assert "Evaluate(averaged) was evaluating when the run was interrupted" in caplog.text
    assert run.progress.step == 18
    assert [step for step, _ in run.history["eval/loss"]] == [6, 12, 18]


def test_the_calendar_of_a_run_that_was_left_inside_an_evaluation_names_the_calls_that_are_left(tmp_path: Path) -> None:
    leave = on(Callback.on_eval_batch_end, at=1)(lambda run, *_: os.kill(os.getpid(), signal.SIGTERM))
    again, named = continued(4, {}, leave, tmp_path)
    assert again == named
    assert again

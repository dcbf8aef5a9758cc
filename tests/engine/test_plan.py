"""The plan: who is called when and who never is, how it differs from the plan of the run so far, and what a run waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Evaluate, LogTraining, TimeLimit
from cadenza.commands.main import main
from cadenza.engine.plan import never
from cadenza.engine.session import session_of
from cadenza.errors import DirectoryError
from cadenza.hooks.counters import counting_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment, moments_of
from cadenza.testing import Recorder, launch, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.distributed.parts import loader as sharded_loader
from tests.distributed.parts import trainer as sharded_trainer

MOMENTS = """
on_setup
on_fit_start
  on_epoch_start
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
  on_epoch_end
on_fit_end
on_stop
on_exception
on_sanity_start
on_sanity_end
on_eval_start
  on_eval_batch_start
  on_eval_batch_end
on_eval_end
on_log
on_save
on_load
"""


class Sink(Callback):
    on_fault = "disable"

    def on_log(self, run: Run, record: object) -> None: ...


class PlanMoments(Callback, declares=True):
    def on_prune(self, run: Run) -> None: ...


def test_it_is_the_tree_of_all_moments_and_starts_nothing() -> None:
    headline, *tree = str(tiny_trainer().plan()).splitlines()
    assert headline == "fit: 1 epoch, 5 batches an epoch, 5 steps, on cpu, in fp32"
    assert tree == MOMENTS.strip("\n").splitlines()
    trainer = tiny_trainer(callbacks=[setup := Recorder(Callback.on_setup)])
    assert str(trainer.plan()) == str(trainer.plan())
    assert setup.names == []


def test_it_names_the_listeners_in_order_with_cadence_and_limit() -> None:
    callbacks = [
        ClipGradients(1.0),
        Evaluate(tiny_loader(), every="2 steps", limit=3),
        LogTraining(every="3 steps"),
        Sink(),
        on(PlanMoments.on_prune)(lambda run: None),
        on(Callback.on_step_end, every=99)(print),
    ]
    trainer = tiny_trainer(callbacks=callbacks, epochs=2, accumulate=2, seed=4, directory="runs/never-made")
    lines = [line.split(maxsplit=1) for line in str(trainer.plan()).splitlines()]
    heard = {line[0]: line[1] for line in lines if len(line) == 2}
    length = "2 epochs, 5 batches an epoch, 6 steps of 2 batches, on cpu, in fp32, seed 4"
    assert heard["fit:"] == f"{length}, into {Path('runs/never-made').absolute()}"
    assert heard["on_before_optimizer_step"] == "ClipGradients"
    assert heard["on_step_end"] == "Evaluate (every 2 steps, 3 batches) > LogTraining (every 3 steps) > print (every 99 steps)"
    assert heard["run.fire(PlanMoments.on_prune)"] == "<lambda>"
    assert heard["!"] == "print (every 99 steps) never fires: the run ends after 6 steps"
    assert heard["a"] == "fault only disables: Sink"
    assert not trainer.directory or not trainer.directory.exists()


TENSORS = TensorDataset(torch.zeros(1000, 1), torch.zeros(1000, 1))


def doubts(trainer: Trainer) -> list[str]:
    return [line[2:] for line in str(trainer.plan()).splitlines() if line.startswith("! ")]


def test_it_doubts_a_loader_that_takes_samples_one_by_one_from_tensors_in_memory() -> None:
    one_by_one = "samples one by one from tensors that are in memory: cadenza.loading.TensorBatches takes a batch at once"
    few = TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))
    assert doubts(tiny_trainer(loader=DataLoader(few, batch_size=2))) == []
    for data in (TENSORS, Subset(TENSORS, range(4))):
        (doubt,) = doubts(tiny_trainer(loader=DataLoader(data, batch_size=2)))
        assert one_by_one in doubt
    assert doubts(tiny_trainer()) == doubts(tiny_trainer(loader=DataLoader(ConcatDataset([TENSORS])))) == []


def test_a_run_says_at_its_start_what_its_plan_doubts_each_once(caplog: pytest.LogCaptureFixture) -> None:
    said: list[list[str]] = []
    look = on(Callback.on_fit_start)(lambda run: said.append(list(caplog.messages)))
    model, loader = torch.nn.Linear(1, 1), DataLoader[Any](TENSORS, batch_size=100)
    trainer = tiny_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader, callbacks=[look])
    doubted = doubts(trainer)
    assert [doubt.split()[:3] for doubt in doubted] == [["AdamW", "could", "be"], ["the", "loader", "takes"]]
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        trainer.fit()
    assert said == [doubted]
    assert caplog.messages == doubted


COUNTED = [moment for moment in moments_of(Callback).values() if counting_of(moment).unit != "time"]
EPOCHS, STEPS = [{"epochs": 2}, {"epochs": 2, "accumulate": 2}], [{"steps": 3}, {"steps": 7}, {"steps": 10}]
WITH_BOTH = [{"epochs": 2, "steps": 7}, {"epochs": 1, "steps": 7}, {"epochs": 2, "steps": 10}]
RUNS = [*EPOCHS, *STEPS, *WITH_BOTH, {"steps": 6, "accumulate": 2}, {"steps": 5, "accumulate": 2}]  # of 5 batches an epoch


log = on(Callback.on_step_end)(lambda run: run.log("x", 1))  # so that on_log comes


def counting(moment: Moment, **filter: int) -> Callback:
    return on(moment, **filter)(lambda *_: None)  # type: ignore[arg-type]  # moments of every shape


@pytest.mark.parametrize("length", RUNS, ids=str)
def test_who_never_fires_is_said_before_the_run_and_is_what_the_run_then_does(length: dict[str, int]) -> None:
    filters = [{name: count} for name in ("every", "at") for count in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12)]
    run = tiny_run(callbacks=[log, *(counting(moment, **filter) for moment in COUNTED for filter in filters)], **length)
    listeners = [one for each in hooks_of(run).by_moment.values() for one in each if one.schedule is not None]
    silent = {str(one) for one in listeners if one.trigger is None or not one.trigger.times_due}
    assert silent == {str(one) for one, _ in never(hooks_of(run), run.progress, session_of(run).step.window.size)}
    assert silent


CHANGES = [
    "- fit: 1 epoch",
    "- fit: 5 steps",
    "+ fit: 2 epochs",
    "+ fit: 10 steps",
    "- on_step_end: LogTraining (every 2 steps)",
    "+ on_step_end: LogTraining (every 3 steps)",
]


def trainer(directory: Path | None, every: str, **arguments: Any) -> Trainer:
    return tiny_trainer(callbacks=[LogTraining(every), Checkpoint()], directory=directory, **arguments)


def test_the_plan_of_a_run_that_continues_ends_with_its_differences_and_the_run_records_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not trainer(tmp_path / "run", "2 steps").plan().changes, "there is no run yet"
    trainer(tmp_path / "run", "2 steps").fit()
    changed = trainer(tmp_path / "run", "3 steps", epochs=2)
    plan = changed.plan()
    assert plan.changes == plan.to_dict()["changes"] == CHANGES
    assert "\n".join(["changed since the run so far:", *CHANGES]) in str(plan)
    assert trainer(tmp_path / "new", "3 steps", epochs=2).plan(since=tmp_path / "run").changes == CHANGES, "of any run"
    with pytest.raises(DirectoryError, match="other' holds no plan"):
        trainer(tmp_path / "new", "3 steps").plan(since=tmp_path / "other")
    assert "changed" not in str(trainer(tmp_path / "run", "2 steps").plan())
    with caplog.at_level(logging.WARNING):
        run = changed.fit(resume="auto")
    (decision,) = [one for one in run.decisions if one.what == "plan changed"]
    assert decision.data["changes"] == CHANGES
    assert "the plan has changed since the run so far: - fit: 1 epoch; " in caplog.text


def test_another_order_of_listeners_is_a_difference(tmp_path: Path) -> None:
    logs, saves = LogTraining("2 steps"), Checkpoint("3 steps")
    tiny_trainer(callbacks=[logs, saves], directory=tmp_path / "run").fit()
    plan = tiny_trainer(callbacks=[saves, logs], directory=tmp_path / "run").plan()
    assert "- on_step_end: LogTraining (every 2 steps) > Checkpoint (every 3 steps)" in plan.changes
    assert "+ on_step_end: Checkpoint (every 3 steps) > LogTraining (every 2 steps)" in plan.changes


def test_more_epochs_are_a_decision_and_no_warning_and_an_unchanged_run_records_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path / "run", "2 steps").fit()
    same = trainer(tmp_path / "run", "2 steps").fit(resume="auto")
    assert "plan changed" not in {one.what for one in same.decisions}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path / "run", "2 steps", epochs=2).fit(resume="auto")
    assert run.why("plan changed").endswith("- fit: 1 epoch; - fit: 5 steps; + fit: 2 epochs; + fit: 10 steps")
    assert not caplog.records


def test_all_ranks_record_the_same_differences(tmp_path: Path) -> None:
    def continuing() -> list[list[str]]:
        for clip in ((), (ClipGradients(max_norm=1.0),)):
            made = sharded_trainer(sharded_loader(8), callbacks=[Checkpoint("1 step"), *clip], directory=tmp_path / "run")
            made.max_epochs = 2 if clip else 1
            run = made.fit(resume="auto")
        return [decision.data["changes"] for decision in run.decisions if decision.what == "plan changed"]

    first, second = launch(continuing)
    assert first == second
    assert any("ClipGradients" in line for line in first[0])


SCRIPT = """
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.testing import tiny_trainer
trainer = tiny_trainer(epochs=2, callbacks=[LogTraining("3 steps"), Checkpoint()], directory="run")
"""


def test_the_command_shows_the_differences_and_the_calendar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_changed.py").write_text(SCRIPT)
    trainer(tmp_path / "run", "2 steps").fit()
    assert main(["plan", "train_changed.py", "--since", "run"]) == 0
    assert "\n".join(CHANGES) in capsys.readouterr().out
    assert main(["plan", "train_changed.py", "--calendar", "1 epoch"]) == 0
    assert "on_step_end   LogTraining  every 3 steps  once: step 3" in capsys.readouterr().out
    assert main(["plan", "train_changed.py", "--calendar", "--json"]) == 0
    assert '"headline": "calendar of 2 epochs, 10 steps"' in capsys.readouterr().out


def asked(what: str, *callbacks: Any, at: int = 2, **arguments: Any) -> str:
    """Return the answer at a step of a run of 5 steps in an epoch."""
    answers: list[str] = []

    @on(Callback.on_step_end, at=at)
    def ask(run: Run) -> None:
        answers.append(str(run.why_not(what)))

    tiny_run(callbacks=[*callbacks, ask], **{"epochs": 2, **arguments})
    return answers[0]


def test_a_schedule_says_when_it_is_due_next_and_whether_it_is_beyond_the_end(tmp_path: Path) -> None:
    due = "is due every 4 steps, next at step 4 at the earliest, now at step 2"
    assert asked("saved", Checkpoint("4 steps"), directory=tmp_path / "a") == f"not 'saved' yet: Checkpoint, on_step_end, {due}"
    assert "next at step 3" in asked("LogTraining", LogTraining("3 steps"))
    assert "Evaluate, on_epoch_end, is due every epoch, now at epoch 1, step 2" in asked("evaluated", Evaluate(tiny_loader()))
    never = asked("saved", Checkpoint("99 steps"), directory=tmp_path / "b")
    assert "is due every 99 steps, which is never in this run: the run ends after 10 steps" in never
    assert "no callback of this run does it on its own" in asked("saved")
    assert "no limit is reached" in asked("stopped")


def test_what_happened_before_is_said_first(tmp_path: Path) -> None:
    answer = asked("saved", Checkpoint("2 steps", background=False), directory=tmp_path, at=3)
    assert answer.startswith("saved by Checkpoint at epoch 1, step 2")
    assert "Not again since" in answer
    assert "next at step 4" in answer


def test_a_monitor_says_how_much_patience_is_left_and_a_request_where_it_is_carried_out() -> None:
    callbacks = [Evaluate(tiny_loader(), every="1 step"), EarlyStopping("eval/loss", "max", patience=4)]
    assert "EarlyStopping: 2 of 4 evaluations without gain over 'eval/loss' =" in asked("stopped", *callbacks, at=4)
    other = Evaluate(tiny_loader(), every="1 step", name="test", when_better=("eval/loss", "max"))
    assert "'eval/loss' has not improved" in asked("Evaluate(test)", callbacks[0], other, at=3)
    stop = on(Callback.on_step_end, at=2)(lambda run: run.stop("enough"))
    assert "requested by <lambda> (enough): it is carried out at the end of the step" in asked("stopped", stop)


def test_a_disabled_callback_is_named_with_its_error() -> None:
    class Fragile(Callback):
        on_fault = "disable"
        decides = ("exported",)

        def on_step_start(self, run: Run) -> None:
            raise ConnectionError("down")

    for what in ("exported", "Fragile"):
        assert "it is disabled" in (answer := asked(what, Fragile()))
        assert what == "Fragile" or "Fragile failed in on_step_start" in answer


def test_a_logged_name() -> None:
    evaluate = Evaluate(tiny_loader(), every="4 steps")
    assert "no evaluation 'eval' is complete; Evaluate, on_step_end, is due every 4 steps" in asked("logged eval/acc", evaluate)
    evaluate = Evaluate(tiny_loader(), every="1 step")
    assert "reports only eval/loss" in asked("logged eval/los", evaluate)
    assert "Did you mean 'eval/loss'?" in asked("logged eval/los", evaluate, at=3)
    assert "no record has 'train/los'. Did you mean 'train/loss'?" in asked("logged train/los", LogTraining("1 step"))
    assert "train/loss is " in asked("logged train/loss", LogTraining("1 step"), at=3)


def test_a_moment_the_end_of_a_run_and_an_unknown_word() -> None:
    assert "no callback of this run has a hook on_eval_end" in asked("on_eval_end")
    run = tiny_run(callbacks=[TimeLimit("3 h")])
    answer = run.why_not("stopped")
    assert not answer.happened
    assert answer.reasons[0] == "the run is over (finished: the limit is reached)"
    run = tiny_run(callbacks=[LogTraining("1 step")])
    with pytest.raises(
        ValueError, match=r"got 'savd'\. Did you mean 'saved'\? Known in this run: stopped, .*LogTraining, logged NAME"
    ):
        run.why_not("savd")


@pytest.mark.parametrize(
    "build", [lambda: LogTraining("10%"), lambda: LogTraining("3 steps"), lambda: LogTraining("0.5 epoch")]
)
def test_asking_changes_nothing(build: Callable[[], Callback]) -> None:
    ask = on(Callback.on_step_end)(lambda run: str(run.why_not("LogTraining")))
    quiet, loud = (tiny_run(callbacks=[build(), *more], epochs=4).history["train/loss"] for more in ([], [ask]))
    assert quiet == loud


def test_one_rank_may_ask_alone() -> None:
    def work() -> list[str]:
        answers: list[str] = []

        @on(Callback.on_step_end, at=1)
        def ask(run: Run) -> None:
            if run.driver.rank == 1:
                answers.append(str(run.why_not("evaluated")))

        evaluate = Evaluate(sharded_loader(shuffle=False), every="2 steps")
        sharded_trainer(sharded_loader(), callbacks=[evaluate, ask], max_epochs=1).fit()
        return answers

    first, (answer,) = launch(work, 2)
    assert first == []
    assert "next at step 2" in answer


def test_a_script_with_many_runs_says_each_hint_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        model = tiny_model()
        tiny_run(model=model, optimizer=torch.optim.AdamW(model.parameters()), steps=1, epochs=None)
    assert caplog.text.count("AdamW could be fused") == 1

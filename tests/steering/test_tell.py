"""``cadenza tell`` and `Steering`: acts on a run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim.lr_scheduler import StepLR

from cadenza import Callback, Run, on, read_run
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining
from cadenza.commands.main import main
from cadenza.hooks.moments import BaseCallback
from cadenza.steering import Steering, tell
from cadenza.steering.acts import file_of, log_of, new_act
from cadenza.testing import tiny_loader, tiny_run
from tests.steering.parts import STEERED, command, kill, training, until_steps
from tests.waiting import until


def told(
    run: Path,
    verb: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    beside: Sequence[BaseCallback] = (),
    **options: Any,
) -> tuple[Run, dict[str, Any]]:
    """Train, send an act in step 3, and return the run and what became of the act."""
    answers: list[dict[str, Any]] = []

    def send() -> None:
        answers.append(tell(run, verb, arguments, author="ann", reason="a test", wait_s=60))

    sender = threading.Thread(target=send)

    def start(run: Run) -> None:
        if run.progress.step == 3:
            sender.start()
        elif run.progress.step > 3 and not answers and run.progress.step < 2000:
            time.sleep(0.005)  # until the act has arrived

    waiting = on(Callback.on_step_end)(start)

    @on(Callback.on_step_end, when=lambda run: bool(answers) and run.progress.step > (answers[0].get("step") or 0) + 2)
    def end(run: Run) -> None:
        run.stop("the act is done, and steps have followed")

    done = tiny_run(directory=run, epochs=500, callbacks=[*beside, Steering(**options), waiting, end])
    sender.join()
    return done, answers[0]


def test_an_act_sets_the_learning_rate_and_is_a_decision_with_its_author_and_reason(tmp_path: Path) -> None:
    run, answer = told(tmp_path / "run", "set", {"lr": 0.01})
    assert (answer["state"], answer["result"]) == ("done", "lr 0.1 -> 0.01 in 1 parameter group")
    assert run.optimizers[0].param_groups[0]["lr"] == 0.01
    decision = next(one for one in run.decisions if one.what == "steered")
    assert decision.why == "set lr=0.01 by ann (a test): lr 0.1 -> 0.01 in 1 parameter group"
    assert decision.when.step == answer["step"]
    assert decision.data["act"] == answer["act"]["id"]
    assert read_run(tmp_path / "run").why("steered")["decisions"][0]["data"]["author"] == "ann"
    assert not read_run(tmp_path / "run").status()["steering"]["enabled"]


def test_a_stop_ends_the_run_at_the_step_at_which_it_was_taken(tmp_path: Path) -> None:
    run, answer = told(tmp_path / "run", "stop")
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "a test")
    assert run.progress.step == answer["step"]


def test_a_save_and_an_evaluation_belong_to_the_step(tmp_path: Path) -> None:
    run, answer = told(tmp_path / "run", "save", beside=[Checkpoint("1000 epochs")])
    assert answer["state"] == "done"
    assert f"step-{answer['step']:08}" in read_run(tmp_path / "run").status()["checkpoints"]
    evaluating = [
        Evaluate(tiny_loader(), "1000 epochs"),
        Evaluate(tiny_loader(), "1000 epochs", name="test"),
    ]
    run, answer = told(tmp_path / "other", "evaluate", beside=evaluating)
    assert answer["result"] == "evaluated: Evaluate, Evaluate(test)"
    assert [step for step, _ in run.history["eval/loss"]] == [answer["step"]] == [step for step, _ in run.history["test/loss"]]


def test_a_schedule_goes_on_from_the_new_rate(tmp_path: Path) -> None:
    schedule = LearningRate(lambda optimizer: StepLR(optimizer, 1, gamma=0.999))
    run, answer = told(tmp_path / "run", "set", {"lr": 0.001}, beside=[schedule, LogTraining("1 step")])
    assert "the schedule of LearningRate goes on, multiplied by" in answer["result"]
    rates = dict(run.history["train/lr"])
    step = answer["step"]
    assert rates[step] == pytest.approx(0.1 * 0.999**step)  # a record has the rate of the next step
    assert rates[step + 1] == pytest.approx(0.001 * 0.999)


def test_a_rate_of_zero_under_a_schedule_is_refused_because_it_cannot_be_undone(tmp_path: Path) -> None:
    schedule = LearningRate(lambda optimizer: StepLR(optimizer, 1, gamma=0.999))
    _, answer = told(tmp_path / "run", "set", {"lr": 0}, beside=[schedule])
    assert answer["why"].endswith("0 cannot be undone. Use pause, or Freeze in callbacks.")


def test_an_error_in_an_act_is_its_refusal_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.steering.verbs._set", lambda *_: 1 / 0)
    run, answer = told(tmp_path / "run", "set", {"lr": 0.1})
    assert (answer["state"], answer["why"]) == ("refused", "ZeroDivisionError('division by zero')")
    assert run.why("not steered").endswith(answer["why"])


def test_more_batches_in_a_step(tmp_path: Path) -> None:
    run, answer = told(tmp_path / "run", "set", {"accumulate": 2})
    assert "a step has 2 batches instead of 1" in answer["result"]
    last, first = run.progress, answer["step"]
    assert last.batch > last.step > first
    assert run.why("accumulation changed").startswith("accumulation changed by the trainer")


class Probe(Callback):
    """A callback to attach."""

    def on_step_end(self, run: Run) -> None:
        run.state["probed"] = run.state.get("probed", 0) + 1


def test_a_callback_is_attached_where_it_is_allowed(tmp_path: Path) -> None:
    run, answer = told(tmp_path / "run", "attach", {"callback": f"{__name__}:Probe"}, attach=True)
    assert answer["result"] == "Probe is called from now on"
    assert run.state["probed"] > 0
    _, answer = told(tmp_path / "other", "attach", {"callback": f"{__name__}:Probe"})
    assert answer["why"] == "the run attaches no callbacks. Start it with Steering(attach=True)."
    _, answer = told(tmp_path / "third", "attach", {"callback": f"{__name__}:Nothing"}, attach=True)
    assert answer["why"].startswith(f"{__name__}:Nothing cannot be attached: AttributeError")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "momentums": ({"momentums": 0.9}, "no parameter group has a setting 'momentums'. There are: "),
    "rate": ({"lr": -1}, "lr must be a finite number, at least 0; got -1"),
    "nan": ({"lr": float("nan")}, "lr must be a finite number, at least 0; got nan"),
    "huge": ({"lr": 10**400}, "lr must be a finite number, at least 0; got 1000"),
    "text": ({"lr": "high"}, "lr must be a finite number, at least 0; got 'high'"),
    "switch": ({"nesterov": True}, "nesterov is not a number: only settings that are numbers can be set"),
    "group": ({"lr": 0.1, "group": "head"}, "there is no parameter group 'head'. There are: 0"),
    "nothing": ({}, "set needs a name and a value, such as lr=1e-4"),
    "batches": ({"accumulate": 0}, "accumulate must be a whole number, at least 1; got 0"),
    "both": ({"accumulate": 2, "lr": 0.1}, "set accumulate= alone"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be_set_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    arguments, why = REFUSED[case]
    run, answer = told(tmp_path / "run", "set", arguments)
    assert answer["state"] == "refused"
    assert answer["why"].startswith(why)
    decision = next(one for one in run.decisions if one.what == "not steered")
    assert decision.why.endswith(answer["why"])
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("verb", "why"), [
    ("save", "no callback writes checkpoints. Add Checkpoint(...) to callbacks."),
    ("evaluate", "no callback evaluates. Add Evaluate(...) to callbacks."),
    ("resume", "the run is not paused"),
])  # fmt: skip
def test_a_verb_without_what_it_needs_is_refused(verb: str, why: str, tmp_path: Path) -> None:
    _, answer = told(tmp_path / "run", verb)
    assert (answer["state"], answer["why"]) == ("refused", why)


def test_runs_that_take_no_acts_refuse_at_once(tmp_path: Path) -> None:
    answers = []

    def send(run: Run) -> None:
        answers.append(tell(tmp_path / "run", "stop", wait_s=0))

    tiny_run(directory=tmp_path / "run", callbacks=[on(Callback.on_step_end, at=2)(send)])
    assert answers[0]["why"].startswith("the run takes no acts. Start it with Steering() in callbacks")
    assert tell(tmp_path / "run", "stop")["why"] == "no process trains the run: finished: the limit is reached"
    assert tell(tmp_path / "run", "dance")["why"].startswith("'dance' is not a verb")
    assert main(["tell", str(tmp_path / "run"), "stop"]) == 1
    told(tmp_path / "steered", "note", {"text": "x"})
    assert tell(tmp_path / "steered", "stop")["why"].startswith("no process trains the run: stopped")


def test_a_run_that_starts_is_waited_for(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    sender = threading.Thread(target=lambda: answers.append(tell(tmp_path / "run", "note", {"text": "x"}, wait_s=60)))

    def start(run: Run) -> None:
        sender.start()
        time.sleep(0.3)

    early = on(Callback.on_fit_start)(start)
    wait = on(Callback.on_step_end)(lambda run: run.stop("done") if answers else time.sleep(0.005))
    tiny_run(directory=tmp_path / "run", epochs=2000, callbacks=[early, Steering(), wait])
    sender.join()
    assert answers[0]["state"] == "done"


def test_the_command_line_stops_pauses_and_resumes_another_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 3, process)

        def act(*words: str) -> dict[str, Any]:
            done = command("tell", str(run), *words, "--json", "--wait", "60")
            assert done.stdout, done.stderr
            answer: dict[str, Any] = json.loads(done.stdout)
            assert done.returncode == {"done": 0, "refused": 1}[answer["state"]]
            return answer

        paused = act("pause", "--reason", "lunch")
        assert read_run(run).status()["state"] == "paused"
        assert act("set", "lr=1e-3")["step"] == paused["step"]
        assert act("pause")["why"] == "the run is paused already"
        assert read_run(run).status()["step"] == paused["step"]
        assert act("resume")["step"] == paused["step"]
        assert read_run(run).status()["state"] == "running"
        before = time.monotonic()
        act("stop", "--reason", "enough")
        process.wait(60)
        assert time.monotonic() - before < 30
    assert read_run(run).status()["state"] == "stopped"
    assert read_run(run).status()["outcome"]["reason"] == "enough"


def test_an_act_that_waits_when_the_process_is_killed_is_carried_out_once_by_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 12, process)
        kill(process)
    key = (run / "steering" / "key").read_bytes()
    act = new_act(read_run(run).config()["id"], "note", {"text": "left"}, author="ann")
    (run / "steering" / "acts" / f"{act.id}.json").write_bytes(file_of(act, key))
    with training(STEERED, run, "100000") as process:
        until(lambda: any("result" in row for row in log_of(str(run))))
        (run / "steering" / "acts" / f"{act.id}.json").write_bytes(file_of(act, key))  # the same again
        until(lambda: not [*(run / "steering" / "acts").iterdir()])
        kill(process)
    assert sum(row.keys() >= {"verb"} for row in log_of(str(run))) == 1
    assert read_run(run).why("steered", last=9)["answer"][-1].endswith("note left by ann: left")


def test_two_writers_with_wrong_clocks_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 3, process)
        answers: list[dict[str, Any]] = []

        def send(first: int) -> None:
            for number in range(first, first + 20):
                answers.append(tell(run, "note", {"text": str(number)}, wait_s=120))  # noqa: PERF401

        real = time.time
        monkeypatch.setattr("cadenza.steering.acts.time.time", lambda: real() - 1e8 * (threading.get_ident() % 2))
        senders = [threading.Thread(target=send, args=(first,)) for first in (0, 100)]
        for one in senders:
            one.start()
        for one in senders:
            one.join()
        kill(process)
    assert {answer["state"] for answer in answers} == {"done"}
    taken = [row["arguments"]["text"] for row in log_of(str(run)) if "verb" in row]
    assert sorted(map(int, taken)) == [*range(20), *range(100, 120)]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_and_a_read_only_directory_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in [tmp_path, *tmp_path.parents][:-1]:
        folder.chmod(folder.stat().st_mode | 0o55)
    with training(STEERED, run, "100000") as process:
        until_steps(run, 3, process)
        tell(run, "note", {"text": "warm"}, wait_s=60)
        os.seteuid(65534)
        try:
            answer = tell(run, "stop")
        finally:
            os.seteuid(0)
        assert answer["state"] == "refused"
        assert answer["why"].startswith("the key of the run cannot be read (Permission denied)")
        kill(process)


def test_a_run_without_a_directory_trains_and_says_that_it_takes_no_acts(caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(callbacks=[Steering()])
    assert run.progress.step == 5
    assert "Steering takes no acts: the run has no directory" in caplog.text


def test_an_idle_run_has_no_listener_at_any_moment_of_a_step(tmp_path: Path) -> None:
    heard: list[int] = []

    def count(run: Run) -> None:
        by_moment = run._session.hooks.by_moment
        steps = ("on_step_start", "on_step_end", "on_batch_start", "on_batch_end")
        several = [listeners for moment, listeners in by_moment.items() if moment.__name__ in steps]
        heard.append(sum(one.owner == "Steering" for listeners in several for one in listeners))

    tiny_run(directory=tmp_path / "run", callbacks=[Steering(), on(Callback.on_step_end)(count)])
    assert heard == [0] * 5


def test_the_folder_of_acts_is_closed_to_others(tmp_path: Path) -> None:
    told(tmp_path / "run", "note", {"text": "x"})
    folder = tmp_path / "run" / "steering"
    assert [oct(path.stat().st_mode & 0o777) for path in (folder / "acts", folder / "key")] == ["0o700", "0o600"]
    assert not (folder / "listening.json").exists()
    shutil.rmtree(folder)


def test_weights_are_those_of_a_run_without_steering(tmp_path: Path) -> None:
    def weights(callbacks: list[BaseCallback], name: str) -> list[float]:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        run = tiny_run(model=model, directory=tmp_path / name, epochs=3, callbacks=callbacks)
        return [float(one.detach().sum()) for one in run.model.parameters()]

    assert weights([], "plain") == weights([Steering()], "steered")


def test_the_environment_adds_steering_to_a_run_with_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_STEERING", "1")
    run, answer = told(tmp_path / "run", "note", {"text": "x"})
    assert answer["state"] == "done"
    assert [*run._session.hooks.callbacks].count("Steering") == 1  # it was in the list
    names = list(tiny_run(directory=tmp_path / "other")._session.hooks.callbacks)
    assert names == ["EpochMeans", "Steering"] or names == ["Steering"]
    assert "Steering" not in tiny_run()._session.hooks.callbacks
    for off in ("0", "", "false", "off"):
        monkeypatch.setenv("CADENZA_STEERING", off)
        assert "Steering" not in tiny_run(directory=tmp_path / f"off-{off}")._session.hooks.callbacks

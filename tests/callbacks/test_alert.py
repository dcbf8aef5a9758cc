"""`Alert`: rules on records, targets, and one alert for each event."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as threads
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Alert, AlertMessage, Checkpoint, alert_targets
from cadenza.hooks.subscription import Subscription
from cadenza.records import read_decisions
from cadenza.records.record import Record
from cadenza.report.story import story_at
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.callbacks.parts import failing
from tests.distributed.parts import trainer as trainer_on_ranks
from tests.waiting import until

NAN, INF = float("nan"), float("inf")


def logging_values(values: Sequence[float | None], name: str = "x") -> Subscription:
    """Log one of the values in each step; None: nothing."""

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        value = values[run.progress.step - 1]
        if value is not None:
            run.log(name, value)

    return log


def fired(rule: Any, values: Sequence[float | None]) -> list[tuple[int, str]]:
    """Return the steps and texts of the alerts of a run that logs the values as ``x``."""
    sent: list[AlertMessage] = []
    tiny_run(callbacks=[logging_values(values), Alert(rule, to=sent.append)], steps=len(values))
    return [(message.step, message.text) for message in sent]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("x > 2", [1, 3, 4, 2, 5], [(2, "x is 3, > 2"), (5, "x is 5, > 2")]),
        ("x >= 2", [1, 2, 1], [(2, "x is 2, >= 2")]),
        ("x < -1e-3", [0, -1, NAN], [(2, "x is -1, < -0.001")]),
        ("x <= 1 for 3 records", [1, 1, 2, 1, None, 1, 1, 1], [(7, "x is 1, <= 1 in 3 records")]),
        ("x rises 3 times", [1, 2, 3, 4, 5, 4, 5, 6, 7], [(4, "x rose 3 times, to 4"), (9, "x rose 3 times, to 7")]),
        ("x rises 2 times", [1, 2, NAN, 3, 3, 4], [(4, "x rose 2 times, to 3")]),
        ("x falls", [1, 2, 1, 0, 1], [(3, "x fell, to 1")]),
        ("non-finite", [1, NAN, INF, 1, -INF], [(2, "x is nan"), (5, "x is -inf")]),
        ("x non-finite", [1, INF], [(2, "x is inf")]),
        ("no record for 10 h", [1, 2], []),
    ],
)
def test_an_alert_is_sent_when_its_rule_begins_to_hold(
    rule: str, values: Sequence[float | None], expected: list[tuple[int, str]]
) -> None:
    assert fired(rule, values) == expected


def test_a_function_of_the_record_or_of_the_history_is_a_rule_and_steps_without_a_record_do_not_call_it() -> None:
    calls: list[int] = []

    def large(record: Record) -> str | None:
        calls.append(record.step)
        return f"{record.values['x']} is large" if record.values["x"] > 2 else None

    def doubled(record: Record, history: Mapping[str, Any]) -> str | None:
        first = history["x"][0][1]
        return f"twice {first:g}" if record.values["x"] >= 2 * first else None

    assert fired(large, [1, 3, None, 4, 2, None, 5]) == [(2, "3 is large"), (7, "5 is large")]
    assert calls == [1, 2, 4, 5, 7]
    assert fired(doubled, [1, 3, 4]) == [(2, "twice 1")]


def test_a_name_that_no_record_has_is_a_warning_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    tiny_run(callbacks=[logging_values([1, 2, 3], "train/loss"), Alert("train/los > 1")], steps=3)
    assert [record.getMessage().split(".")[0] for record in caplog.records] == [
        "Alert watches 'train/los', and the record of step 1 does not have it",
        "Alert watches 'train/los', and no record had it",
    ]
    assert "Did you mean 'train/loss'?" in caplog.text


def test_an_alert_is_on_the_console_in_the_decisions_in_a_file_and_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alert = Alert("x > 2", level="error", name="too large")
    run = tiny_run(callbacks=[logging_values([1, 3]), alert], steps=2, directory=tmp_path)
    shown = "too large (error) at step 2: x is 3, > 2"
    assert shown in caplog.text
    assert shown in (tmp_path / "console.log").read_text()
    [decision] = read_decisions(tmp_path / "decisions.jsonl")
    assert (decision.what, decision.who, decision.data["level"]) == ("alerted", "too large", "error")
    [row] = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert (row["text"], row["step"], row["run_id"]) == ("x is 3, > 2", 2, run.info.id)
    assert [fault.why for fault in story_at(tmp_path).faults] == ["x is 3, > 2"]


def test_a_continued_run_sends_each_alert_once(tmp_path: Path) -> None:
    sent: list[int] = []
    values = [1, 3, 1, 1, 3, 3, 3, 1, 3]

    def fit(fail_at: int = 99) -> Run:
        alert = Alert("x > 2", to=lambda message: sent.append(message.step))
        callbacks = [logging_values(values), alert, Checkpoint(every="3 steps"), failing(Callback.on_step_end, fail_at)]
        return tiny_trainer(callbacks=callbacks, steps=len(values), directory=tmp_path).fit(resume="auto")

    for step in (6, 8):
        with pytest.raises(ZeroDivisionError):
            fit(step)
    run = fit()
    assert sent == [2, 5, 9]
    assert [decision.when.step for decision in run.decisions if decision.what == "alerted"] == [9]
    assert [one.when.step for one in read_decisions(tmp_path / "decisions.jsonl") if one.what == "alerted"] == [2, 5, 9]


@pytest.mark.parametrize("what", ["record", "x"])
def test_silence_is_noticed_while_the_training_hangs_and_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    came = list[AlertMessage]()

    @on(Callback.on_step_end)
    def hang(run: Run) -> None:
        if what == "x":
            run.log("y", 1.0)  # a record without the name does not end the silence
        if run.progress.step in (4, 7):
            before = len(came)
            until(lambda: len(came) > before)
        run.log("x", 1.0)

    run = tiny_run(callbacks=[hang, Alert(f"no {what} for 0.2 s", to=["console", came.append])], steps=8)
    texts = [message.text for message in came]
    assert f"no {what} for 0.2 s, the last one was of step 3" in texts
    assert f"no {what} for 0.2 s, the last one was of step 6" in texts
    assert len(set(texts)) == len(texts)
    assert [decision.why for decision in run.decisions if decision.what == "alerted"] == texts
    assert f"Alert (warning) at step 3: no {what} for 0.2 s" in caplog.text
    assert not [thread for thread in threads() if thread.name == "cadenza-alert"]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """A server on this machine: its address, the bodies that came, and the states that it answers first."""
    bodies: list[dict[str, Any]] = []
    states: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(states.pop(0) if states else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", bodies, states
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_message_as_json(webhook: tuple[str, list[dict[str, Any]], list[int]], tmp_path: Path) -> None:
    url, bodies, _ = webhook
    run = tiny_run(callbacks=[logging_values([1, 3]), Alert("x > 2", to=url)], steps=2, directory=tmp_path / "first")
    [body] = bodies
    assert {"text": "x is 3, > 2", "level": "warning", "step": 2, "rule": "x > 2", "alert": "Alert"}.items() <= body.items()
    assert (body["run_id"], body["run_name"]) == (run.info.id, "first")
    assert "secret" not in (tmp_path / "first" / "run.json").read_text() + repr(run.decisions)


def test_a_target_that_fails_is_tried_again_then_reported_and_never_stops_the_run(
    webhook: tuple[str, list[dict[str, Any]], list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    url, bodies, states = webhook
    states += [500, 503]
    run = tiny_run(callbacks=[logging_values([3]), Alert("x > 2", to=url)], steps=1)
    assert len(bodies) == 3
    assert [decision.what for decision in run.decisions] == ["alerted"]

    def broken(message: AlertMessage) -> None:
        raise KeyError("mine")

    run = tiny_run(callbacks=[logging_values([3]), Alert("x > 2", to=[broken, ["false"]])], steps=1)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    reasons = [decision.why for decision in run.decisions if decision.what == "not sent"]
    assert reasons[0].endswith("KeyError: 'mine'")
    assert (
        reasons[1]
        == "an alert of step 1 did not reach the command 'false': RuntimeError: it ended with exit code 1: no message"
    )
    assert reasons[0] in caplog.text
    assert "secret" not in repr(Alert("x > 2", to=url))


def test_a_command_gets_the_text_as_input_and_the_rest_in_its_environment(tmp_path: Path) -> None:
    script = "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + os.environ['CADENZA_ALERT_STEP'])"
    command = [sys.executable, "-c", script, str(tmp_path / "a b; rm -rf $HOME")]
    tiny_run(callbacks=[logging_values([1, 3]), Alert("x > 2", to=[command])], steps=2)
    assert (tmp_path / "a b; rm -rf $HOME").read_text() == "x is 3, > 2\n2"


def test_the_steps_do_not_wait_for_a_slow_target() -> None:
    go, steps = Event(), list[int]()

    @on(Callback.on_step_end)
    def count(run: Run) -> None:
        steps.append(run.progress.step)
        if run.progress.step == 50:
            go.set()

    def slow(message: AlertMessage) -> None:
        assert go.wait(200)

    run = tiny_run(callbacks=[logging_values([3.0] * 50), Alert("x > 2", to=slow), count], steps=50)
    assert len(steps) == 50
    assert run.faults == []


def test_an_error_in_a_rule_disables_it_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(record: Record) -> str | None:
        return str(record.values["y"])

    with caplog.at_level(logging.WARNING):
        run = tiny_run(callbacks=[logging_values([1, 2]), Alert(broken)], steps=2)
    assert [(fault.callback, fault.moment) for fault in run.faults] == [("Alert", "on_log")]


def test_several_ranks_send_one_alert_about_the_mean(tmp_path: Path) -> None:
    def training() -> list[str]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log("x", float(run.progress.step * run.driver.rank))

        def keep(message: AlertMessage) -> None:
            with (tmp_path / "sent").open("a") as file:
                file.write(f"{message.step} {message.text}\n")

        return [one.what for one in trainer_on_ranks(max_steps=4, callbacks=[log, Alert("x > 2", to=keep)]).fit().decisions]

    first, *others = launch(training, ranks=3)
    assert (tmp_path / "sent").read_text() == "3 x is 3, > 2\n"
    assert first.count("alerted") == 1
    assert all("alerted" not in other for other in others)

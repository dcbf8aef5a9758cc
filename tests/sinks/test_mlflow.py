"""Mlflow: what is written to a local database is queried back with MLflow's own client."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from cadenza import Callback, Histogram, Image, Run, Text, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.hooks.subscription import Subscription
from cadenza.records.record import Loggable
from cadenza.sinks import Mlflow
from cadenza.testing import check_callback, tiny_run, tiny_trainer


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests: to make one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


class Stored:
    """The runs of an experiment, as MLflow has them."""

    def __init__(self, uri: str, experiment: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        known = self.client.get_experiment_by_name(experiment)
        assert known is not None
        self.runs = self.client.search_runs([known.experiment_id])

    @property
    def run(self) -> Any:
        [run] = self.runs
        return run

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in self.client.get_metric_history(self.run.info.run_id, name)]

    def artifact(self, path: str) -> list[Path]:
        folder = Path(self.run.info.artifact_uri, path)
        return sorted(folder.rglob("*"))


def logging(values: Mapping[str, Loggable]) -> Subscription:
    return on(Callback.on_step_end)(lambda run: run.log(dict(values)))


@on(Callback.on_step_end)
def log_number(run: Run) -> None:
    run.log({"number": run.progress.step / 2, "constant": 1})


def test_every_number_stands_at_its_step_and_time(uri: str, tmp_path: Path) -> None:
    tiny_run(callbacks=[log_number, Mlflow(uri, experiment="numbers")], steps=700, directory=tmp_path)
    stored = Stored(uri, "numbers")
    assert stored.points("number") == [(step, step / 2) for step in range(1, 701)]
    assert len(stored.points("constant")) == 700  # 1400 values: more than one request
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    history = stored.client.get_metric_history(stored.run.info.run_id, "number")
    assert [metric.timestamp for metric in history] == [round(line["time"] * 1000) for line in lines]


def test_without_arguments_it_writes_to_a_database_in_the_directory_of_the_run(tmp_path: Path) -> None:
    tiny_run(callbacks=[log_number, logging({"note": Text("hello")}), Mlflow()], steps=1, directory=tmp_path / "first")
    stored = Stored(f"sqlite:///{tmp_path}/first/mlflow.db", "cadenza")
    assert stored.points("number") == [(1, 0.5)]
    assert (stored.run.info.run_name, stored.run.info.status) == ("first", "FINISHED")
    assert stored.run.info.artifact_uri.startswith(str(tmp_path / "first" / "mlartifacts"))


def test_what_is_not_finite_comes_as_far_as_a_database_can_hold_it(uri: str) -> None:
    tiny_run(callbacks=[logging({"nan": math.nan, "inf": math.inf}), Mlflow(uri, experiment="finite")], steps=1)
    stored = Stored(uri, "finite")
    [(step, value)] = stored.points("nan")
    assert (step, math.isnan(value)) == (1, True)
    assert stored.points("inf") == [(1, sys.float_info.max)]


def test_the_arguments_of_the_run_are_its_params(uri: str) -> None:
    sink = Mlflow(uri, experiment="params", run_name="mine", tags={"who": "me"}, config={"seed": "none", "deep": {"a": [1, 2]}})
    tiny_run(callbacks=[sink], steps=1)
    run = Stored(uri, "params").run
    params = run.data.params
    assert (params["optimizer.0.name"], params["optimizer.0.lr"], params["model"]) == ("SGD", "0.1", "Linear, 2 parameters")
    assert (params["seed"], params["deep.a"], params["callbacks"]) == ("none", "1, 2", "Mlflow")
    assert (run.info.run_name, run.data.tags["who"]) == ("mine", "me")


def test_more_and_longer_params_than_a_request_may_hold(uri: str) -> None:
    config = {f"p{number}": "x" * 7000 for number in range(150)}
    tiny_run(callbacks=[Mlflow(uri, experiment="long", config=config)], steps=1)
    params = Stored(uri, "long").run.data.params
    assert params["p149"] == "x" * 6000
    assert len(params) > 150


def test_pictures_and_texts_are_artifacts_and_the_rest_is_left_out_with_one_remark(uri: str, tmp_path: Path) -> None:
    pixels = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)
    media = {"val/pic": Image(pixels), "note": Text("**bold**"), "w": Histogram(torch.ones(3))}
    run = tiny_run(callbacks=[logging(media), Mlflow(uri, experiment="media")], steps=2, directory=tmp_path)
    assert run.faults == []
    stored = Stored(uri, "media")
    pictures = [path for path in stored.artifact("images") if path.suffix == ".png"]
    assert len(pictures) == 2
    seen = torch.frombuffer(bytearray(PIL.Image.open(pictures[0]).tobytes()), dtype=torch.uint8)
    assert torch.equal(seen.reshape(4, 5, 3), pixels.permute(1, 2, 0))
    texts = [path.read_text() for path in stored.artifact("text/note") if path.is_file()]
    assert texts == ["**bold**"] * 2
    assert (tmp_path / "console.log").read_text() == (
        "Mlflow: 'w' of step 1 is not an Image, Figure or Text, and is left out\n"
    )


def test_names_that_mlflow_does_not_allow_are_changed_with_one_remark(uri: str, tmp_path: Path) -> None:
    names = {"acc@1": 1.0, "/a//b": 2.0, "x" * 300: 3.0, "naïve: 1-2.": 4.0}
    tiny_run(callbacks=[logging(names), Mlflow(uri, experiment="names")], steps=2, directory=tmp_path)
    stored = Stored(uri, "names")
    changed = {"acc_1": 1.0, "a/b": 2.0, "x" * 250: 3.0, "naïve: 1-2.": 4.0}
    assert {name: stored.points(name) for name in changed} == {name: [(1, v), (2, v)] for name, v in changed.items()}
    remarks = (tmp_path / "console.log").read_text().splitlines()
    assert len(remarks) == 3
    assert remarks[0].startswith("Mlflow: 'acc@1' is logged as 'acc_1'")


def test_a_run_that_is_continued_goes_on_in_the_same_run_and_nothing_is_there_twice(uri: str, tmp_path: Path) -> None:
    def fit(steps: int, killed_at: int = 100) -> None:
        @on(Callback.on_step_end, at=killed_at)
        def kill(run: Run) -> None:
            raise KeyboardInterrupt

        sink = Mlflow(uri, experiment="resume")
        callbacks = [log_number, sink, Checkpoint(every="3 steps", on_exception=False), kill]
        tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")

    with pytest.raises(KeyboardInterrupt):
        fit(6, killed_at=5)
    assert Stored(uri, "resume").run.info.status == "FAILED"
    fit(8)
    stored = Stored(uri, "resume")
    assert stored.run.info.status == "FINISHED"
    assert stored.points("number") == [(step, step / 2) for step in range(1, 9)]
    assert stored.run.data.params["max_steps"] == "6"
    remarks = (tmp_path / "console.log").read_text()
    assert "Mlflow: max_steps is 8 now, and MLflow keeps the first value, 6" in remarks


def test_a_signal_ends_it_as_killed(uri: str, tmp_path: Path) -> None:
    term = on(Callback.on_step_end, at=2)(lambda run: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        tiny_run(callbacks=[log_number, Checkpoint(), term, Mlflow(uri, experiment="killed")], directory=tmp_path)
    stored = Stored(uri, "killed")
    assert stored.run.info.status == "KILLED"
    assert stored.points("number") == [(1, 0.5), (2, 1.0)]


def test_the_usual_settings_are_honoured(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by setting")
    tiny_run(callbacks=[log_number, Mlflow()], steps=1)
    assert Stored(uri, "by setting").points("number") == [(1, 0.5)]


@pytest.mark.parametrize(
    ("wrong", "why"), [("http://127.0.0.1:9", "Connection refused"), ("nonsense://x", "nonsense"), ("/proc/no/such", "")]
)
def test_a_server_that_cannot_be_reached_is_reported_once_and_the_run_continues(wrong: str, why: str, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[log_number, Mlflow(wrong)], steps=3, directory=tmp_path)
    [fault] = run.faults
    assert fault.callback == "Mlflow"
    assert why in str(fault.error)
    assert (run.outcome and run.outcome.kind) == "finished"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_without_a_uri_and_a_directory_the_run_does_not_start() -> None:
    with pytest.raises(DirectoryError, match=r"Mlflow has neither a URI nor a directory .* Give Trainer\(directory=...\)"):
        tiny_run(callbacks=[Mlflow()])


def test_a_database_that_cannot_be_made_is_an_error_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"Mlflow cannot write to .*Give a directory where files can be made"):
        tiny_run(callbacks=[Mlflow(f"sqlite:///{tmp_path / 'file' / 'x.db'}")])


def test_a_missing_package_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"Mlflow needs .*pip install 'cadenza\[mlflow\]'"):
        Mlflow()


NETWORK = """
import socket, sys
asked = []
def refuse(*arguments):
    asked.append(arguments)
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from cadenza.callbacks import LogTraining
from cadenza.sinks import Mlflow
from cadenza.testing import tiny_run
run = tiny_run(callbacks=[LogTraining(every="1 step"), Mlflow(sys.argv[1])], steps=3)
assert run.faults == [], run.faults
print(asked)
"""


def test_nothing_goes_to_the_network_and_no_warning_is_given(uri: str) -> None:
    # No setting that tells mlflow that it is being tested: it would keep still by itself.
    known = ("CI", "PYTEST_CURRENT_TEST", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    script = [sys.executable, "-W", "error", "-c", NETWORK, uri]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=500, env=environment)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr


def test_it_keeps_the_contract_of_callbacks(uri: str) -> None:
    check_callback(lambda: Mlflow(uri, experiment="contract"))

"""Trackers one by one: their settings, other runs beside the own one, and what they do to the process and the network."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # it has no types, and comes with dvclive

from cadenza import Callback, Image, Run, Text, on
from cadenza.callbacks import Checkpoint
from cadenza.commands.main import main
from cadenza.errors import DirectoryError
from cadenza.sinks import Dvclive, Mlflow, Swanlab, Trackio, Wandb
from cadenza.status.decisions import Outcome
from cadenza.status.run_info import RunInfo
from cadenza.testing import tiny_run, tiny_trainer
from tests.sinks.readers import COMET, DVCLIVE, MLFLOW, QUIET, SWANLAB, TRACKIO, WANDB, services
from tests.sinks.samples import failing, logging, metrics_of
from tests.sinks.terminal import Terminal
from tests.sinks.wandb_file import WandbFile
from tests.waiting import until

# -- a run with a tracker in a process of its own, with an empty home ----------------------------------


ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse, builtins, json, multiprocessing, os, signal, socket, sys, threading
import psutil, torch

for name in [name for name in os.environ if name.startswith(HIDDEN)]:
    del os.environ[name]
os.environ.update(VARIABLES)
os.chdir(WORK)
sys.path.insert(0, ROOT)

from cadenza import Callback, on
from cadenza.callbacks import LogTraining
from cadenza.sinks import *
from cadenza.testing import tiny_run
from tests.sinks.samples import MEDIA, logging

asked, connect = [], socket.socket.connect
def refuse(*arguments, **named):
    if getattr(arguments[0], "family", None) == getattr(socket, "AF_UNIX", ""):  # to a process of its own
        return connect(*arguments, **named)
    asked.append(repr(arguments))
    raise OSError("no network")

def state():
    parser = argparse.ArgumentParser
    return {
        "exception hook": sys.excepthook, "exit": sys.exit, "stdout": sys.stdout, "stderr": sys.stderr,
        "import": builtins.__import__, "parse_args": parser.parse_args, "parse_known_args": parser.parse_known_args,
        "Process.run": multiprocessing.Process.run, "fork": os.fork, "save": torch.save, "backward": torch.Tensor.backward,
        "SIGINT": signal.getsignal(signal.SIGINT), "SIGTERM": signal.getsignal(signal.SIGTERM),
        "working directory": os.getcwd(),
        "environment": sorted(os.environ.items()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }

@on(Callback.on_step_end, at=2)
def act(run):
    ACT

if OFFLINE:
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
    MORE = [logging(MEDIA)]
else:
    MORE = []
tiny_run(progress=False)
before = state()
run = tiny_run(callbacks=[LogTraining("1 step"), *MORE, act, SINK], steps=STEPS, directory=DIRECTORY)
for thread in threading.enumerate():
    if thread.name == "cadenza-writer":  # a run tells it to end, and does not wait
        thread.join(100)
after = state()
changed = {name: f"{before[name]} is now {after[name]}"[-2000:] for name in before if before[name] != after[name]}
print("\\n" + json.dumps([run.outcome.kind, [repr(fault.error) for fault in run.faults], asked, changed]), flush=True)
END
"""
HIDDEN = ("COMET", "DVC", "WANDB", "SWANLAB", "MLFLOW", "TRACKIO", "PYTEST", "CI", "DO_NOT_TRACK")


@dataclass(frozen=True)
class Ended:
    """How a run ended in its process, and all that the process wrote."""

    outcome: str
    faults: list[str]
    asked: list[str]
    changed: dict[str, str]
    written: str


def in_own_process(
    sink: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    offline: bool = True,
    act: str = "pass",
    steps: int = 3,
    end: str = "",
) -> Ended:
    """Run in a terminal, with warnings as errors; `folder` gets ``home``, ``work`` and ``run``.

    Args:
        sink: The code that makes the sink.
        folder: An empty folder.
        variables: Environment variables.
        offline: Whether connections are refused and noted; then media are logged, too.
        act: Code at the end of step 2.
        steps: The length of the run.
        end: Code after the run.
    """
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    given = {"HOME": folder / "home", "NETRC": folder / "netrc", "MPLCONFIGDIR": folder / "mpl", **(variables or {})}
    values = {"HIDDEN": HIDDEN, "VARIABLES": {name: str(value) for name, value in given.items()}}
    values |= {"WORK": str(folder / "work"), "ROOT": str(ROOT), "DIRECTORY": str(folder / "run")}
    names = "\n".join(f"{name} = {value!r}" for name, value in {**values, "OFFLINE": offline, "STEPS": steps}.items())
    script = SCRIPT.replace("SINK", sink).replace("    ACT", f"    {act}").replace("END", end)
    with Terminal(f"{names}\n{script}", width=1000) as terminal:
        pass
    assert terminal.exit_code == 0, terminal.written
    [line] = [line for line in terminal.written.splitlines() if line.startswith('["')]
    outcome, faults, asked, changed = json.loads(line)
    return Ended(outcome, faults, asked, changed, terminal.written)


# -- what they are given, and what they leave ----------------------------------------------------------


CONFIG = {"seed": "mine", "data": {"size": 3}}


@pytest.fixture(scope="module", autouse=True)
def on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with services(tmp_path_factory.mktemp("mlflow")):
        yield


def continued(directory: Path, *sinks: Any) -> list[Run]:
    """Return a run of two steps, and the same one continued to five."""
    callbacks = [logging({"a": 1}), Checkpoint(every="2 steps"), *sinks]
    trainers = [tiny_trainer(callbacks=callbacks, steps=steps, directory=directory) for steps in (2, 5)]
    return [trainer.fit(resume="auto") for trainer in trainers]


def test_a_continued_run_goes_on_under_its_id(tmp_path: Path) -> None:
    first, _ = continued(tmp_path, SWANLAB.make(), TRACKIO.make())
    files = sorted(SWANLAB.files(tmp_path), key=lambda file: file.all("scalar")[0].step)
    assert [file.all("start")[0].id for file in files] == [first.info.id, first.info.id]
    assert [[one.step for one in file.all("scalar")] for file in files] == [[1, 2], [3, 4, 5]]
    [(count,)] = TRACKIO.select("SELECT COUNT(DISTINCT run_id) FROM metrics WHERE run_name = ?", TRACKIO.name(first.info))
    assert count == 1
    assert TRACKIO.values(first.info)["a"] == [(step, 1) for step in range(1, 6)]


# -- wandb ---------------------------------------------------------------------------------------------


def test_wandb_has_the_arguments_of_the_run_and_its_names(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[WANDB.make(config=CONFIG, tags=["a", "b"], group="g")], directory=tmp_path / "small")
    written = WANDB.file(tmp_path / "small")
    own = {name: value for name, value in written.config.items() if name != "_wandb"}
    assert own == {**run.info.arguments, **CONFIG}
    assert (written.run.display_name, written.run.project, written.run.run_id) == ("small", "tests", run.info.id)
    assert (list(written.run.tags), written.run.run_group) == (["a", "b"], "g")
    tiny_run(callbacks=[WANDB.make(run_name="best try", directory="elsewhere")], directory=tmp_path)
    assert WANDB.file(tmp_path / "elsewhere").run.display_name == "best try"
    quiet = tiny_run(callbacks=[logging({"a": 1}), Wandb(mode="disabled", settings=QUIET)], directory=tmp_path / "none")
    assert (quiet.faults, WANDB.files(tmp_path / "none")) == ([], [])


def test_wandb_marks_a_run_that_a_signal_ended_as_preempted(tmp_path: Path) -> None:
    sink = WANDB.make()
    sink.open(RunInfo("an-id", tmp_path))
    sink.close(Outcome("preempted", "signal SIGTERM"))
    assert any(record.HasField("preempting") for record in WANDB.file(tmp_path).records)
    assert WANDB.file(tmp_path).exit_code == 1


def test_wandb_does_not_touch_a_run_of_your_own(tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="own", mode="offline", dir=str(tmp_path), settings=dict(QUIET)) as own:
        tiny_run(callbacks=[logging({"theirs": 1}), WANDB.make()], directory=tmp_path / "run")
        assert wandb.run is own
        own.log({"mine": 1})
    assert [set(row) & {"mine", "theirs"} for row in WANDB.file(tmp_path).rows] == [{"mine"}]


def test_wandb_log_of_a_callback_adds_to_the_run_of_the_sink_and_no_record_is_lost(tmp_path: Path) -> None:
    @on(Callback.on_step_end)
    def log_twice(run: Run) -> None:  # steps of wandb are ahead of those of the run
        import wandb

        wandb.log({"mine": run.progress.step})
        wandb.log({"more": run.progress.step})

    run = tiny_run(callbacks=[logging({"theirs": 1}), WANDB.make(), log_twice], steps=5, directory=tmp_path)
    rows = WANDB.file(tmp_path).rows
    assert run.faults == []
    assert [row["mine"] for row in rows if "mine" in row] == [1, 2, 3, 4, 5]
    assert sorted(row.get("step", row["_step"]) for row in rows if "theirs" in row) == [1, 2, 3, 4, 5]


def test_two_of_wandb_in_one_list_are_two_runs_that_go_on_under_their_ids(tmp_path: Path) -> None:
    two = [Wandb(project, mode="offline", settings=QUIET, directory=project) for project in ("one", "two")]
    first, second = continued(tmp_path, *two)
    assert first.faults == second.faults == []
    for name, run_id in (("one", first.info.id), ("two", f"{first.info.id}-2")):
        before, after = WANDB.files(tmp_path / name)
        assert before.run.run_id == after.run.run_id == run_id
        assert [[row["_step"] for row in file.rows] for file in (before, after)] == [[1, 2], [3, 4, 5]]
        assert after.run.resume


def test_without_pillow_wandb_leaves_images_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    tiny_run(callbacks=[logging({"a": 1, "i": Image(torch.zeros(1, 2, 2))}), WANDB.make()], steps=1, directory=tmp_path)
    assert "i/path" not in WANDB.file(tmp_path).rows[0]
    assert "'i' of step 1 needs the package 'pillow' (pip install" in (tmp_path / "console.log").read_text()


# -- swanlab -------------------------------------------------------------------------------------------


def test_swanlab_has_the_arguments_of_the_run_and_its_names(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[SWANLAB.make(config=CONFIG, tags=["a", "b"], group="g")], directory=tmp_path / "small")
    written = SWANLAB.file(tmp_path / "small")
    given = {name: value for name, value in run.info.arguments.items() if value is not None}
    assert written.config == {**given, **CONFIG}
    [start] = written.all("start")
    assert (start.name, start.project, start.id) == ("small", "tests", run.info.id)
    assert (list(start.tags), start.group) == (["a", "b"], "g")


def test_the_mode_of_the_environment_counts_and_a_keyboard_interrupt_is_pythons_own_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    seen, hook = list[Any](), sys.excepthook
    look = on(Callback.on_step_end)(lambda run: seen.append(signal.getsignal(signal.SIGINT)))
    run = tiny_run(callbacks=[logging({"a": 1}), Swanlab(directory="own"), look], steps=1, directory=tmp_path)
    [file] = (tmp_path / "own").glob("run-*/run-*.swanlab")
    assert (run.faults, file.stat().st_size > 0) == ([], True)
    assert seen == [signal.getsignal(signal.SIGINT)]
    assert sys.excepthook is hook


# -- comet ---------------------------------------------------------------------------------------------


def test_comet_has_the_arguments_of_the_run_and_its_names(tmp_path: Path) -> None:
    sink = COMET.make(config={"seed": "mine"}, tags=["a", "b"], workspace="team")
    run = tiny_run(callbacks=[sink], steps=1, directory=tmp_path / "small")
    [archive] = COMET.archives(tmp_path / "small")
    assert archive.parameters["seed"] == "mine"
    assert archive.parameters["model"] == run.info.arguments["model"]
    assert (archive.experiment["project_name"], archive.experiment["workspace"]) == ("tests", "team")
    assert sorted(archive.experiment["tags"]) == ["a", "b"]
    assert archive.others["Name"] == "small"


def test_a_callback_adds_to_the_running_experiment_of_comet(tmp_path: Path) -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        import comet_ml

        experiment: Any = comet_ml.get_running_experiment()
        experiment.log_metric("mine", 1, step=run.progress.step)

    run = tiny_run(callbacks=[logging({"a": 1}), COMET.make(), log], steps=3, directory=tmp_path)
    values = COMET.values(run.info)
    assert (values["a"], values["mine"]) == ([(step, 1) for step in (1, 2, 3)],) * 2


# -- trackio -------------------------------------------------------------------------------------------


def test_trackio_has_the_arguments_of_the_run_and_two_runs_of_one_name_are_two(tmp_path: Path) -> None:
    for name in ("one", "two"):
        sink = Trackio("tests", run_name="same", config=CONFIG)
        run = tiny_run(callbacks=[logging({"a": 1}), sink], steps=1, directory=tmp_path / name)
    found = TRACKIO.select("SELECT config FROM configs WHERE run_name = 'same' ORDER BY id DESC")
    own = {name: value for name, value in yaml.safe_load(found[0][0]).items() if not name.startswith("_")}
    assert own == {**run.info.arguments, **CONFIG}
    assert len(TRACKIO.select("SELECT DISTINCT run_id FROM metrics WHERE run_name = 'same'")) == 2


def test_trackio_does_not_touch_a_run_of_your_own(tmp_path: Path) -> None:
    import trackio

    own: Any = trackio.init("tests", name="own", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    try:
        tiny_run(callbacks=[logging({"theirs": 1}), Trackio("tests", run_name="theirs")], steps=1, directory=tmp_path)
        trackio.log({"mine": 1})
    finally:
        own.finish()
        trackio.context_vars.current_run.set(None)
    assert TRACKIO.rows("own") == [(0, {"mine": 1})]
    assert TRACKIO.rows("theirs") == [(1, {"theirs": 1})]


def test_rows_that_trackio_loses_are_reported(tmp_path: Path) -> None:
    database = TRACKIO.database.with_name("lossy.db")

    def rows() -> int:
        try:  # the file comes before its tables
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                return int(connection.execute("SELECT COUNT(*) FROM metrics").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    @on(Callback.on_fit_end)
    def lose(run: Run) -> None:
        until(lambda: rows() == 3)
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE step = 2")

    run = tiny_run(callbacks=[logging({"a": 1}), Trackio("lossy"), lose], steps=3, directory=tmp_path)
    assert [str(fault.error) for fault in run.faults] == [f"Trackio wrote 2 of 3 records to {str(database)!r}"]


def test_without_a_directory_a_run_of_trackio_has_a_name_all_the_same() -> None:
    def runs() -> set[Any]:
        return {*TRACKIO.select("SELECT DISTINCT run_id FROM metrics")}

    before = runs()
    assert tiny_run(callbacks=[logging({"a": 1}), TRACKIO.make()], steps=2).faults == []
    assert len(runs() - before) == 1


# -- mlflow --------------------------------------------------------------------------------------------


def test_without_arguments_mlflow_writes_to_a_database_in_the_directory_of_the_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    note = logging({"number": 0.5, "note": Text("hello")})
    run = tiny_run(callbacks=[note, Mlflow()], steps=1, directory=tmp_path / "first")
    client = MlflowClient(f"sqlite:///{tmp_path}/first/mlflow.db")
    stored = MLFLOW.run(run.info, "cadenza", client)
    assert (stored.data.metrics["number"], stored.info.run_name, stored.info.status) == (0.5, "first", "FINISHED")
    assert stored.info.artifact_uri.startswith(str(tmp_path / "first" / "mlartifacts"))


def test_the_arguments_of_the_run_are_params_of_mlflow(tmp_path: Path) -> None:
    config = {"seed": "none", "deep": {"a": [1, 2]}} | {f"p{number}": "x" * 7000 for number in range(150)}
    run = tiny_run(callbacks=[MLFLOW.make(run_name="mine", tags={"who": "me"}, config=config)], steps=1, directory=tmp_path)
    stored = MLFLOW.run(run.info)
    params = stored.data.params
    assert (params["optimizer.0.name"], params["optimizer.0.lr"], params["model"]) == ("SGD", "0.1", "Linear, 2 parameters")
    assert (params["seed"], params["deep.a"], params["callbacks"]) == ("none", "1, 2", "Mlflow")
    assert (stored.info.run_name, stored.data.tags["who"]) == ("mine", "me")
    assert params["p149"] == "x" * 6000  # more and longer params than a request may hold
    assert len(params) > 150


def test_names_that_a_tracker_does_not_allow_are_changed_with_one_remark(tmp_path: Path) -> None:
    names = {"acc@1": 1.0, "/a//b": 2.0, "x" * 300: 3.0, "naïve: 1-2.": 4.0}
    run = tiny_run(callbacks=[logging(names), MLFLOW.make()], steps=2, directory=tmp_path / "mlflow")
    changed = {"acc_1": 1.0, "a/b": 2.0, "x" * 250: 3.0, "naïve: 1-2.": 4.0}
    assert MLFLOW.values(run.info) == {name: [(1, value), (2, value)] for name, value in changed.items()}
    remarks = (tmp_path / "mlflow" / "console.log").read_text().splitlines()
    assert len(remarks) == 3
    assert remarks[0].startswith("Mlflow: 'acc@1' is logged as 'acc_1'")

    files = dict.fromkeys(("loss", "loss/aux", "a/step", "../x", "what?"), 1.0)
    run = tiny_run(callbacks=[logging(files), Dvclive()], steps=2, directory=tmp_path / "dvclive")
    assert sorted(DVCLIVE.values(run.info)) == ["a/step_", "loss", "loss_aux", "what_", "x"]
    assert all(rows == [(1, 1.0), (2, 1.0)] for rows in DVCLIVE.values(run.info).values())
    assert len((tmp_path / "dvclive" / "console.log").read_text().splitlines()) == 4


def test_a_continued_run_of_mlflow_keeps_its_first_params_and_has_the_last_outcome(tmp_path: Path) -> None:
    def fit(steps: int, *more: Any) -> Run:
        callbacks = [logging({"a": 1}), MLFLOW.make(), Checkpoint(every="2 steps", on_exception=False), *more]
        return tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")

    with pytest.raises(KeyboardInterrupt):
        fit(4, failing(3))
    run = fit(5)
    stored = MLFLOW.run(run.info)
    assert (stored.info.status, stored.data.params["max_steps"]) == ("FINISHED", "4")
    assert MLFLOW.values(run.info)["a"] == [(step, 1) for step in range(1, 6)]
    assert "Mlflow: max_steps is 5 now, and MLflow keeps the first value, 4" in (tmp_path / "console.log").read_text()


def test_the_usual_settings_of_mlflow_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", MLFLOW.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by setting")
    run = tiny_run(callbacks=[logging({"a": 1}), Mlflow()], steps=1, directory=tmp_path)
    assert MLFLOW.run(run.info, "by setting").data.metrics == {"a": 1}


# -- dvclive -------------------------------------------------------------------------------------------


def test_the_last_values_the_arguments_and_the_outcome_are_where_dvc_looks_for_them(tmp_path: Path) -> None:
    values = logging({"a/b": 0.5, "nan": math.nan})
    run = tiny_run(callbacks=[values, Dvclive(config={"seed": "mine"})], steps=3, directory=tmp_path)
    assert DVCLIVE.summary(run.info) == {"a": {"b": 0.5}, "nan": "nan", "step": 3, "outcome": "finished"}
    params = yaml.safe_load((tmp_path / "dvclive" / "params.yaml").read_text())
    assert params == {**run.info.arguments, "seed": "mine"}
    assert yaml.safe_load((tmp_path / "dvclive" / "dvc.yaml").read_text()) == {
        "metrics": ["metrics.json"],
        "params": ["params.yaml"],
        "plots": [{"plots/metrics": {"x": "step"}}],
    }


def test_dvclive_does_not_replace_files_of_another_run(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging({"a": 1}), Dvclive(tmp_path / "own")], steps=2, directory=tmp_path / "one")
    with pytest.raises(DirectoryError, match=r"Dvclive would replace the files of another run in .*Give another directory"):
        tiny_run(callbacks=[Dvclive(tmp_path / "own")], steps=1, directory=tmp_path / "two")


# -- replay --------------------------------------------------------------------------------------------


@pytest.fixture
def over(tmp_path: Path) -> Run:
    """A run that is over, and had no tracker."""
    return tiny_run(callbacks=[logging({"a": 0.5})], steps=3, directory=tmp_path / "over", seed=1)


ROWS = [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_replay_writes_the_records_of_a_run_in_the_files_of_dvclive(over: Run) -> None:
    assert main(["replay", str(over.info.directory), "--to", "dvclive"]) == 0
    assert DVCLIVE.values(over.info) == {"a": ROWS}
    assert DVCLIVE.outcome(over.info) == "finished"


def test_replay_makes_an_archive_of_comet_offline_and_needs_an_api_key_online(
    over: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(over.info.directory), "--to", "comet"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    assert main(command) == 1
    assert "Comet has no API key. Set COMET_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    assert main(command) == 0
    assert COMET.values(over.info)["a"] == ROWS
    assert COMET.outcome(over.info).startswith("finished: ")


def test_a_replay_to_mlflow_has_arguments_and_outcome_and_nothing_twice(over: Run) -> None:
    command = ["replay", str(over.info.directory), "--to", "mlflow", "--output", MLFLOW.uri]
    assert [main(command) for _ in range(2)] == [0, 0]
    stored = MLFLOW.run(over.info, "cadenza")
    assert (stored.info.run_name, stored.info.status, stored.data.params["seed"]) == ("over", "FINISHED", "1")
    history = MLFLOW.client.get_metric_history(stored.info.run_id, "a")
    assert [(point.step, point.value) for point in history] == ROWS


def test_wandb_takes_a_replay_offline(over: Run, tmp_path: Path) -> None:
    """In a process of its own: wandb reads its environment once."""
    command = ["replay", str(over.info.directory), "--to", "wandb", "--output", str(tmp_path / "w")]
    script = f"import os; os.environ.pop('WANDB_SERVICE', None)\nfrom cadenza.commands.main import main\nmain({command})"
    with Terminal(script, width=None, variables={"WANDB_MODE": "offline"}) as process:
        pass
    assert process.exit_code == 0, process.written
    [file] = (tmp_path / "w").rglob("*.wandb")
    assert [row["a"] for row in WandbFile(file).rows] == [0.5, 0.5, 0.5]


# -- processes and networks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "changed"), [("Comet('p', mode='offline')", set()), ("Dvclive()", set()), ("Mlflow({uri!r})", {"environment"})]
)
def test_offline_the_process_the_home_the_network_and_the_git_repository_are_left_as_they_were(
    sink: str, changed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_DIR")
    subprocess.run(["git", "init", "-q", str(tmp_path / "work")], check=True)
    ended = in_own_process(sink.format(uri=MLFLOW.uri), tmp_path)
    assert (ended.outcome, ended.faults, ended.asked) == ("finished", [], [])
    assert ended.changed.keys() == changed, ended.changed
    assert list((tmp_path / "home").iterdir()) == []
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".git"]


class Refusing(BaseHTTPRequestHandler):
    """A server without accounts."""

    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


# Loud, as wandb asks nothing when it is silent. No server uses the discard port.
LOUD = {**QUIET, "silent": False}
DOWN = {**QUIET, "init_timeout": 1, "x_graphql_retry_max": 0, "base_url": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("sink", "key", "error"),
    [
        (f"Wandb('tests', mode='online', settings={LOUD})", {}, "No API key configured. Use `wandb login` to log in."),
        (f"Wandb('tests', mode='online', settings={DOWN})", {"WANDB_API_KEY": "0123456789" * 4}, "connection refused"),
        ("Swanlab('tests', mode='online')", {}, "no API key was provided"),
        ("Swanlab('tests', mode='online')", {"SWANLAB_API_KEY": "0123456789"}, ""),
    ],
    ids=["wandb without a key", "wandb without a server", "swanlab without a key", "swanlab is refused"],
)
def test_without_an_account_or_a_server_a_tracker_asks_nothing_in_a_terminal_and_the_run_goes_on(
    sink: str, key: dict[str, str], error: str, refusing: str, tmp_path: Path
) -> None:
    variables = {"WANDB_ERROR_REPORTING": "false", "SWANLAB_API_HOST": refusing, "SWANLAB_SAVE_DIR": str(tmp_path), **key}
    ended = in_own_process(sink, tmp_path, variables, offline=False)
    [fault] = ended.faults
    assert error in fault
    assert ended.outcome == "finished"
    assert ended.written.count(f"{sink.partition('(')[0]} failed in") == 1
    assert len(metrics_of(tmp_path / "run")) == 3

"""Swanlab: its own offline file is read back with its own reader; there is no account and no network."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and comes with swanlab

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.sinks import Swanlab
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_whole, logging, metrics_of
from tests.sinks.terminal import shown_in_terminal


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    """See that nothing stays behind, but for a thread for each run that the file watcher of SwanLab never ends."""
    threads, hook = set(threading.enumerate()), sys.excepthook
    yield
    assert {type(thread).__name__ for thread in set(threading.enumerate()) - threads} <= {"InotifyFD"}
    assert sys.excepthook is hook


def offline(**arguments: Any) -> Swanlab:
    return Swanlab("tests", mode="offline", **arguments)


class SwanlabFile:
    """What stands in a run's ``run-*.swanlab`` file."""

    def __init__(self, path: Path) -> None:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        self.folder = path.parent
        reader: Any = DataStoreReader()
        reader.open(path)
        with closing(reader):
            self.records = [Record.FromString(entry) for entry in reader]

    @property
    def start(self) -> Any:
        """Project, name, id, tags."""
        return next(record.start for record in self.records if record.HasField("start"))

    @property
    def finish(self) -> Any:
        """How it ended."""
        return next(record.finish for record in self.records if record.HasField("finish"))

    def values(self, name: str) -> list[tuple[int, float]]:
        """All (step, value) of a name."""
        scalars = [record.scalar for record in self.records if record.HasField("scalar")]
        return [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == name]

    def media(self, name: str) -> bytes:
        """The one medium of a name."""
        [medium] = [record.media for record in self.records if record.HasField("media") and record.media.key == name]
        [item] = medium.value.items
        [file] = self.folder.glob(f"media/*/{item.filename}")
        return file.read_bytes()

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        content = yaml.safe_load((self.folder / "files" / "config.yaml").read_text())
        return {name: entry["value"] for name, entry in content.items()}


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("swanlog/run-*/run-*.swanlab"))


def read(directory: Path) -> SwanlabFile:
    [file] = files(directory)
    return SwanlabFile(file)


# -- what arrives --------------------------------------------------------------------------------------


def test_every_value_stands_at_its_step(tmp_path: Path) -> None:
    log = LogTraining(every="2 steps", throughput=False)
    many = logging({"x": 0.1, "nan": float("nan"), "inf": float("-inf")})
    run = tiny_run(callbacks=[log, many, Evaluate(tiny_loader()), offline()], epochs=60, directory=tmp_path)
    written = read(tmp_path)
    for name in ("train/loss", "eval/loss", "x", "inf"):
        assert written.values(name) == run.history[name]
    assert len(written.values("x")) == 300
    assert len(written.values("eval/loss")) == 60
    assert all(math.isnan(value) for _, value in written.values("nan"))
    assert len(written.values("nan")) == 300


def test_the_arguments_of_the_run_are_the_configuration(tmp_path: Path) -> None:
    sink = offline(config={"seed": "mine", "data": {"size": 3}}, tags=["a", "b"], group="g")
    run = tiny_run(callbacks=[sink], directory=tmp_path / "small")
    written = read(tmp_path / "small")
    given = {name: value for name, value in run.info.arguments.items() if value is not None}
    assert written.config == {**given, "seed": "mine", "data": {"size": 3}}
    assert (written.start.name, written.start.project, written.start.id) == ("small", "tests", run.info.id)
    assert (list(written.start.tags), written.start.group) == (["a", "b"], "g")


def test_media_come_back_as_they_were(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging(MEDIA), offline()], steps=1, directory=tmp_path)
    written = read(tmp_path)
    check_whole(written.media("whole"))
    check_bright(written.media("bright"))
    assert written.media("note") == b"1 < 2"


def test_media_that_cannot_be_shown_are_left_out_with_one_remark(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging(EMPTY), offline()], steps=3, directory=tmp_path)
    assert run.faults == []
    assert read(tmp_path).values("a") == [(1, 1), (2, 1), (3, 1)]
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert lines[0] == "Swanlab: 'w' of step 1 is a Histogram, which SwanLab does not have, and is left out"
    assert [line.split()[1] for line in lines] == ["'w'", "'tone'"]


def test_the_tracker_gets_the_outcome_of_the_run(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ArithmeticError("a failure on purpose")

    tiny_run(callbacks=[offline()], directory=tmp_path / "good")
    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[logging({"a": 1}), offline(), fail], directory=tmp_path / "bad")
    good, bad = read(tmp_path / "good").finish, read(tmp_path / "bad").finish
    assert (good.error, bad.error) == ("", "ArithmeticError('a failure on purpose')")
    assert good.state != bad.state
    assert read(tmp_path / "bad").values("a") == [(1, 1), (2, 1)]


# -- other runs ----------------------------------------------------------------------------------------


def test_one_instance_serves_several_runs(tmp_path: Path) -> None:
    sink = offline(directory="own")
    for name, steps in (("one", 2), ("two", 3)):
        tiny_run(callbacks=[logging({"a": 1}), sink], steps=steps, directory=tmp_path / name)
    lengths = [len(SwanlabFile(file).values("a")) for file in sorted(tmp_path.glob("*/own/run-*/run-*.swanlab"))]
    assert lengths == [2, 3]


def test_a_continued_run_goes_on_under_its_id(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        return tiny_trainer(
            callbacks=[logging({"a": 1}), Checkpoint(every="2 steps"), offline()], steps=steps, directory=tmp_path
        )

    first = trainer(2).fit()
    trainer(5).fit(resume="auto")
    written = sorted((SwanlabFile(file) for file in files(tmp_path)), key=lambda file: file.values("a")[0])
    assert [file.start.id for file in written] == [first.info.id, first.info.id]
    assert [file.values("a") for file in written] == [[(1, 1), (2, 1)], [(3, 1), (4, 1), (5, 1)]]


def test_a_run_of_your_own_goes_on_and_the_sink_is_disabled(tmp_path: Path) -> None:
    import swanlab

    own = swanlab.init(mode="disabled", project="own")
    try:
        run = tiny_run(callbacks=[logging({"a": 1}), offline()], steps=2, directory=tmp_path)
        assert own.alive
    finally:
        own.finish()
    assert [fault.callback for fault in run.faults] == ["Swanlab"]
    assert "requires an inactive Run" in str(run.faults[0].error)
    assert len(metrics_of(tmp_path)) == 2


def test_the_mode_of_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    tiny_run(callbacks=[logging({"a": 1}), Swanlab()], steps=1, directory=tmp_path)
    assert read(tmp_path).values("a") == [(1, 1)]


def test_a_keyboard_interrupt_is_pythons_own_all_the_time(tmp_path: Path) -> None:
    seen = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    tiny_run(callbacks=[offline(), look], steps=1, directory=tmp_path)
    assert seen == [signal.getsignal(signal.SIGINT)]


# -- trouble -------------------------------------------------------------------------------------------


def test_a_run_that_is_finished_by_others_disables_it_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import swanlab

    @on(Callback.on_step_end, at=5)
    def finish(run: Run) -> None:
        threading.Thread(target=swanlab.finish).run()

    run = tiny_run(callbacks=[logging({"a": 1}), finish, offline()], steps=20, directory=tmp_path)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert ["requires an active Run" in str(fault.error) for fault in run.faults] == [True]
    assert caplog.text.count("Swanlab failed in") == 1
    assert len(metrics_of(tmp_path)) == 20


SCRIPT = """
import json, sys
from cadenza.callbacks import LogTraining
from cadenza.sinks import Swanlab
from cadenza.testing import tiny_run

run = tiny_run(callbacks=[LogTraining("1 step"), Swanlab("tests", mode="online")], steps=5, directory=DIRECTORY)
print("\\n" + json.dumps([run.outcome.kind, [str(fault.error) for fault in run.faults]]))
"""


def script(directory: Path) -> str:
    return f"DIRECTORY = {str(directory / 'run')!r}\n{SCRIPT}"


def test_without_an_account_it_does_not_ask_in_a_terminal_but_goes(tmp_path: Path) -> None:
    screen, _ = shown_in_terminal(script(tmp_path), width=400, variables={"SWANLAB_SAVE_DIR": str(tmp_path)})
    [lines] = [line for line in screen.lines if line.startswith("[")]
    outcome, [fault] = json.loads(lines)
    assert outcome == "finished"
    assert "no API key was provided" in fault
    assert len(metrics_of(tmp_path / "run")) == 5


class Refusing(BaseHTTPRequestHandler):
    """A server without accounts."""

    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_refuses_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        server_variables = {"SWANLAB_API_HOST": f"http://127.0.0.1:{server.server_port}", "SWANLAB_SAVE_DIR": str(tmp_path)}
        command = [sys.executable, "-W", "error", "-c", script(tmp_path)]
        variables = {**os.environ, **server_variables, "SWANLAB_API_KEY": "0123456789"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=variables)
        finally:
            server.shutdown()
            serving.join()
    assert done.returncode == 0, done.stderr
    outcome, [fault] = json.loads(done.stdout.splitlines()[-1])
    assert outcome == "finished"
    assert done.stderr.count("Swanlab failed in") == 1
    assert len(metrics_of(tmp_path / "run")) == 5, fault


def test_wrong_arguments_are_errors_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode must be 'online', 'offline', 'local', 'disabled' or None; got 'off'"):
        Swanlab(mode="off")  # type: ignore[arg-type]  # the mistake under test
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(MissingExtraError, match=r"Swanlab needs .*pip install 'cadenza\[swanlab\]'"):
        Swanlab()


def test_a_directory_that_cannot_be_made_is_an_error_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"Swanlab cannot write to .*Give a directory where files can be made"):
        tiny_run(callbacks=[offline(directory=tmp_path / "file" / "w")])


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(offline)

"""Wandb: its own offline file is read back, block by block; there is no account and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cadenza import Callback, Image, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.sinks import Wandb
from cadenza.status.decisions import Outcome
from cadenza.status.run_info import RunInfo
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_tone, check_whole, logging, metrics_of
from tests.sinks.terminal import shown_in_terminal
from tests.sinks.wandb_file import WandbFile

QUIET = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    """Wandb's service process serves all runs of a process: end it after the last test, and see that nothing stays behind."""
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_ERROR_REPORTING", "false")  # it reports its own errors to its maker
        patch.delenv("WANDB_API_KEY", raising=False)
        yield
        import wandb

        wandb.teardown()
    assert children("wandb-core") == []
    assert {
        thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith(("wandb", "cadenza"))
    } == set()


def children(command: str) -> list[int]:
    """Return this process's children that are called so."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in alive if child.name() == command]


def offline(**arguments: Any) -> Wandb:
    return Wandb("tests", mode="offline", settings=QUIET, **arguments)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))


def read(directory: Path) -> WandbFile:
    [file] = files(directory)
    return WandbFile(file)


# -- what arrives --------------------------------------------------------------------------------------


def test_every_value_stands_at_its_step_and_time(tmp_path: Path) -> None:
    log = LogTraining(every="2 steps", throughput=False)
    many = logging({"x": 0.1, "nan": float("nan"), "inf": float("-inf")})
    run = tiny_run(callbacks=[log, many, Evaluate(tiny_loader()), offline()], epochs=60, directory=tmp_path)
    rows = read(tmp_path).rows
    assert len(files(tmp_path)[0].read_bytes()) > 32 * 1024, "it is more than a block"
    for name in ("train/loss", "eval/loss", "x"):
        assert [(row["_step"], row[name]) for row in rows if name in row] == run.history[name]
    assert len(run.history["x"]) == 300
    assert len(run.history["eval/loss"]) == 60, "it has the step of the last record of the epoch"
    assert all(row["nan"] != row["nan"] and row["inf"] == float("-inf") for row in rows)
    times = {line["step"]: line["time"] for line in metrics_of(tmp_path)}
    assert [row["_timestamp"] for row in rows] == pytest.approx([times[row["_step"]] for row in rows], abs=0.001)


def test_the_arguments_of_the_run_are_the_configuration(tmp_path: Path) -> None:
    sink = offline(config={"seed": "mine", "data": {"size": 3}}, tags=["a", "b"], group="g")
    run = tiny_run(callbacks=[sink], directory=tmp_path / "small")
    written = read(tmp_path / "small")
    own = {name: value for name, value in written.config.items() if name != "_wandb"}
    assert own == {**run.info.arguments, "seed": "mine", "data": {"size": 3}}
    assert (written.run.display_name, written.run.project, written.run.run_id) == ("small", "tests", run.info.id)
    assert (list(written.run.tags), written.run.run_group) == (["a", "b"], "g")


def test_a_name_of_your_own_is_shown(tmp_path: Path) -> None:
    tiny_run(callbacks=[offline(run_name="best try", directory="elsewhere")], directory=tmp_path)
    assert read(tmp_path / "elsewhere").run.display_name == "best try"


def test_media_come_back_as_they_were(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging(MEDIA), offline()], steps=1, directory=tmp_path)
    [row] = read(tmp_path).rows
    content = {name: file_of(tmp_path, row[f"{name}/path"]) for name in ("whole", "bright", "tone", "note")}
    check_whole(content["whole"])
    check_bright(content["bright"])
    check_tone(content["tone"])
    assert (row["w/bins"][0], row["w/bins"][-1], sum(row["w/values"])) == (-1, 1, 3)
    assert "1 &lt; 2" in content["note"].decode()


def file_of(directory: Path, path: str) -> bytes:
    [file] = directory.glob(f"wandb/offline-run-*/files/{path}")
    return file.read_bytes()


def test_media_that_cannot_be_shown_are_left_out_with_one_remark(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging(EMPTY), offline()], steps=3, directory=tmp_path)
    assert run.faults == []
    assert [row["a"] for row in read(tmp_path).rows] == [1, 1, 1]
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "Wandb: 'w' of step 1 has no values to show, and is left out",
        "Wandb: 'tone' of step 1 has no values to show, and is left out",
    ]


def test_the_tracker_gets_the_outcome_of_the_run(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ArithmeticError

    tiny_run(callbacks=[offline()], directory=tmp_path / "good")
    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[logging({"a": 1}), offline(), fail], directory=tmp_path / "bad")
    assert (read(tmp_path / "good").exit_code, read(tmp_path / "bad").exit_code) == (0, 1)
    assert [row["_step"] for row in read(tmp_path / "bad").rows] == [1, 2]


def test_a_run_that_a_signal_ended_is_marked_as_preempted(tmp_path: Path) -> None:
    sink = offline()
    sink.open(RunInfo("an-id", tmp_path))
    sink.close(Outcome("preempted", "signal SIGTERM"))
    assert any(record.HasField("preempting") for record in read(tmp_path).records)
    assert read(tmp_path).exit_code == 1


# -- other runs ----------------------------------------------------------------------------------------


def test_a_run_of_your_own_is_not_touched(tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="own", mode="offline", dir=str(tmp_path), settings=dict(QUIET)) as own:
        tiny_run(callbacks=[logging({"theirs": 1}), offline()], directory=tmp_path / "run")
        assert wandb.run is own
        own.log({"mine": 1})
    assert [set(row) & {"mine", "theirs"} for row in read(tmp_path).rows] == [{"mine"}]


def test_one_instance_serves_several_runs(tmp_path: Path) -> None:
    sink = offline()
    for name, steps in (("one", 2), ("two", 3)):
        tiny_run(callbacks=[logging({"a": 1}), sink], steps=steps, directory=tmp_path / name)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert (len(one.rows), len(two.rows)) == (2, 3)
    assert one.run.run_id != two.run.run_id


def test_a_continued_run_goes_on_under_its_id(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        return tiny_trainer(
            callbacks=[logging({"a": 1}), Checkpoint(every="2 steps"), offline()], steps=steps, directory=tmp_path
        )

    first = trainer(2).fit()
    trainer(5).fit(resume="auto")
    before, after = (WandbFile(file) for file in files(tmp_path))
    assert before.run.run_id == after.run.run_id == first.info.id
    assert [row["_step"] for row in before.rows] == [1, 2]
    assert [row["_step"] for row in after.rows] == [3, 4, 5]
    assert after.run.resume


def test_two_in_one_list_are_two_runs(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        two = [Wandb(project, mode="offline", settings=QUIET, directory=project) for project in ("one", "two")]
        return tiny_trainer(callbacks=[logging({"a": 1}), Checkpoint(every="1 step"), *two], steps=steps, directory=tmp_path)

    first = trainer(2).fit()
    second = trainer(3).fit(resume="auto")
    assert first.faults == second.faults == []
    one, again = (WandbFile(file) for file in files(tmp_path / "one"))
    other, other_again = (WandbFile(file) for file in files(tmp_path / "two"))
    assert one.run.run_id == again.run.run_id == first.info.id
    assert other.run.run_id == other_again.run.run_id == f"{first.info.id}-2"
    assert [[row["_step"] for row in file.rows] for file in (one, again, other, other_again)] == [[1, 2], [3], [1, 2], [3]]


def test_disabled_it_writes_nothing(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging({"a": 1}), Wandb(mode="disabled", settings=QUIET)], directory=tmp_path)
    assert run.faults == []
    assert files(tmp_path) == []


# -- trouble -------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import psutil
os.environ.pop("WANDB_SERVICE", None)  # of the tests' own process
from pathlib import Path
from cadenza import Callback, on
from cadenza.callbacks import LogTraining
from cadenza.sinks import Wandb
from cadenza.testing import tiny_run

def fit(*callbacks, steps=5, **arguments):
    sink = Wandb("tests", settings={**SETTINGS, **arguments.pop("settings", {})}, **arguments)
    run = tiny_run(callbacks=[LogTraining("1 step"), *callbacks, sink], steps=steps, directory=sys.argv[1])
    lines = Path(sys.argv[1], "metrics.jsonl").read_text().splitlines()
    print("\\n" + json.dumps([run.outcome.kind, [repr(fault.error) for fault in run.faults], len(lines)]))
"""


def script(run: str, directory: Path) -> str:
    return f"import sys; sys.argv[1:] = [{str(directory)!r}]; SETTINGS = {QUIET!r}\n{SCRIPT}\n{run}"


def fit_elsewhere(run: str, directory: Path, **variables: str) -> Any:
    """Return how a run in a process of its own ended: outcome, faults, lines in metrics.jsonl."""
    home = {"HOME": str(directory), "NETRC": str(directory / "netrc"), "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-W", "error", "-c", script(run, directory / "run")]
    environment = {**os.environ, **home, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Wandb failed in") == 1
    return json.loads(done.stdout.splitlines()[-1])


def test_without_an_account_it_does_not_ask_in_a_terminal_but_goes(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_ERROR_REPORTING": "false"}
    # Loud, as wandb asks nothing when it is silent.
    run = script("fit(mode='online', settings={'silent': False})", tmp_path / "run")
    screen, _ = shown_in_terminal(run, width=400, variables=home)
    text = "\n".join(screen.lines)
    lines = [line for line in screen.lines if line.startswith("[")]
    assert lines, text
    outcome, [fault], count = json.loads(lines[-1])
    assert (outcome, count) == ("finished", 5)
    assert fault == "UsageError('No API key configured. Use `wandb login` to log in.')"


def test_a_server_that_is_down_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    quick = {"init_timeout": 1, "x_graphql_retry_max": 0, "base_url": "http://127.0.0.1:9"}  # no server uses the discard port
    outcome, [fault], count = fit_elsewhere(f"fit(mode='online', settings={quick})", tmp_path, WANDB_API_KEY="0123456789" * 4)
    assert (outcome, count) == ("finished", 5)
    assert "connection refused" in fault


KILL = """
@on(Callback.on_step_end, at=5)
def kill(run):
    [service] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    service.kill()

fit(kill, mode="offline", steps=500)
sys.stdout.flush()
os._exit(0)  # wandb would tell at exit that its service is gone
"""


def test_a_service_that_is_killed_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome, [fault], count = fit_elsewhere(KILL, tmp_path)
    assert (outcome, count) == ("finished", 500)
    assert "Connection" in fault or "Broken" in fault


def test_a_directory_that_cannot_be_made_is_an_error_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"Wandb cannot write to .*Give a directory where files can be made"):
        tiny_run(callbacks=[offline(directory=tmp_path / "file" / "w")])


def test_wrong_arguments_are_errors_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode must be 'online', 'offline', 'disabled' or None; got 'off'"):
        Wandb(mode="off")  # type: ignore[arg-type]  # the mistake under test
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"Wandb needs .*pip install 'cadenza\[wandb\]'"):
        Wandb()


def test_without_pillow_images_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    tiny_run(callbacks=[logging({"a": 1, "i": Image(torch.zeros(1, 2, 2))}), offline()], steps=1, directory=tmp_path)
    assert "i/path" not in read(tmp_path).rows[0]
    assert "'i' of step 1 needs the package 'pillow' (pip install" in (tmp_path / "console.log").read_text()


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(offline)

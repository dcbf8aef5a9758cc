"""``cadenza ask`` and `read_run`: answers in one form, from the directory of a run in any state."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import cadenza
from cadenza import Callback, on, read_run
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.commands.main import main
from cadenza.errors import DirectoryError
from cadenza.steering.run_reader import SCHEMA
from cadenza.testing import tiny_loader, tiny_run
from tests.steering.parts import ENDLESS, ask, command, kill, training, until_steps

FORM = json.loads((files("cadenza.steering") / "answers.json").read_text(encoding="utf-8"))
QUESTIONS = ("status", "plan", "why", "why saved", "why-not stopped", "metric train/loss", "samples 3", "config", "health")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "run"
    stop = EarlyStopping("eval/loss", "min", patience=9)
    log = LogTraining("1 step")
    tiny_run(directory=path, epochs=3, callbacks=[log, Evaluate(tiny_loader()), stop, Checkpoint("1 epoch")])
    return path


def answer(run: Path, question: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the checked answer of ``cadenza ask --json`` in this process."""
    code = main(["ask", str(run), *question.split(), "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, FORM)
    return code, told


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_answer_has_the_documented_form(question: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = answer(finished, question, capsys)
    assert code == 0
    assert told["schema"] == SCHEMA == FORM["properties"]["schema"]["const"]
    assert told["question"] == question.split()[0]
    assert told["run"] == str(finished)


def test_the_answers_of_a_run_that_is_over(finished: Path) -> None:
    run = read_run(finished)
    status = run.status()
    assert (status["state"], status["step"], status["steps"], status["fraction"]) == ("finished", 15, 15, 1.0)
    assert status["checkpoints"] == ["step-00000010", "step-00000015"]
    assert {"train/loss", "eval/loss"} <= status["values"].keys()
    assert run.why()["answer"] == ["finished: the limit is reached"]
    assert run.why("saved")["decisions"][0]["data"]["checkpoint"] == "step-00000015"
    assert [one["data"]["step"] for one in run.why("saved", last=2)["decisions"]] == [10, 15]
    assert run.why("Evaluate")["happened"]
    assert not run.why("stoped")["happened"]
    assert run.plan()["moments"]["on_epoch_end"] == ["Evaluate (every epoch)", "Checkpoint (every epoch)"]
    assert run.config()["arguments"]["optimizer"][0]["lr"] == 0.1
    assert run.samples(3)["batches"][0]["indices"] == [2]
    assert run.health()["healthy"]


def test_why_not_says_what_the_files_know(finished: Path) -> None:
    reasons = read_run(finished).why_not("saved")["reasons"]
    assert reasons == [
        "the run does not go on: finished: the limit is reached",
        "Checkpoint, on_epoch_end, is due every epoch, now at step 15",
    ]
    assert read_run(finished).why_not("pruned by hand")["reasons"][-1].startswith("no callback that the files name does it")


def test_a_metric_is_read_from_its_end(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = read_run(finished).metric("train/loss", last=3)
    assert values["steps"] == [13, 14, 15]
    assert values["complete"]
    assert values["last"] == values["values"][-1]
    code, told = answer(finished, "metric train/los", capsys)
    assert (code, told["answer"]["steps"], told["answer"]["hint"]) == (1, [], "Did you mean 'train/loss'?")
    with pytest.raises(ValueError, match="last must be at least 1; got 0"):
        read_run(finished).metric("train/loss", last=0)
    with pytest.raises(ValueError, match="last must be at least 1; got 0"):
        read_run(finished).why("saved", last=0)


def test_a_time_that_is_no_time_ends_no_question(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as records:
        records.writelines(f'{{"step": 16, "time": {time}}}\n' for time in ("1" + "0" * 400, "Infinity", "NaN"))
    run = read_run(tmp_path / "run")
    assert run.status()["step"] == 15
    assert run.health()["healthy"]


def test_a_rare_metric_is_found_by_reading_the_whole_file(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    rare = {"epoch": 0, "step": 1, "batch": 1, "samples": 2, "time": 1.0, "rare": "NaN"}
    other = json.dumps({**rare, "step": 2, "rare": 0.5}).replace("rare", "often")
    (copy / "metrics.jsonl").write_text(f"{json.dumps(rare)}\n" + f"{other}\n" * 500_000)
    found = read_run(copy).metric("rare")
    assert (found["steps"], found["complete"], found["known"]) == ([], False, ["often", "eval/loss"])
    found = cadenza.steering.RunReader(copy, whole=True).metric("rare")
    assert (found["steps"], found["not_finite"], found["complete"]) == ([1], 1, True)


@pytest.mark.parametrize("kind", ["failed", "stopped"])
def test_exit_codes_say_how_a_run_is(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def act(run: cadenza.Run) -> None:
        if kind == "failed":
            raise RuntimeError("a broken file")
        run.stop("enough")

    with suppress(RuntimeError):
        tiny_run(directory=tmp_path / "run", callbacks=[LogTraining("1 step"), on(Callback.on_step_end, at=2)(act)])
    code, told = answer(tmp_path / "run", "status", capsys)
    assert (code, told["answer"]["state"]) == (int(kind == "failed"), kind)
    assert answer(tmp_path / "run", "health", capsys)[0] == int(kind == "failed")
    assert answer(tmp_path / "run", "why", capsys)[0] == 0
    assert answer(tmp_path / "run", "why saved", capsys)[0] == 1


def test_wrong_questions_are_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = answer(tmp_path, "status", capsys)
    assert (code, told["ok"], told["error"]["kind"]) == (1, False, "directory")
    code, told = answer(finished, "samples 99", capsys)
    assert (code, told["error"]["kind"]) == (1, "value")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Return stdout and stderr of arguments that cannot be read."""
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert end.value.code == 2
    return capsys.readouterr()


def test_arguments_that_cannot_be_read_are_refused_in_json_too(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, message in {
        "metric": "needs one more argument",
        "status now": "takes no more arguments; got 'now'",
        "samples two": "expected the number of a step; got 'two'",
    }.items():
        assert message in refused(capsys, "ask", str(finished), *wrong.split())[1]
        told = json.loads(refused(capsys, "ask", str(finished), *wrong.split(), "--json")[0])
        jsonschema.validate(told, FORM)
        assert (told["error"]["kind"], told["run"], told["question"]) == ("arguments", str(finished), wrong.split()[0])
        assert message in told["error"]["message"]
    for wrong in ("", "RUN", "RUN stat", "RUN metric a --last many", "RUN status --unknown"):
        given = wrong.replace("RUN", str(finished)).split()
        told = json.loads(refused(capsys, "ask", *given, "--json")[0])
        jsonschema.validate(told, FORM)
        assert told["error"]["kind"] == "arguments"
        assert refused(capsys, "ask", *given)[0] == ""
    assert main(["tell", str(tmp_path), "stop", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "directory"
    for verb in ([], ["dance"], ["set"], ["note"], ["save", "now"], ["save", "--wait", "long"]):
        told = json.loads(refused(capsys, "tell", str(finished), *verb, "--json")[0])
        assert told["error"]["kind"] == "arguments"
        assert refused(capsys, "tell", str(finished), *verb)[0] == ""
    with pytest.raises(DirectoryError, match="is not a run directory"):
        read_run(tmp_path)


def test_people_get_lines(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(finished), "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "state: finished" in lines
    assert any(line.startswith("  saved by Checkpoint at epoch 3, step 15: step-00000015") for line in lines)
    assert main(["ask", str(finished), "why"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "finished: the limit is reached"


def test_a_run_that_goes_on_and_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(ENDLESS, run) as process:
        until_steps(run, 25, process)
        code, told = ask(run, "status")
        status = told["answer"]
        assert (code, status["state"]) == (0, "running")
        assert status["step"] >= 20
        assert status["steps_per_s"] > 0
        assert status["remaining_s"] > 0
        assert ask(run, "why")[1]["answer"]["answer"][0].startswith("running: last record at epoch")
        kill(process)
    code, told = ask(run, "status")
    assert (code, told["answer"]["state"]) == (1, "killed")
    code, told = ask(run, "health")
    assert (code, told["answer"]["problems"][0]["kind"]) == (1, "ended")
    copy = tmp_path / "copy"  # as rsync makes it on another machine, in the middle of a line
    shutil.copytree(run, copy)
    (copy / "run.lock").write_text("process 7 on another-machine")
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 0, "step": 999999, "ba')
    code, told = ask(copy, "status")
    assert (code, told["answer"]["state"]) == (0, "elsewhere")
    assert told["answer"]["step"] < 999999


def digest(folder: Path) -> str:
    """Return a digest of all names, times and bytes below a folder."""
    paths = sorted(path for path in folder.rglob("*"))
    facts = [(str(path), path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_reads_a_run_and_changes_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    for path in [*copy.rglob("*"), copy]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in [copy, *copy.parents][:-1]:
        folder.chmod(folder.stat().st_mode | 0o55)
    before = digest(copy)
    for question in QUESTIONS:
        answer(copy, question, capsys)  # as root, for the imports
        os.seteuid(65534)
        try:
            assert answer(copy, question, capsys)[0] == 0
        finally:
            os.seteuid(0)
    assert digest(copy) == before


@pytest.mark.parametrize("question", [one for one in QUESTIONS if one != "samples 3"])
def test_no_torch_and_little_else_is_imported(question: str, finished: Path) -> None:
    given = ["ask", str(finished), *question.split(), "--json"]
    code = f"import sys; from cadenza.commands.main import main; main({given!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(done.stderr.split())
    assert not brought & {"torch", "numpy", "inspect", "dataclasses", "subprocess", "logging", "cadenza.status.progress"}


HOSTILE: dict[str, Any] = {
    "run.json": ["", "[]", "null", "{", "[" * 100_000, '{"outcome": 1, "plan": 2, "arguments": [], "progress": {"step": "x"}}'],
    "metrics.jsonl": ["x\n", "[]\n", '{"step": 1}\n', '{"step": "a", "time": null, "b": {}}\n', "[" * 100_000 + "\n", "\0\n"],
    "ranks.json": [
        "[]",
        '{"ranks": 1}',
        '{"ranks": "x", "seconds": NaN, "waits_seen": 1, "mean": {}, "slowest": {}}',
        '{"ranks": 2, "seconds": 1e999, "waits_seen": 1, "mean": {"data": 1, "compute": 0, "wait": 0}, "slowest": []}',
    ],
    "decisions.jsonl": [
        "x\n",
        "{}\n",
        '{"what": 1, "who": 2, "why": 3, "data": 4}\n',
        '{"what": "evaluated", "who": "", "why": "",',
    ],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, several in HOSTILE.items() for one in several])
def test_what_a_directory_holds_breaks_no_question(
    name: str, content: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / name).write_text(content)
    for question in QUESTIONS:
        main(["ask", str(copy), *question.split(), "--json"])
        assert json.loads(capsys.readouterr().out)["question"] == question.split()[0]
        main(["ask", str(copy), *question.split()])
        capsys.readouterr()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "decisions.jsonl", "run.lock"])
def test_a_pipe_or_a_device_in_a_directory_blocks_no_question(name: str, finished: Path, tmp_path: Path) -> None:
    for number in range(3):
        copy = tmp_path / str(number)
        shutil.copytree(finished, copy)
        (copy / name).unlink()
        if number == 0:
            os.mkfifo(copy / name)
        elif number == 1:
            (copy / name).symlink_to("/dev/zero")
        else:
            (copy / name).mkdir()
        done = command("ask", str(copy), "health", "--json", timeout=60)
        assert "Traceback" not in done.stderr
        assert json.loads(done.stdout)["ok"] or name == "run.json"


def test_no_control_character_of_a_file_reaches_the_terminal(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    decision = {"what": "saved", "who": "\x1b[2J", "why": "\x1b]0;title\x07", "epoch": 1, "step": 1}
    (copy / "decisions.jsonl").write_text(json.dumps(decision) + "\n")
    shown = command("ask", str(copy), "status").stdout
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", shown)

"""``cadenza runs``: the runs below a folder, in every state they can be in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, Literal

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import EarlyStopping, Evaluate, LogTraining
from cadenza.commands.main import main
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.going_on import going_on, killed


def trained(directory: Path, lr: float, seed: int = 1, mode: Literal["min", "max"] = "min") -> Path:
    callbacks = [LogTraining("1 step"), Evaluate(tiny_loader()), EarlyStopping("eval/loss", mode=mode, patience=1)]
    tiny_run(
        epochs=3,
        seed=seed,
        directory=directory,
        callbacks=callbacks,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
    )
    return directory


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: two that were left to finish, one that failed, one that was killed."""
    folder = tmp_path_factory.mktemp("sweep")
    trained(folder / "a" / "slow", lr=0.01)
    trained(folder / "a" / "fast", lr=0.1)
    killed(folder / "killed")

    @on(Callback.on_step_end, at=2)
    def break_down(run: Run) -> None:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError):
        tiny_run(callbacks=[break_down], directory=folder / "broken down")
    (folder / "a" / "slow" / "inner").mkdir()
    (folder / "a" / "slow" / "inner" / "run.json").write_text("{}")  # inside of a run: not a run of the table
    (folder / ".trash" / "old").mkdir(parents=True)
    (folder / ".trash" / "old" / "run.json").write_text("{}")
    return folder


def names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["runs", *arguments, "--json"]) == 0
    return [Path(one["path"]).name for one in json.loads(capsys.readouterr().out)]


def test_each_run_is_a_row_with_its_state_and_best_value(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(sweep)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "eval/loss", "optimizer.lr"]
    states = {line.partition("  ")[0]: line.split("  ")[1:] for line in lines}
    assert states.keys() == {"a/slow", "a/fast", "killed", "broken down"}
    shown = {name: next(cell for cell in cells if cell).strip() for name, cells in states.items()}
    assert shown == {"a/slow": "finished", "a/fast": "finished", "killed": "killed", "broken down": "failed"}


def test_the_best_value_follows_the_mode_of_the_callback_that_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "low", lr=0.1)
    trained(tmp_path / "high", lr=0.1, mode="max")
    main(["runs", str(tmp_path), "--json"])
    best = {Path(one["path"]).name: one["best"]["eval/loss"] for one in json.loads(capsys.readouterr().out)}
    logged = {
        name: [row["eval/loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
               if "eval/loss" in (row := json.loads(line))]
        for name in best
    }  # fmt: skip
    assert best == {"low": min(logged["low"]), "high": max(logged["high"])}


def test_json_has_all_that_is_known(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(sweep), "--json"]) == 0
    found = {Path(one["path"]).name: one for one in json.loads(capsys.readouterr().out)}
    fast = found["fast"]
    assert (fast["step"], fast["epoch"], fast["arguments"]["optimizer.lr"], fast["arguments"]["seed"]) == (15, 3, 0.1, 1)
    assert fast["id"] == json.loads((sweep / "a" / "fast" / "run.json").read_text())["id"]
    assert found["broken down"]["ending"] == "failed: RuntimeError('no data')"
    assert found["killed"]["ending"].startswith(
        "killed: no process holds the directory and run.json has no outcome; last record"
    )


def test_a_run_in_progress_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = going_on(tmp_path / "now", 3)
    assert names(capsys, str(tmp_path), "--state", "running") == ["now"]
    (tmp_path / "now" / "go").touch()
    process.join(300)
    assert names(capsys, str(tmp_path), "--state", "running") == []
    assert names(capsys, str(tmp_path), "--state", "finished") == ["now"]


def test_the_best_comes_first_and_runs_without_the_value_last(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(capsys, str(sweep), "--sort", "eval/loss", "--state", "finished") == ["fast", "slow"]
    assert names(capsys, str(sweep), "--sort", "eval/loss")[-1] == "broken down"
    assert names(capsys, str(sweep), "--sort", "optimizer.lr", "--state", "finished") == ["slow", "fast"]
    assert names(capsys, str(sweep), "--sort", "steps", "--reverse")[0] in ("slow", "fast")


def test_a_column_that_does_not_exist_is_named_with_the_nearest(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(sweep), "--sort", "eval/los"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("cadenza: --sort 'eval/los' is no column of the table. Did you mean 'eval/loss'? There are: run, ")


def test_another_metric_is_shown_with_its_last_value(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(sweep / "a"), "--metric", "train/loss"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "train/loss" in head
    assert all(" last " in line for line in lines)


def test_a_broken_run_is_named_and_does_not_stop_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "good", lr=0.1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text('{"id": ')
    (tmp_path / "odd").mkdir()
    odd = {"id": 1, "arguments": 3, "outcome": [3], "monitors": 5, "started": {}, "progress": {"epoch": "x", "step": None}}
    (tmp_path / "odd" / "run.json").write_text(json.dumps(odd | {"branch": [1], "checkpoints": 3}))
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"epoch": 0, "step": [], "time": 1}\n3\n{"epoch": ')
    assert main(["runs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["good", "finished"], ["bad", "unknown"], ["odd", "killed"]]
    assert "optimizer.lr" not in out  # the one run with arguments differs from none
    assert f"cadenza: {tmp_path / 'bad'}: run.json cannot be read" in err
    assert main(["compare", str(tmp_path / "good"), str(tmp_path / "bad"), str(tmp_path / "odd")]) == 0
    assert main(["why", str(tmp_path / "odd")]) == 0
    assert main(["report", str(tmp_path / "odd"), "--output", str(tmp_path / "page.html")]) == 0
    assert main(["replay", str(tmp_path / "odd"), "--to", "csv"]) == 0
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "odd"), "--once"]) == 1
    assert capsys.readouterr().out.startswith("odd: killed, epoch 0, step 0\n")
    assert main(["checkpoint", "list", str(tmp_path / "odd")]) == 1
    assert "there are no checkpoints in " in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_output_that_cannot_be_written_is_one_line_of_error(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cadenza", "runs", str(tmp_path)], stdout=full, stderr=-1, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "cadenza: OSError: [Errno 28] No space left on device\n")


def test_a_folder_without_runs_says_so_and_one_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err.endswith("is not a folder. Give a folder that holds run directories.\n")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    sweep: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["runs", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(name in "\n".join(lines) for name in ("a/slow", "a/fast", "killed"))
    assert ("not shown" in lines[-1]) == (columns < 200)


def test_a_thousand_runs_take_seconds(tmp_path: Path) -> None:
    info: dict[str, Any] = {
        "id": "0",
        "started": "2026-01-01T00:00:00+0000",
        "outcome": {"kind": "finished", "reason": "the limit"},
    }
    info |= {"monitors": [{"monitor": "eval/acc", "mode": "max", "callback": "EarlyStopping"}]}
    line = '{{"epoch": 0, "step": {0}, "batch": {0}, "samples": {0}, "time": 1.5, "train/loss": 0.5, "train/lr": 0.1{1}}}\n'
    rows = "".join(line.format(step, f', "eval/acc": {step / 1000}' if step % 50 == 0 else "") for step in range(1, 501))
    for number in range(1000):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text(json.dumps(info | {"arguments": {"seed": number}}))
        (tmp_path / str(number) / "metrics.jsonl").write_text(rows)
    before = getrusage(RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-m", "cadenza", "runs", str(tmp_path), "--json"], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert getrusage(RUSAGE_CHILDREN).ru_utime - before < 15  # about 1.5 s; the time of other processes does not count
    assert len(found) == 1000
    assert {one["best"]["eval/acc"] for one in found} == {0.5}


def test_a_reader_that_closes_the_pipe_sees_no_traceback(sweep: Path) -> None:
    code = "import sys, time; from cadenza.commands.main import main; sys.stdin.readline(); sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "runs", str(sweep)], stdin=-1, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait(300) == 141
    process.stderr.close()


def test_the_commands_that_read_directories_import_no_torch(sweep: Path) -> None:
    one, other = str(sweep / "a/slow"), str(sweep / "killed")
    commands = [["runs", str(sweep)], ["why", other, "stopped"], ["compare", one, other], ["watch", one, "--once"]]
    code = f"import sys; from cadenza.commands.main import main\nfor one in {commands!r}: main(one)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

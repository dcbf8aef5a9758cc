"""``cadenza runs``: the runs below a folder, in every state they can be in; ``cadenza compare``: runs side by side."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, FindBatchSize, LogTraining
from cadenza.commands.main import main
from cadenza.status.formats import precise
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.parts import Command, died, going_on, let_go, rows_of, trained


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: two that were left to finish, one that failed, one whose process died."""
    folder = tmp_path_factory.mktemp("sweep")
    trained(folder / "a" / "slow", lr=0.01)
    trained(folder / "a" / "fast", lr=0.1, seed=2)
    died(folder / "killed")

    @on(Callback.on_step_end, at=2)
    def break_down(run: Run) -> None:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError):
        tiny_run(callbacks=[break_down], directory=folder / "broken down")
    for no_run in (folder / "a" / "slow" / "inner", folder / ".trash" / "old"):  # inside of a run, and hidden
        no_run.mkdir(parents=True)
        (no_run / "run.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def two(sweep: Path) -> list[str]:
    return [str(sweep / "a" / "slow"), str(sweep / "a" / "fast")]


def found(cadenza: Command, *arguments: object) -> dict[str, Any]:
    """Return what ``cadenza runs --json`` has of each run, in its order."""
    return {Path(one["path"]).name: one for one in json.loads(cadenza("runs", *arguments, "--json").out)}


# -- runs ----------------------------------------------------------------------------------------------


def test_each_run_is_a_row_with_its_state_and_best_value_and_json_has_all_that_is_known(sweep: Path, cadenza: Command) -> None:
    head, *lines = cadenza("runs", sweep).out.splitlines()
    assert head.split()[:4] == ["run", "state", "eval/loss", "optimizer.lr"]
    cells = {line.partition("  ")[0]: [cell.strip() for cell in line.split("  ")[1:] if cell] for line in lines}
    shown = {name: row[0] for name, row in cells.items()}
    assert shown == {"a/slow": "finished", "a/fast": "finished", "killed": "killed", "broken down": "failed"}
    head, *lines = cadenza("runs", sweep / "a", "--metric", "train/loss").out.splitlines()
    assert "train/loss" in head
    assert all(" last " in line for line in lines)
    runs = found(cadenza, sweep)
    fast = runs["fast"]
    assert (fast["step"], fast["epoch"], fast["arguments"]["optimizer.lr"], fast["arguments"]["seed"]) == (15, 3, 0.1, 2)
    assert fast["id"] == json.loads((sweep / "a" / "fast" / "run.json").read_text())["id"]
    assert runs["broken down"]["ending"] == "failed: RuntimeError('no data')"
    ending = "killed: no process holds the directory and run.json has no outcome; last record"
    assert runs["killed"]["ending"].startswith(ending)


def test_settings_that_only_one_class_of_optimizers_has_are_no_columns(tmp_path: Path, cadenza: Command) -> None:
    for name, kind in (("a", torch.optim.SGD), ("b", torch.optim.Adam)):
        tiny_run(directory=tmp_path / name, optimizer=lambda given, kind=kind: kind(given, 0.1))
    head = cadenza("runs", tmp_path).out.splitlines()[0].split()
    assert head == ["run", "state", "optimizer", "steps", "time", "started"]


def test_the_best_value_follows_the_mode_of_the_callback_that_watched(tmp_path: Path, cadenza: Command) -> None:
    trained(tmp_path / "low", lr=0.1)
    trained(tmp_path / "high", lr=0.1, mode="max")
    best = {name: one["best"]["eval/loss"] for name, one in found(cadenza, tmp_path).items()}
    assert best == {"low": min(rows_of(tmp_path / "low", "eval/loss")), "high": max(rows_of(tmp_path / "high", "eval/loss"))}


def test_a_run_in_progress_is_running(tmp_path: Path, cadenza: Command) -> None:
    process = going_on(tmp_path / "now", 3)
    assert [*found(cadenza, tmp_path, "--state", "running")] == ["now"]
    let_go(tmp_path / "now", process)
    assert [*found(cadenza, tmp_path, "--state", "running")] == []
    assert [*found(cadenza, tmp_path, "--state", "finished")] == ["now"]


def test_the_best_comes_first_and_runs_without_the_value_last(sweep: Path, cadenza: Command) -> None:
    assert [*found(cadenza, sweep, "--sort", "eval/loss", "--state", "finished")] == ["fast", "slow"]
    assert [*found(cadenza, sweep, "--sort", "eval/loss")][-1] == "broken down"
    assert [*found(cadenza, sweep, "--sort", "optimizer.lr", "--state", "finished")] == ["slow", "fast"]
    assert next(iter(found(cadenza, sweep, "--sort", "steps", "--reverse"))) in ("slow", "fast")
    told = cadenza("runs", sweep, "--sort", "eval/los", code=1).err
    assert told.startswith("cadenza: --sort 'eval/los' is no column of the table. Did you mean 'eval/loss'? There are: run, ")


def test_a_broken_run_is_named_and_does_not_stop_a_command(tmp_path: Path, cadenza: Command) -> None:
    trained(tmp_path / "good", lr=0.1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text('{"id": ')
    (tmp_path / "odd").mkdir()
    odd = {"id": 1, "arguments": 3, "outcome": [3], "monitors": 5, "started": {}, "progress": {"epoch": "x", "step": None}}
    (tmp_path / "odd" / "run.json").write_text(json.dumps(odd | {"branch": [1], "checkpoints": 3}))
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"epoch": 0, "step": [], "time": 1}\n3\n{"epoch": ')
    out, err = cadenza("runs", tmp_path)
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["good", "finished"], ["bad", "unknown"], ["odd", "killed"]]
    assert "optimizer.lr" not in out  # the one run with arguments differs from none
    assert f"cadenza: {tmp_path / 'bad'}: run.json cannot be read" in err
    cadenza("compare", tmp_path / "good", tmp_path / "bad", tmp_path / "odd")
    cadenza("why", tmp_path / "odd")
    cadenza("report", tmp_path / "odd", "--output", tmp_path / "page.html")
    cadenza("replay", tmp_path / "odd", "--to", "csv")
    assert cadenza("watch", tmp_path / "odd", "--once", code=1).out.startswith("odd: killed, epoch 0, step 0\n")
    assert "there are no checkpoints in " in cadenza("checkpoint", "list", tmp_path / "odd", code=1).err


def test_a_folder_without_runs_says_so_and_one_that_is_not_there_is_an_error(tmp_path: Path, cadenza: Command) -> None:
    assert cadenza("runs", tmp_path).out == f"no runs in {tmp_path}\n"
    told = cadenza("runs", tmp_path / "no", code=1).err
    assert told.endswith("is not a folder. Give a folder that holds run directories.\n")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    sweep: Path, columns: int, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = cadenza("runs", sweep).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(name in "\n".join(lines) for name in ("a/slow", "a/fast", "killed"))
    assert ("not shown" in lines[-1]) == (columns < 200)


def test_a_thousand_runs_take_seconds(tmp_path: Path) -> None:
    outcome = {"kind": "finished", "reason": "the limit"}
    info: dict[str, Any] = {"id": "0", "started": "2026-01-01T00:00:00+0000", "outcome": outcome}
    info |= {"monitors": [{"monitor": "eval/acc", "mode": "max", "callback": "EarlyStopping"}]}
    line = '{{"epoch": 0, "step": {0}, "batch": {0}, "samples": {0}, "time": 1.5, "train/loss": 0.5, "train/lr": 0.1{1}}}\n'
    rows = "".join(line.format(step, f', "eval/acc": {step / 1000}' if step % 50 == 0 else "") for step in range(1, 501))
    for number in range(1000):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text(json.dumps(info | {"arguments": {"seed": number}}))
        (tmp_path / str(number) / "metrics.jsonl").write_text(rows)
    before = getrusage(RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-m", "cadenza", "runs", str(tmp_path), "--json"], capture_output=True, check=True)
    runs = json.loads(done.stdout)
    assert getrusage(RUSAGE_CHILDREN).ru_utime - before < 15  # about 1.5 s; the time of other processes does not count
    assert len(runs) == 1000
    assert {one["best"]["eval/acc"] for one in runs} == {0.5}


# -- the output of commands ----------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_output_that_cannot_be_written_is_one_line_of_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cadenza", "runs", str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "cadenza: OSError: [Errno 28] No space left on device\n")


def test_a_reader_that_closes_the_pipe_sees_no_traceback(sweep: Path) -> None:
    code = "import sys, time; from cadenza.commands.main import main; sys.stdin.readline(); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "runs", str(sweep)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(300) == 141


def test_the_commands_that_read_directories_import_no_torch(sweep: Path) -> None:
    one, other = str(sweep / "a/slow"), str(sweep / "killed")
    commands = [["runs", str(sweep)], ["why", other, "stopped"], ["compare", one, other], ["watch", one, "--once"]]
    code = f"import sys; from cadenza.commands.main import main\nfor one in {commands!r}: main(one)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- compare -------------------------------------------------------------------------------------------


def section(text: str, title: str) -> dict[str, list[str]]:
    """Return a part of the output: the cells of each row by its first cell."""
    [part] = [part for part in text.split("\n\n") if part.startswith(title)]
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_only_the_arguments_that_differ_are_shown_and_json_has_the_curves_too(two: list[str], cadenza: Command) -> None:
    assert section(cadenza("compare", *two).out, "arguments") == {
        "arguments": ["slow", "fast"], "optimizer.lr": ["0.01", "0.1"], "seed": ["1", "2"],
    }  # fmt: skip
    shown = section(cadenza("compare", *two, "--all").out, "arguments")
    assert shown["optimizer"] == ["SGD", "SGD"]
    assert shown["max_epochs"] == ["3", "3"]
    told = json.loads(cadenza("compare", *two, "--json").out)
    losses = rows_of(Path(two[1]), "eval/loss")
    assert told["differ"]["arguments"] == ["optimizer.lr", "seed"]
    slow, fast = told["runs"]
    assert (slow["arguments"], fast["arguments"]) == ({"optimizer.lr": 0.01, "seed": 1}, {"optimizer.lr": 0.1, "seed": 2})
    assert [value for _, value in fast["curves"]["eval/loss"]] == losses
    assert fast["best"]["eval/loss"] == {"value": min(losses), "step": 15, "mode": "min"}
    assert fast["decisions"]["evaluated"] == 3


def test_batch_sizes_are_arguments_also_one_that_a_callback_found(tmp_path: Path, cadenza: Command) -> None:
    data: Any = [*zip(torch.rand(64, 1), torch.rand(64, 1), strict=True)]
    given: list[Mapping[str, Any]] = []
    read = on(Callback.on_fit_start)(lambda run: given.append(run.info.arguments["loader"]))  # as a tracker does

    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(data, size, shuffle=True)

    for name, data_loader, callbacks in (
        ("small", loader(4), []),
        ("found", loader(4), [FindBatchSize(loader, start=8, max_size=16)]),
        ("all", tiny_loader(), []),
    ):
        tiny_run(loader=data_loader, directory=tmp_path / name, callbacks=[read, *callbacks])
    assert [one.get("batch_size") for one in given] == [4, 16, None]
    told = section(cadenza("compare", *(tmp_path / name for name in ("small", "found", "all"))).out, "arguments")
    assert told["loader.batch_size"] == ["4", "16", "-"]
    assert told["loader"] == ["DataLoader", "DataLoader", "list"]
    assert told["loader.sampler.kind"] == ["random", "random", "-"]


def test_values_come_with_their_step_and_difference(two: list[str], cadenza: Command) -> None:
    out = cadenza("compare", *two, "--metric", "eval/loss").out
    slow, fast = (min(rows_of(Path(one), "eval/loss")) for one in two)
    best = section(out, "values")["eval/loss, best"]
    assert best == [f"{slow:.5g} (step 15)", f"{fast:.5g} (step 15)", f"{fast - slow:.5g}"]
    assert "train/loss" not in out
    assert "  slow  █▄▁" in out
    assert section(out, "decisions")["evaluated"] == ["3", "3"]


def test_a_terminal_without_these_characters_gets_ascii(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["compare", *two]) == 0
    assert "  slow  @=_" in stream.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_runs_side_by_side_fit_the_terminal(
    two: list[str], columns: int, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for runs in (two, two * 4):
        lines = cadenza("compare", *runs).out.splitlines()
        assert max(map(len, lines)) <= columns
        assert any("finished" in line for line in lines)


def test_what_differs_in_the_environment_is_named(two: list[str], tmp_path: Path, cadenza: Command) -> None:
    info = json.loads(Path(two[0], "run.json").read_text())
    info["versions"]["torch"] = "2.7.0"
    (tmp_path / "run.json").write_text(json.dumps(info))
    told = section(cadenza("compare", two[0], tmp_path).out, "environment")
    assert told.keys() == {"environment", "torch"}
    assert told["torch"][1] == "2.7.0"


def test_runs_without_a_watched_metric_show_the_last_results_or_else_the_loss(tmp_path: Path, cadenza: Command) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        tiny_run(epochs=2, seed=seed, directory=tmp_path / "judged" / name, callbacks=[Evaluate(tiny_loader())])
        tiny_run(epochs=2, seed=seed, directory=tmp_path / "alone" / name, callbacks=[LogTraining("1 epoch", throughput=False)])
    head, *lines = cadenza("runs", tmp_path / "judged").out.splitlines()
    assert head.split()[:4] == ["run", "state", "eval/loss", "seed"]
    last = rows_of(tmp_path / "judged" / "a", "eval/loss")[-1]
    assert lines[0].split()[2:4] == [precise(last), "last"]
    assert cadenza("runs", tmp_path / "alone").out.split()[:4] == ["run", "state", "train/loss", "seed"]


def test_a_report_takes_a_folder_of_runs(tmp_path: Path, cadenza: Command) -> None:
    for name in ("a", "b"):
        tiny_run(steps=2, directory=tmp_path / "runs" / name)
    page = tmp_path / "page.html"
    assert cadenza("report", tmp_path / "runs", "-o", page).out.startswith(f"{page}: 2 runs, ")
    assert cadenza("report", tmp_path / "runs" / "a", tmp_path / "runs" / "b", "-o", page).out.startswith(f"{page}: 2 runs, ")
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in cadenza("report", tmp_path / "empty", "-o", page, code=1).err


def test_an_unknown_argument_leads_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "runs", "--nonsense"])
    assert capsys.readouterr().err == "cadenza: unrecognized arguments: --nonsense. See: cadenza report --help\n"

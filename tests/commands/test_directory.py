"""Commands on the directory of one run: ``why``, ``step``, ``checkpoint`` and ``report``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.loading import TensorBatches
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.parts import Command, died, going_on, let_go


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["why", ".", "stopped"], "cadenza: '.' is not a run directory"),
        (["step", ".", "1"], "is not the directory of a run: expected a run.json in it"),
        (["checkpoint", "list", "."], "there are no checkpoints in"),
        (["report", ".", "--output", "page.html"], "is not a run directory: expected a run.json or a metrics.jsonl in it"),
        (["compare", ".", "."], "is not a run directory"),
        (["watch", "."], "cadenza: '.' is not a run directory"),
        (["replay", ".", "--to", "csv"], "is not the directory of a run: its run.json cannot be read"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_a_folder_that_holds_no_run_is_named(
    arguments: list[str], told: str, tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in cadenza(*arguments, code=1).err
    assert list(tmp_path.iterdir()) == []


# -- why -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("runs") / "one"
    callbacks = [Evaluate(tiny_loader()), EarlyStopping("eval/loss", mode="max", patience=1), Checkpoint()]
    run = tiny_run(epochs=9, directory=directory, callbacks=callbacks)
    return directory, run.why("stopped")


def test_the_answer_is_that_of_the_run_and_json_holds_the_decision_with_its_data(
    stopped: tuple[Path, str], cadenza: Command
) -> None:
    directory, answer = stopped
    for what in (["stopped"], [], ["EarlyStopping"]):
        assert cadenza("why", directory, *what).out == f"{answer}\n"
    first, second = cadenza("why", directory, "evaluated", "--all").out.splitlines()
    assert first.startswith("evaluated by Evaluate at epoch 1, step 5")
    assert second.startswith("evaluated by Evaluate at epoch 2, step 10")
    missing = cadenza("why", directory, "stoped", code=1).out
    assert "nothing was 'stoped' in this run. Did you mean 'stopped'?" in missing
    found = json.loads(cadenza("why", directory, "stopped", "--json").out)
    assert (found["state"], found["outcome"]["kind"], found["answer"]) == ("stopped", "stopped", [answer])
    [decision] = found["decisions"]
    assert (decision["what"], decision["who"]) == ("stopped", "EarlyStopping")
    assert decision["data"]


def test_a_run_whose_process_died_has_no_outcome_and_the_last_record_is_named(tmp_path: Path, cadenza: Command) -> None:
    died(tmp_path, waits_after=4)
    for what in (["stopped"], ["killed"], []):
        told = cadenza("why", tmp_path, *what).out
        assert "killed: no process holds the directory and run.json has no outcome; last record at 20" in told
        assert told.endswith("epoch 0, step 4, batch 4\n")
    assert cadenza("why", tmp_path, "finished", code=1).out.startswith("the run was not finished. It is killed")


def test_a_run_in_progress_or_finished_was_not_stopped(tmp_path: Path, cadenza: Command) -> None:
    process = going_on(tmp_path, 3)
    told = cadenza("why", tmp_path, "stopped", code=1).out
    assert told.startswith("the run was not stopped. It is running: last record at ")
    let_go(tmp_path, process)
    told = cadenza("why", tmp_path, "stopped").out
    assert told == "the run was not stopped by a request. It is finished: the limit is reached\n"


# -- step ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "one"
    values = torch.zeros(10, 1)
    tiny_run(loader=TensorBatches(values, values, batch_size=4), epochs=2, accumulate=2, directory=path)
    return path


def test_the_samples_of_a_step_are_printed_and_one_or_a_rank_that_does_not_exist_is_named(
    directory: Path, cadenza: Command
) -> None:
    lines = ["step 3, in epoch 2:", "  rank 0, batch 1: samples 0, 1, 2, 3", "  rank 0, batch 2: samples 4, 5, 6, 7"]
    assert cadenza("step", directory, 3).out.splitlines() == lines
    found = json.loads(cadenza("step", directory, 2, "--rank", 0, "--json").out)
    assert (found["step"], found["epoch"], found["ranks"]) == (2, 0, 1)
    assert [(one["number"], one["indices"]) for one in found["batches"]] == [(2, [8, 9])]
    for step in (5, 0):
        assert f"has no step {step}: expected a step from 1 to 4." in cadenza("step", directory, step, code=1).err
    told = cadenza("step", directory, 1, "--rank", 1, code=1).err
    assert "step 1 has no rank 1: expected a rank from 0 to 0." in told


def test_a_large_batch_is_folded_in_a_terminal_and_is_one_line_in_a_pipe(
    tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run(loader=TensorBatches(torch.zeros(200, 1), torch.zeros(200, 1), batch_size=200), epochs=1, directory=tmp_path)
    whole = cadenza("step", tmp_path, 1).out.splitlines()
    assert len(whole) == 2
    monkeypatch.setenv("COLUMNS", "80")
    lines = cadenza("step", tmp_path, 1).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines[1:]) == whole[1].strip()


# -- checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_run(directory=tmp_path / "run", callbacks=[Checkpoint("2 steps", keep_last=None)], seed=1)
    return tmp_path / "run"


def test_list_shows_each_checkpoint_with_its_reason_and_prune_keeps_the_newest(saved: Path, cadenza: Command) -> None:
    lines = cadenza("checkpoint", "list", saved).out.splitlines()
    assert lines[0].split() == ["name", "written", "MB", "state", "kept", "by", "reason"]
    assert [line.split()[0] for line in lines[1:]] == ["step-00000002", "step-00000004", "step-00000005"]
    assert lines[1].endswith("ok     all      every 2 steps")
    assert lines[-1].endswith("the end of the run")
    listed = json.loads(cadenza("checkpoint", "list", saved, "--json").out)
    shown = [(one["name"], one["step"], one["state"]) for one in listed]
    assert shown == [(f"step-0000000{step}", step, "ok") for step in (2, 4, 5)]
    assert cadenza("checkpoint", "prune", saved, "--keep-last", 2).out == "deleted 1: step-00000002\n"
    assert sorted(path.name for path in (saved / "checkpoints").glob("[ls]*")) == ["last", "step-00000004", "step-00000005"]


def test_verify_tells_the_damaged_one_and_exits_with_1(saved: Path, cadenza: Command) -> None:
    cadenza("checkpoint", "verify", saved / "checkpoints")
    weights = saved / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    out, err = cadenza("checkpoint", "verify", saved, code=1)
    assert "step-00000004  model.safetensors has changed since it was written" in out
    assert err == "cadenza: 1 of 3 checkpoints cannot be used\n"
    verified = json.loads(cadenza("checkpoint", "verify", saved, "--json", code=1).out)
    assert [one["ok"] for one in verified] == [True, False, True]


def test_show_lists_the_tensors_of_the_newest_or_of_a_named_one(saved: Path, cadenza: Command) -> None:
    shown = cadenza("checkpoint", "show", saved).out
    assert "step             5" in shown
    assert "model            2 tensors, 2 numbers" in shown
    assert "weight  (1, 1)  torch.float32" in shown
    assert "step             2" in cadenza("checkpoint", "show", saved, "--name", "step-00000002").out
    told = cadenza("checkpoint", "show", saved, "--name", "step-9", code=1).err
    assert "there is no checkpoint 'step-9'; there is step-00000002, " in told
    assert json.loads(cadenza("checkpoint", "show", saved, "--json").out)["model"] == {
        "weight": {"shape": [1, 1], "dtype": "torch.float32"},
        "bias": {"shape": [1], "dtype": "torch.float32"},
    }


# -- report --------------------------------------------------------------------------------------------


def test_report_writes_one_file_or_to_a_link_or_a_device_and_says_where(tmp_path: Path, cadenza: Command) -> None:
    run, output = tmp_path / "first", tmp_path / "new" / "page.html"
    tiny_run(directory=run)
    told = cadenza("report", run, "--output", output).out
    assert re.fullmatch(rf"{re.escape(str(output))}: 1 run, \d+.* kB; open it in a browser\n", told)
    assert "<h1>first</h1>" in output.read_text(encoding="utf-8")
    assert list(output.parent.iterdir()) == [output]
    assert "the report cannot be written to" in cadenza("report", run, "--output", tmp_path, code=1).err
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    cadenza("report", run, "--output", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").stat().st_size > 10_000
    if Path("/dev/full").exists():
        assert "No space left on device" in cadenza("report", run, "--output", "/dev/full", code=1).err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of a file")
def test_a_full_disk_leaves_the_older_page(tmp_path: Path, cadenza: Command) -> None:
    import resource

    tiny_run(directory=tmp_path / "first")
    output = tmp_path / "page.html"
    output.write_text("older", encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        told = cadenza("report", tmp_path / "first", "--output", output, code=1).err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the report cannot be written to" in told
    assert {path.name for path in tmp_path.iterdir()} == {"first", "page.html"}
    assert output.read_text(encoding="utf-8") == "older"

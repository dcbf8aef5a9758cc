"""``cadenza demo``, run for real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cadenza.commands.main import main
from cadenza.version import __version__

COMMAND = "import sys; from cadenza.commands.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Demo:
    """What one run of the demo left behind."""

    code: int
    shown: str
    directory: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    directory = tmp_path_factory.mktemp("demo") / "a run"
    arguments = [sys.executable, "-W", "error", "-m", "cadenza", "demo", "--directory", str(directory)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, check=False)
    assert re.fullmatch(r"optimizer: AdamW, built fused, .*\n", done.stderr), done.stderr
    return Demo(done.returncode, done.stdout, directory)


def test_the_demo_ends_well_and_its_test_accuracy_is_at_least_97_percent(demo: Demo) -> None:
    accuracy = re.search(r"test  *\S *300 \S *\S+ \S *(\d\.\d+)", demo.shown)
    assert demo.code == 0
    assert accuracy is not None, demo.shown
    assert float(accuracy[1]) >= 0.97


def test_the_plan_comes_first_then_the_training_then_the_result_then_what_to_do_next(demo: Demo) -> None:
    parts = ["The plan", "on_fit_start", "The training", "epoch  1  step", "The result", "accuracy", "What to look at next"]
    places = [demo.shown.index(part) for part in parts]
    assert places == sorted(places)


def test_it_names_a_command_and_files_that_are_there(demo: Demo) -> None:
    assert f"--logdir '{demo.directory}'" in demo.shown
    assert f"'{demo.directory}'/metrics.jsonl" in demo.shown
    assert "docs/start.md" in demo.shown
    assert (Path(__file__).parents[2] / "docs" / "start.md").exists()


def test_what_is_no_terminal_gets_no_control_characters(demo: Demo) -> None:
    assert "\x1b" not in demo.shown
    assert "\r" not in demo.shown


def test_the_run_directory_tells_what_happened(demo: Demo) -> None:
    facts = json.loads((demo.directory / "run.json").read_text())
    records = [json.loads(line) for line in (demo.directory / "metrics.jsonl").read_text().splitlines()]
    assert facts["outcome"]["kind"] in ("finished", "stopped")  # at the last epoch, or by EarlyStopping before it
    assert [record["epoch"] for record in records] == list(range(1, len(records) + 1))
    assert all({"step", "train/loss", "valid/loss", "valid/acc"} <= record.keys() for record in records)
    assert records[-1]["valid/acc"] > 0.95
    assert "valid/acc" in (demo.directory / "console.log").read_text()
    assert list((demo.directory / "tensorboard").iterdir())


def test_a_directory_that_holds_a_run_is_refused(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    before = (demo.directory / "metrics.jsonl").read_text()
    assert main(["demo", "--directory", str(demo.directory)]) == 1
    shown = capsys.readouterr()
    assert "already holds a run" in shown.err
    assert shown.out == "", "the error comes before the plan"
    assert (demo.directory / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("module", "package"),
    [("rich", "rich"), ("tensorboard", "tensorboard"), ("torchmetrics", "torchmetrics"), ("sklearn", "scikit-learn")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what makes Python say that it is not there
    assert main(["demo"]) == 1
    said = capsys.readouterr()
    assert f"needs the package '{package}'" in said.err
    assert "pip install 'cadenza[demo]'" in said.err
    assert not said.out


def test_ctrl_c_ends_it_without_a_traceback_and_the_run_directory_says_so(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "demo", "--directory", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("epoch"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "\nCtrl-C: the run is saved and ends when the step under way is complete." in said
    assert json.loads((directory / "run.json").read_text())["outcome"] == {"kind": "interrupted", "reason": "signal SIGINT"}
    assert list((directory / "checkpoints").iterdir())


def test_an_error_comes_before_any_output_and_the_number_of_threads_is_put_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert main(["demo", "--directory", str(tmp_path / "file" / "run")]) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    shown = capsys.readouterr()
    assert "cannot be written: Not a directory" in shown.err
    assert shown.out == ""


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"cadenza {__version__}\n"

"""``cadenza demo``, run for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.commands.parts import Command


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
    assert not done.stderr
    return Demo(done.returncode, done.stdout, directory)


def test_the_demo_ends_well_and_its_test_accuracy_is_at_least_97_percent(demo: Demo) -> None:
    accuracy = re.search(r"test  *\S *300 \S *\S+ \S *(\d\.\d+)", demo.shown)
    assert demo.code == 0
    assert accuracy is not None, demo.shown
    assert float(accuracy[1]) >= 0.97


def test_it_shows_plan_training_and_result_and_the_files_that_it_names_tell_what_happened(demo: Demo) -> None:
    parts = ["The plan", "on_fit_start", "The training", "epoch  1  step", "The result", "accuracy", "What to look at next"]
    places = [demo.shown.index(part) for part in parts]
    assert places == sorted(places)
    assert f"--logdir '{demo.directory}'" in demo.shown
    assert f"'{demo.directory}'/metrics.jsonl" in demo.shown
    assert "docs/start.md" in demo.shown
    assert (Path(__file__).parents[2] / "docs" / "start.md").exists()
    assert not set(demo.shown) & {"\x1b", "\r"}  # it is no terminal
    facts = json.loads((demo.directory / "run.json").read_text())
    records = [json.loads(line) for line in (demo.directory / "metrics.jsonl").read_text().splitlines()]
    assert facts["outcome"]["kind"] in ("finished", "stopped")  # at the last epoch, or by EarlyStopping before it
    assert [record["epoch"] for record in records] == list(range(1, len(records) + 1))
    assert all({"step", "train/loss", "valid/loss", "valid/acc"} <= record.keys() for record in records)
    assert records[-1]["valid/acc"] > 0.95
    assert "valid/acc" in (demo.directory / "console.log").read_text()
    assert list((demo.directory / "tensorboard").iterdir())


def test_a_directory_that_holds_a_run_is_refused(demo: Demo, cadenza: Command) -> None:
    before = (demo.directory / "metrics.jsonl").read_text()
    shown = cadenza("demo", "--directory", demo.directory, code=1)
    assert "already holds a run" in shown.err
    assert shown.out == "", "the error comes before the plan"
    assert (demo.directory / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("module", "package"),
    [("rich", "rich"), ("tensorboard", "tensorboard"), ("torchmetrics", "torchmetrics"), ("sklearn", "scikit-learn")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, package: str, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what makes Python say that it is not there
    shown = cadenza("demo", code=1)
    assert f"needs the package '{package}'" in shown.err
    assert "pip install 'cadenza[demo]'" in shown.err
    assert not shown.out


def test_an_error_comes_before_any_output_and_the_number_of_threads_is_put_back(tmp_path: Path, cadenza: Command) -> None:
    (tmp_path / "file").write_text("")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shown = cadenza("demo", "--directory", tmp_path / "file" / "run", code=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert "cannot be written: Not a directory" in shown.err
    assert shown.out == ""

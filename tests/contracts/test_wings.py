"""The core works in a copy without the folders of the wings; a name of an absent wing is an error that says which one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_budgets import ROOT, WINGS
from tests.contracts.test_floors import SOURCE

SCRIPT = """
import contextlib, io, json, sys
import torch
from cadenza import Trainer, attach, supervised
from cadenza.callbacks import (
    Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LearningRate, LogTraining, Profile, Summary
)
from cadenza.commands.main import main
from cadenza.loading import TensorBatches
from cadenza.sinks import Console, Csv, JsonLines, ProgressBar


def trainer(epochs: int) -> Trainer:
    torch.manual_seed(0)
    batches = TensorBatches(torch.randn(32, 4), torch.randn(32, 1), batch_size=8, shuffle=True)
    callbacks = [
        ClipGradients(max_norm=1.0), Ema(decay=0.9), Evaluate(batches, sanity_batches=1),
        EarlyStopping("eval/loss", mode="min"),
        LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)), LogTraining(every="2 steps"),
        Checkpoint(every="2 steps", keep_last=2, keep_best=("eval/loss", "min")), Summary(), Profile(window=(0, 2)),
        Console(), ProgressBar("plain"), Csv(), JsonLines("records.jsonl"),
    ]
    return Trainer(
        torch.nn.Linear(4, 1), lambda parameters: torch.optim.AdamW(parameters, lr=0.01), batches,
        supervised(torch.nn.MSELoss()), max_epochs=epochs, seed=1, directory="run", callbacks=callbacks,
    )


def error_of(line: str) -> str:
    try:
        exec(line, {"Trainer": Trainer})
    except ImportError as error:
        return str(error)
    return ""


def command(*arguments: str) -> list:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    return [code, said.getvalue()]


facts = {"source": sys.modules["cadenza"].__file__, "plan": str(trainer(1).plan()), "calendar": str(trainer(1).calendar())}
first = trainer(1).fit()
second = trainer(2)
run = second.fit(resume="auto")
facts |= {
    "steps": [first.progress.step, run.progress.step],
    "outcome": [run.outcome.kind, str(run.why("resumed")), str(run.why_not("stopped"))],
    "evaluated": sorted(second.evaluate(second.loader)),
    "predicted": len(list(second.predict(second.loader))),
    "html": run._repr_html_(),
}
model = torch.nn.Linear(1, 1)
with attach(model, torch.optim.SGD(model.parameters(), 0.1)) as loop:
    facts["attached"] = type(loop).__name__
lines = "--help", "--version", "checkpoint list run", "checkpoint verify run", "completion zsh", "runs .", "step run 2"
facts["commands"] = {line: command(*line.split()) for line in lines}
facts["errors"] = {line: error_of(line) for line in (
    "from cadenza.callbacks import Capsule", "import cadenza; cadenza.sinks.Wandb", "import cadenza; cadenza.timetravel",
    "from cadenza.compat.nemo import core", "Trainer.from_lightning(None)",
    "from cadenza.testing import tiny_trainer; tiny_trainer(compile='step')",
    "import os, cadenza; os.mkdir('dcp'); open('dcp/.metadata', 'w').close(); cadenza.load_weights('dcp', None)",
)}
print("FACTS", json.dumps(facts))
"""

Facts = dict[str, Any]


def without_wings(folder: Path) -> Path:
    """Copy the package without the folders of the wings into a folder; return the folder."""
    shutil.copytree(SOURCE, folder / "cadenza", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for wing in WINGS:
        shutil.rmtree(folder / "cadenza" / wing)
    return folder


def core_alone(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that has a package without wings: in `folder`, or in its ``src``."""
    source = folder / "src" if (folder / "src").exists() else folder
    environment = {**os.environ, "PYTHONPATH": str(source), "CADENZA_LONG": ""}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Return what the script above found in a copy of the package without wings."""
    folder = without_wings(tmp_path_factory.mktemp("core"))
    done = core_alone(folder, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    found: Facts = json.loads(done.stdout.rpartition("FACTS ")[2])
    assert found["source"].startswith(str(folder))
    return found


def test_the_core_plans_trains_evaluates_resumes_and_explains(facts: Facts) -> None:
    assert "on_step_end" in facts["plan"]
    assert "2 times: steps 2, 4" in facts["calendar"]
    assert facts["steps"] == [4, 8]
    kind, resumed, not_stopped = facts["outcome"]
    assert kind == "finished"
    assert "step-00000004" in resumed
    assert "the limit is reached" in not_stopped
    assert facts["evaluated"] == ["eval/loss"]
    assert facts["predicted"] == 32
    assert facts["attached"] == "Loop"
    assert facts["html"].startswith("<pre>&lt;Run: ")  # what a notebook shows


def test_the_commands_of_the_core_work_and_the_others_say_what_is_missing(facts: Facts) -> None:
    commands: dict[str, tuple[int, str]] = facts["commands"]
    absent = {"runs .", "step run 2"}
    assert {line: code for line, (code, _) in commands.items()} == {line: int(line in absent) for line in commands}
    assert "step-00000008" in commands["checkpoint list run"][1]
    assert commands["runs ."][1].startswith("cadenza: cadenza runs needs the package 'cadenza.report', which is not installed.")
    assert "cadenza step needs the package 'cadenza.timetravel'" in commands["step run 2"][1]


def test_a_name_of_an_absent_wing_is_an_error_that_says_which_one(facts: Facts) -> None:
    end = ", which is not installed. Install it with: pip install cadenza"
    said: dict[str, str] = facts["errors"]
    assert said == {
        "from cadenza.callbacks import Capsule": f"cadenza.callbacks.Capsule needs the package 'cadenza.timetravel'{end}",
        "import cadenza; cadenza.sinks.Wandb": f"cadenza.sinks.Wandb needs the package 'cadenza.trackers'{end}",
        "import cadenza; cadenza.timetravel": f"cadenza.timetravel needs the package 'cadenza.timetravel'{end}",
        "from cadenza.compat.nemo import core": "No module named 'cadenza.compat'",
        "import os, cadenza; os.mkdir('dcp'); open('dcp/.metadata', 'w').close(); cadenza.load_weights('dcp', None)": (
            f"the folder dcp needs the package 'cadenza.parallel'{end}"
        ),
        "from cadenza.testing import tiny_trainer; tiny_trainer(compile='step')": (
            f"compile='step' needs the package 'cadenza.compiled'{end}"
        ),
        "Trainer.from_lightning(None)": f"Trainer.from_lightning needs the package 'cadenza.compat'{end}",
    }


FOLDERS = "hooks engine loops checkpoint records loading optim status callbacks sinks"
OF_WINGS = {  # files there that test a wing alone
    "callbacks/test_capsule.py",
    "callbacks/test_find_batch_size.py",
    "callbacks/test_recover.py",
    "callbacks/test_replay_check.py",
    "sinks/test_mlflow_calls.py",
    "sinks/test_outages.py",
    "sinks/test_trackers.py",
}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_tests_of_the_core_pass_without_the_wings(tmp_path: Path) -> None:
    """Tests that use a wing are skipped: see `tests.without_wings`."""
    for name in ("conftest.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tests", "docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    without_wings(tmp_path / "src")
    folders = [f"tests/{name}" for name in FOLDERS.split()]
    ignored = [f"--ignore=tests/{name}" for name in sorted(OF_WINGS)]
    done = core_alone(tmp_path, "-m", "pytest", "-q", "-p", "tests.without_wings", "-p", "no:cacheprovider", *ignored, *folders)
    assert done.returncode == 0, done.stdout[-20_000:]
    passed, skipped = (int(re.search(rf"(\d+) {kind}", done.stdout)[1]) for kind in ("passed", "skipped"))  # type: ignore[index]
    assert passed > 3000
    assert skipped < passed / 10

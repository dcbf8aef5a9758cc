"""The wheel in an environment with the core dependencies alone: everything imports, trains, and names what is missing."""

from __future__ import annotations

import re
import tomllib

import pytest

from cadenza.version import __version__
from tests.package.conftest import ROOT, Environment

pytestmark = pytest.mark.timeout(900)  # the first test installs torch

NEEDED_BY = {
    "comet": "from cadenza.sinks import Comet; Comet()",
    "data": "from cadenza import History; History().to_frame()",
    "dvclive": "from cadenza.sinks import Dvclive; Dvclive()",
    "figures": "from cadenza.callbacks import ConfusionMatrix; ConfusionMatrix()",
    "mcp": "from cadenza.steering.commands.mcp import serve; serve(None)",
    "mlflow": "from cadenza.sinks import Mlflow; Mlflow()",
    "optuna": "from cadenza.callbacks import OptunaPruning; OptunaPruning(None, 'eval/loss')",
    "parquet": "from cadenza.callbacks import SavePredictions; SavePredictions('predictions.parquet')",
    "progress": "from cadenza.sinks import ProgressBar; ProgressBar('tqdm')",
    "serve": "from cadenza.steering.commands.serve import serve; serve(None)",
    "stats": "from cadenza.callbacks import DeviceStats; DeviceStats(machine=True)",
    "swanlab": "from cadenza.sinks import Swanlab; Swanlab()",
    "tensorboard": "from cadenza.sinks import TensorBoard; TensorBoard()",
    "torchft": "from cadenza.parallel import ReplicaGroups; ReplicaGroups()",
    "trackio": "from cadenza.sinks import Trackio; Trackio()",
    "wandb": "from cadenza.sinks import Wandb; Wandb()",
}

NEEDED_BY_NO_IMPORT = {"metrics", "fast"}  # a user passes objects of torchmetrics; without orjson the results are the same

IMPORTS = """
import importlib, pkgutil
import cadenza
for module in pkgutil.walk_packages(cadenza.__path__, "cadenza."):
    if not module.name.endswith(("__main__", "cadenza.reading")):
        importlib.import_module(module.name)
print(cadenza.__file__)
"""

TRAINS = """
import torch
from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LogTraining
from cadenza.loading import TensorBatches
from cadenza.sinks import Console, Csv, JsonLines, ProgressBar

batches = TensorBatches(torch.randn(64, 4), torch.randn(64, 1), batch_size=8, shuffle=True)
callbacks = [ClipGradients(max_norm=1.0), Ema(decay=0.9), Evaluate(batches), EarlyStopping("eval/loss", mode="min"),
             LogTraining(every="4 steps"), Checkpoint(every="4 steps"), Console(), ProgressBar(), Csv(),
             JsonLines("records.jsonl")]
run = Trainer(torch.nn.Linear(4, 1), lambda p: torch.optim.AdamW(p, lr=0.01), batches, supervised(torch.nn.MSELoss()),
              max_epochs=2, seed=1, directory="run", callbacks=callbacks).fit(resume="auto")
print(run.outcome.kind, run.progress.step)
"""


def test_every_module_imports_without_any_extra_and_from_the_environment(core: Environment) -> None:
    assert str(core.root) in core.run("python", "-W", "error", "-c", IMPORTS).stdout


def test_a_run_with_the_sinks_of_the_core_trains_and_resumes(core: Environment) -> None:
    assert "finished 16" in core.run("python", "-W", "error", "-c", TRAINS).stdout
    assert "finished 16" in core.run("python", "-W", "error", "-c", TRAINS).stdout  # it is over, and says so again


@pytest.mark.parametrize("command", [["cadenza"], ["python", "-m", "cadenza"]], ids=" ".join)
def test_the_command_and_the_module_say_version_and_help(core: Environment, command: list[str]) -> None:
    assert core.run(*command, "--version").stdout == f"cadenza {__version__}\n"
    assert "demo" in core.run(*command, "--help").stdout


def test_the_commands_that_read_a_run_need_no_extra(core: Environment) -> None:
    core.run("python", "-c", TRAINS)
    assert core.run("cadenza", "report", "run", "--output", "report.html").returncode == 0
    page = (core.folder / "report.html").read_text(encoding="utf-8")
    assert "eval/loss" in page
    assert "<style" in page  # page.css is in the wheel
    assert "step-00000016" in core.run("cadenza", "checkpoint", "list", "run").stdout


def test_the_demo_names_its_extra(core: Environment) -> None:
    assert "pip install 'cadenza[demo]'" in core.run("cadenza", "demo", expected=1).stderr


@pytest.mark.parametrize("extra", sorted(NEEDED_BY))
def test_what_needs_an_extra_names_it(core: Environment, extra: str) -> None:
    said = core.run("python", "-W", "error", "-c", NEEDED_BY[extra], expected=1).stderr.splitlines()[-1]
    assert re.fullmatch(rf".*MissingExtraError: .+ needs the package .+ pip install 'cadenza\[{extra}\]'", said), said


def test_no_extra_is_left_out_above() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"].keys() - {"all", "demo"} == NEEDED_BY.keys() | NEEDED_BY_NO_IMPORT

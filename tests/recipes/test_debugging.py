"""The recipe for debugging: debugpy and pdb stop in a hook, read the run, and let it continue to the same weights."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.ports import free_port
from tests.recipes.dap import Client
from tests.recipes.pages import FOLDER
from tests.sinks.terminal import Terminal

SCRIPT = """
import os
import torch
from cadenza import Callback, Trainer, supervised
from cadenza.drivers import DdpDriver
from cadenza.loading import TensorBatches

class Watch(Callback):
    def on_step_end(self, run):
        if run.progress.step == 3:
            DEBUG  # here

x = torch.linspace(-1, 1, 64).unsqueeze(1)
torch.manual_seed(0)
several = "RANK" in os.environ
trainer = Trainer(
    torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, 0.1), TensorBatches(x, 2 * x, batch_size=8),
    supervised(torch.nn.functional.mse_loss), max_steps=4, seed=1, progress=False, callbacks=[Watch()],
    driver=DdpDriver("cpu", timeout_s=3600) if several else "single", device=None if several else "cpu",
)
WAIT
run = trainer.fit()
if run.is_main:
    print("weight", trainer.model.weight.item(), len(run.decisions), flush=True)
"""
WAITING = (FOLDER / "debugging.md").read_text(encoding="utf-8").split("```text\nimport os\n\n")[1].split("```")[0]


def script(folder: Path, debug: str = "pass", wait: str = "") -> tuple[Path, int]:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("DEBUG", debug).replace("WAIT", wait))
    return path, path.read_text().split("# here")[0].count("\n") + 1


def printed(text: str) -> str:
    found = re.search(r"weight .*", text)
    assert found, text
    return found[0].strip()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without a debugger."""
    folder = tmp_path_factory.mktemp("plain")
    return printed(forked.run(script(folder)[0], folder=folder))


def read_at_breakpoint(port: int, path: Path, line: int) -> None:
    """Attach, read every attribute of the run in the hook, and continue."""
    client = Client(port)
    try:
        client.attach(path, line)
        thread, frame = client.stopped()
        assert (frame["name"], frame["line"]) == ("on_step_end", line)
        assert client.value("run.progress.step", frame) == "3"
        client.value("[getattr(run, name) for name in dir(run) if not name.startswith('_')] and 1", frame)
        client.request("continue", threadId=thread)
    finally:
        client.close()


def test_the_launch_configurations_are_json_for_debugpy() -> None:
    block = (FOLDER / "debugging.md").read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    launch, attach = json.loads(block)["configurations"]
    assert (launch["type"], launch["program"], attach["request"]) == ("debugpy", "${file}", "attach")
    assert f"debugpy.listen({attach['connect']['port']})" in WAITING


def test_a_breakpoint_in_a_hook_shows_the_run_and_changes_nothing(tmp_path: Path, plain: str) -> None:
    port = free_port()
    wait = WAITING.replace("5678", str(port)).replace('os.environ.get("RANK") == "0"', "True")
    path, line = script(tmp_path, wait=wait)
    process = forked.start(runpy.run_path, str(path), None, "__main__", output=tmp_path / "out")
    read_at_breakpoint(port, path, line)
    assert process.ended() == 0, process.said()
    assert printed(process.said()) == plain


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["debugpy", "torchrun"])
def test_a_command_waits_at_its_breakpoint_and_the_job_continues(launcher: str, tmp_path: Path, plain: str) -> None:
    """A script that debugpy starts, and one rank of two."""
    port = free_port()
    several = launcher == "torchrun"
    path, line = script(tmp_path, wait=WAITING.replace("5678", str(port)) if several else "")
    options = {
        "debugpy": ["debugpy", "--listen", str(port), "--wait-for-client"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }
    command = [sys.executable, "-m", *options[launcher], str(path)]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet)
    read_at_breakpoint(port, path, line)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert several or printed(out) == plain
    assert printed(out)


def test_pdb_in_a_hook_reads_the_run_and_continues(tmp_path: Path, plain: str) -> None:
    path, _ = script(tmp_path, debug="breakpoint()")
    with Terminal(path.read_text()) as terminal:
        terminal.press("p 1000 + run.progress.step\np run.progress\nc\n")  # read at the prompt
    assert terminal.exit_code == 0, terminal.written
    assert "1003" in terminal.written
    assert "epoch 1, step 3" in terminal.written
    assert printed(terminal.written) == plain

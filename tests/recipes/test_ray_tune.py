"""The recipe for Ray Tune, as a script of its own: a trial that fails once continues, and the best trial is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.recipes.pages import FOLDER

FAIL_ONCE = """
@on(Callback.on_step_start)
def fail(run):
    if run.progress.step == 60 and not (RUNS / "failed").exists():
        (RUNS / "failed").touch()
        raise ZeroDivisionError("on purpose")
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_trial_that_fails_once_continues_from_its_checkpoint(tmp_path: Path) -> None:
    page = (FOLDER / "ray-tune.md").read_text(encoding="utf-8")
    code = page.split("```py\n")[1].split("```")[0]
    code = code.replace("def fit(config):", f"{FAIL_ONCE}\ndef fit(config):").replace("report, Check", "report, fail, Check")
    code = code.replace("grid_search([4, 32])", "grid_search([4])")  # each start of a trial imports torch
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets have 107 characters at most
        start = f"import ray\nray.init(num_cpus=1, include_dashboard=False, _temp_dir={short!r})\n"
        (tmp_path / "search.py").write_text(start + code + "ray.shutdown()\n")
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AIR_NEW_OUTPUT": "0"}
        command = [sys.executable, "search.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | quiet, capture_output=True, text=True, timeout=550, check=False
        )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "runs" / "failed").exists()
    assert "'width': " in done.stdout
    infos = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    assert [bool(info["continued"]) for info in infos] == [True]

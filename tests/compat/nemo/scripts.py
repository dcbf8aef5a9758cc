"""Runs a document's listing as a user does: as a script, in an empty folder, where nothing may warn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sinks.wandb_file import WandbFile

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_X_DISABLE_META": "true",
}


def run_listing(script: Path, folder: Path, *arguments: str | Path) -> str:
    """Return what a script showed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def spoken_digits() -> Path:
    """Return the folder of the sounds; skip the test where it is not."""
    folder = DATA / "fsdd-mini"
    if not folder.is_dir():
        pytest.skip(f"the data are not in {folder}")
    return folder


def sent(folder: Path) -> WandbFile:
    """Return what was sent to Weights & Biases, from the one offline run in a folder."""
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return WandbFile(file)

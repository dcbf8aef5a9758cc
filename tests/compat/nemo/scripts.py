"""Runs a document's listing as a script in an empty folder, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.sinks.wandb_file import WandbFile

SHARED = Path(__file__).resolve().parents[4] / "shared"
DATA = SHARED / "data"

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_X_DISABLE_META": "true",
}


def run_listing(script: Path, folder: Path, *arguments: str | Path) -> str:
    """Run a script; return its output."""
    # A W&B service that another test has started in this process would keep the script's run open.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=folder,
        env={**environment, **OFFLINE, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing_lines(document: str, block: int, script: Path) -> list[str]:
    """Return the lines of a document's listing that are missing in a script, without lines that contain dots.

    Skip the test where the document is not.

    Args:
        document: The first part of its name.
        block: Which of its listings.
        script: The script.
    """
    files = list((SHARED / "seeds").glob(f"{document}_*.txt"))
    if not files:
        pytest.skip(f"the documents are not in {SHARED / 'seeds'}")
    _, *parts = files[0].read_text(encoding="utf-8").split(".. code-block:: python\n")
    indented = list(takewhile(lambda line: not line.strip() or line.startswith("    "), parts[block].splitlines()))
    wanted = [line[4:].rstrip() for line in indented if line.strip() and "..." not in line]
    there = {line.rstrip() for line in script.read_text(encoding="utf-8").splitlines()}
    return [line for line in wanted if line not in there]


def spoken_digits() -> Path:
    """Return the folder of the sounds; skip the test if it does not exist."""
    folder = DATA / "fsdd-mini"
    if not folder.is_dir():
        pytest.skip(f"the data are not in {folder}")
    return folder


def sent(folder: Path) -> WandbFile:
    """Return the content of the only offline run of Weights & Biases in a folder."""
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return WandbFile(file)

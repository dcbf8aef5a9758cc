"""Kill -9 at random instants: a short version of ``benchmarks/kill.py``, which says what is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_training_that_is_killed_at_random_instants_ends_in_the_same_bits() -> None:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kill.py"), "--kills", "10", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[int(cell) for cell in (cells[1], *cells[3:9])] for cells in _table(done.stdout)]
    assert [row[0] for row in rows] == [0, 2], "workers"
    for _, kills, _, runs, exact, unreadable, failed in rows:
        assert kills >= 5
        assert (exact, unreadable, failed) == (runs, 0, 0)


def _table(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table's rows, without its head."""
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")][2:]

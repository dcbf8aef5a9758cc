"""Signals at random instants: a short version of ``benchmarks/kill.py``, which says what is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_trainings_that_are_killed_at_random_instants_end_in_the_same_bits() -> None:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "kill.py"), "--kills", "8", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills after training began: 8 " in done.stdout
    assert "unequal or not ended: 0\n" in done.stdout
    assert "newest checkpoint unreadable: 0, failed to continue: 0\n" in done.stdout

"""What the tests of `Profile` look at."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cadenza import Run
from cadenza.profiling.timings import Timings

NAP_S = 0.02  # a bound from below: sleep never returns earlier, and load can only make it longer


def nap(*_: Any) -> None:
    time.sleep(NAP_S)


def timings(run: Run) -> Timings:
    """Return the run's profile; the rows sum to the wall time, always."""
    assert run.profile is not None
    profile = run.profile
    rows = [row.seconds for row in profile.rows]
    assert sum(rows) == pytest.approx(profile.wall_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in rows)
    return profile


def phases(run: Run) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in timings(run).phases}


def calls(run: Run) -> dict[str, int]:
    return {phase.name: phase.calls for phase in timings(run).phases}


def callbacks(run: Run) -> dict[tuple[str, str], tuple[int, float]]:
    return {(one.callback, one.moment): (one.calls, one.seconds) for one in timings(run).callbacks}

"""What ``make test-long`` runs beside the usual tests: those marked ``long``, and more seeds of property tests.

A release runs it. Daemons (Ray, SLURM), long series of kills and simulated thousands of ranks are long.
"""

from __future__ import annotations

import os

LONG = bool(os.environ.get("CADENZA_LONG"))


def seeds(usual: int, long: int) -> range:
    """Return the seeds of a property test: the first few of them, or all in a long run."""
    return range(long if LONG else usual)

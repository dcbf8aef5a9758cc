"""The problems of a run, found in its newest records and decisions."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from cadenza.steering.facts import Facts, Row

FAULTS = ("alerted", "disabled", "failed", "not sent", "not saved", "not pruned", "not kept")
"""The decisions that are problems."""
_STALLED_S, _STALLED_TIMES = 60.0, 10
_FREE = 1 << 30  # bytes
_MOST = 20  # faults that are listed


def health_of(facts: Facts) -> Row:
    """Return the problems of a run, and the figures behind them."""
    rows = list(facts.newest())
    age = time.time() - rows[0]["time"] if rows else None
    interval = (rows[0]["time"] - rows[-1]["time"]) / (len(rows) - 1) if len(rows) > 1 else None
    faults = [fault for fault, _ in zip(_faults(facts), range(_MOST), strict=False)]
    free = _free(facts.path)
    problems = [_problem("file", text) for text in facts.problems]
    if facts.state in ("failed", "killed", "unknown"):
        problems.append(_problem("ended", facts.ending))
    if facts.state == "running" and age is not None and age > max(_STALLED_S, _STALLED_TIMES * (interval or 0.0)):
        problems.append(
            _problem("stalled", f"the last record is {age:.0f} s old; before, there was one every {interval or 0:.1f} s")
        )
    values = facts.values(rows)
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    problems += [_problem("not finite", f"the newest value of {name} is not finite") for name in bad]
    problems += [
        _problem(str(fault["what"]), f"{fault['who']} at step {fault.get('step')}: {fault['why']}") for fault in faults
    ]
    if free is not None and free < _FREE and facts.goes_on:
        problems.append(_problem("disk", f"{free >> 20} MiB are free on the disk of the run directory"))
    return {
        "state": facts.state,
        "healthy": not problems,
        "problems": problems,
        "last_record_age_s": age,
        "seconds_a_record": interval,
        "free_bytes": free,
        "checkpoints": len(facts.checkpoints()),
        "memory": {name: value for name, value in values.items() if "mem" in name.lower()},
    }


def _problem(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "message": text}


def _faults(facts: Facts) -> Any:
    return (decision for decision in facts.decisions() if decision["what"] in FAULTS)


def _free(path: str) -> int | None:
    try:
        facts = os.statvfs(path)
    except (OSError, AttributeError):  # Windows has none
        return None
    return facts.f_bavail * facts.f_frsize

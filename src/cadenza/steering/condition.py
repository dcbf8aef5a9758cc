"""The condition of a run: how far it is, with rates and the time that is left; and its problems."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cadenza.steering.facts import Facts, Row, counters

FAULTS = ("alerted", "disabled", "failed", "not sent", "not saved", "not pruned", "not kept")
"""The decisions that are problems."""
_STALLED_S = 60.0
_STALLED_TIMES = 10
_FREE = 1 << 30  # bytes
_MOST = 20  # faults that are listed
_WINDOW_S = 60.0  # of the newest records: the rates are their mean


def described(facts: Facts, rows: list[Row]) -> Row:
    """Return how far the run is. `rows` are its newest records, the last one first."""
    at = facts.reached()
    info = facts.info
    steps = _count(info.get("steps"))
    epochs = _count(_in(info, "arguments").get("max_epochs"))
    seen = rows[0]["time"] if rows else None
    rates = _rates(rows, _instant(_started(info))) or (None, None, None)
    done, whole = (at["step"], steps) if steps else (at["epoch"], epochs)
    left = None
    if facts.goes_on and steps and rates[0] and seen is not None:
        left = max(0.0, (steps - at["step"]) / rates[0] - max(0.0, time.time() - seen))
    return {
        **at,
        "steps": steps,
        "epochs": epochs,
        "fraction": min(1.0, done / whole) if whole else None,
        "steps_per_s": rates[0],
        "samples_per_s": rates[1],
        "tokens_per_s": rates[2],
        "remaining_s": left,
        "elapsed_s": _elapsed(facts, seen),
        "started": info.get("started"),
        "ended": info.get("ended"),
        "last_record": seen,
    }


def health_of(facts: Facts) -> Row:
    """Return the problems of a run, and the figures behind them."""
    rows = list(facts.newest())
    age = time.time() - rows[0]["time"] if rows else None
    interval = (rows[0]["time"] - rows[-1]["time"]) / (len(rows) - 1) if len(rows) > 1 else None
    faults = [fault for fault, _ in zip(_faults(facts), range(_MOST), strict=False)]
    free = _free(facts.path)
    ranks = facts.ranks()
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
        "ranks": ranks,
        "memory": {name: value for name, value in values.items() if "mem" in name.lower()},
    }


# -- how far a run is ---------------------------------------------------------------------------------


def _in(info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = info.get(name)
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _started(info: Mapping[str, Any]) -> Any:
    """Return when the process that writes now began."""
    continued = info.get("continued")
    return continued[-1] if isinstance(continued, list) and continued else info.get("started")


def _instant(text: Any) -> float | None:
    """Return the seconds since 1970 of a date in ``run.json``."""
    try:
        return datetime.fromisoformat(text).timestamp()  # strptime takes 5 ms the first time
    except (TypeError, ValueError, OverflowError):
        return None


def _rates(rows: list[Row], began: float | None) -> tuple[float, float, float] | None:
    """Return steps, samples and tokens per second in the newest records of this attempt; None if there are too few."""
    newest = rows[0]["time"] if rows else 0.0
    used = [row for row in rows if row["time"] >= max(began or 0.0, newest - _WINDOW_S)]
    if len(used) < 2 or not used[0]["time"] > used[-1]["time"]:
        return None
    passed, first, last = used[0]["time"] - used[-1]["time"], counters(used[-1]), counters(used[0])
    steps, samples, tokens = ((last[name] - first[name]) / passed for name in ("step", "samples", "tokens"))
    return steps, samples, tokens


def _elapsed(facts: Facts, seen: float | None) -> float | None:
    started = _instant(facts.info.get("started"))
    if started is None:
        return None
    end = time.time() if facts.goes_on else _instant(facts.info.get("ended")) or seen
    return None if end is None else max(0.0, end - started)


# -- problems -----------------------------------------------------------------------------------------


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

"""Which ranks are slow: parts of their time, as ``ranks.json`` in the run directory holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.status.formats import counted

FILE = "ranks.json"
PARTS = ("data", "compute", "wait")
_NAMED = 3  # ranks
_MARGIN = 0.05  # of the time: smaller differences name no rank as slow


def summary(seconds: Sequence[Sequence[float]], *, waits_seen: bool) -> dict[str, Any]:
    """Return the mean fractions of all ranks, and those of the three slowest ranks.

    A rank that others wait for waits the least. On a GPU the host does not see the waits: the rank that waits for data the
    longest comes first.

    Args:
        seconds: For each rank, the seconds in each of `PARTS`; zeros for a rank that is unknown.
        waits_seen: Whether the host waits for other ranks itself.

    >>> summary([(0.1, 3.9, 6.0), (6.0, 3.9, 0.1)], waits_seen=True)["slowest"][0]
    {'rank': 1, 'data': 0.6, 'compute': 0.39, 'wait': 0.01, 'slow_in': 'data'}
    """
    parts = {rank: [part / sum(own) for part in own] for rank, own in enumerate(seconds) if sum(own) > 0}
    mean = [sum(own[part] for own in parts.values()) / max(1, len(parts)) for part in range(len(PARTS))]
    order = sorted(parts, key=lambda rank: parts[rank][2] if waits_seen else -parts[rank][0])
    slowest = []
    for rank in order[:_NAMED]:
        excess = [own - usual for own, usual in zip(parts[rank], mean, strict=True)]
        behind = -excess[2] if waits_seen else excess[0]
        slow_in = PARTS[int(waits_seen and excess[1] > excess[0])] if behind > _MARGIN else None
        slowest.append({"rank": rank, **_named(parts[rank]), "slow_in": slow_in})
    return {
        "ranks": len(seconds),
        "seconds": round(max(map(sum, seconds), default=0.0), 1),
        "waits_seen": waits_seen,
        "mean": _named(mean),
        "slowest": slowest,
    }


def read(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``ranks.json`` in the form of `summary`.

    Raises:
        LookupError, TypeError, ValueError: It has another form.
    """
    slowest = [
        {"rank": int(row["rank"]), **_parts(row), "slow_in": row["slow_in"] if row["slow_in"] in PARTS else None}
        for row in content["slowest"][:_NAMED]
    ]
    if not math.isfinite(seconds := float(content["seconds"])):
        raise ValueError(f"seconds must be finite; got {seconds}")
    return {
        "ranks": int(content["ranks"]),
        "seconds": max(0.0, seconds),
        "waits_seen": bool(content["waits_seen"]),
        "mean": _parts(content["mean"]),
        "slowest": slowest,
    }


def sentences(content: Mapping[str, Any]) -> list[str]:
    """Return a summary as lines: the mean, then each of the slowest ranks."""
    rows = [(f"rank {row['rank']}", row, row["slow_in"]) for row in content["slowest"]]
    lines = [(f"mean of {counted(content['ranks'], 'rank')}", content["mean"], None), *rows]
    return [f"{name}: {shown(parts)}{f', slow in {slow_in}' if slow_in else ''}" for name, parts, slow_in in lines]


def shown(parts: Mapping[str, float]) -> str:
    """Return fractions of the time as text, such as ``data 60%, compute 39%, wait 1%``."""
    return ", ".join(f"{name} {100 * parts[name]:.0f}%" for name in PARTS)


def _named(parts: Sequence[float]) -> dict[str, float]:
    return {name: round(part, 3) for name, part in zip(PARTS, parts, strict=True)}


def _parts(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: min(1.0, max(0.0, float(row[name]))) for name in PARTS}

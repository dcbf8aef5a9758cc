"""The tables of `docs/tables/performance.md`."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from peers.job import WORKLOADS

Rows = dict[str, dict[str, dict[str, Any]]]

PART = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)
TYPICAL = ["typical", "typical_middle"]
STEPS = ["sgd", "adamw", "accumulate_4", "middle", "epochs_of_10", "iterable", "evaluation", "defaults", "log"]
CALLBACKS = {"sgd": 0, "heard_10": 10, "heard_50": 50, "idle_50": 50}


def put_into(page: Path, results: dict[str, Any]) -> None:
    """Put the tables between the page's marks."""
    text = page.read_text(encoding="utf-8")
    page.write_text(PART.sub(lambda part: f"{part[1]}{all_of(results)}\n{part[2]}", text), encoding="utf-8")


def machine() -> str:
    """Return a general description of the machine."""
    python = ".".join(map(str, sys.version_info[:2]))
    heap = ", ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("MALLOC_", "GLIBC_TUN"))
    )
    heap = heap or "the default settings of the memory allocator"
    return f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, Python {python}, one thread, {heap}"


def all_of(results: dict[str, Any]) -> str:
    """Return all tables."""
    rows: Rows = results["rows"]
    torch = sorted({cell["torch"] for cells in rows.values() for cell in cells.values() if "torch" in cell})
    days = sorted({cell["at"][:10] for cells in rows.values() for cell in cells.values() if "at" in cell})
    first = (
        f"Measured on {results['machine']}, torch {', '.join(torch)}, {' to '.join(dict.fromkeys([*days[:1], *days[-1:]]))}."
    )
    tables = [typical(rows), steps(rows), callbacks(rows), process(rows)]
    return "\n\n".join([first, *("\n".join(table) for table in tables if len(table) > 2)])


def typical(rows: Rows) -> list[str]:
    """Return a step's cost in the usual set-up: the ratio to the loop by hand, and the microseconds beyond it."""
    return _ratios({row: cells for row, cells in rows.items() if any(name in cells for name in TYPICAL)}, TYPICAL, [], [])


def steps(rows: Rows) -> list[str]:
    """Return a step's cost without anything around it."""
    return _ratios(rows, STEPS, ["weights"], [_apart])


def _ratios(rows: Rows, names: list[str], heads: list[str], last: list[Callable[[dict[str, Any]], str]]) -> list[str]:
    shown = [name for name in names if any(name in cells for cells in rows.values())]
    titles = [WORKLOADS[name].title for name in shown]
    hand = [_us(rows, name) for name in shown]
    table = [_line(["", "version", *titles, *heads]), _rule(len(shown) + len(heads) + 2)]
    table.append(_line(["by hand, us", "", *hand, *("" for _ in heads)]))
    for row, cells in rows.items():
        figures = [_figure(cells.get(name), lambda cell: f"{cell['ratio']:.2f} ({cell['more_us']:+.0f})") for name in shown]
        table.append(_line([row, _version(cells), *figures, *(column(cells) for column in last)]))
    return table


def callbacks(rows: Rows) -> list[str]:
    """Return the cost of callbacks in a tiny step."""
    shown = [name for name in CALLBACKS if any(name in cells for cells in rows.values())]
    heads = ["no callbacks" if name == "sgd" else WORKLOADS[name].title for name in shown]
    table = [_line(["", *heads, "each with a hook, us", "each without, us"]), _rule(len(shown) + 3)]
    for row, cells in rows.items():
        if any(name in cells for name in shown if name != "sgd"):
            ratios = [_figure(cells.get(name), lambda cell: f"{cell['ratio']:.2f}") for name in shown]
            table.append(_line([row, *ratios, _each(cells, "heard_50"), _each(cells, "idle_50")]))
    return table


def process(rows: Rows) -> list[str]:
    """Return the one-time costs of a process."""
    known = {row: cells["process"] for row, cells in rows.items() if "process" in cells}
    heads = ["to the first batch, ms", "defaults", "import, ms", "memory after import, MiB", "after a run, MiB"]
    table = [_line(["", *heads]), _rule(len(heads) + 1)]
    if known:
        torch = f"{median(row['torch_ms'] for row in known.values()):.0f} (torch)"
        start = [cells["sgd"]["hand_start_ms"] for cells in rows.values() if "hand_start_ms" in cells.get("sgd", ())]
        hand = f"{median(row['hand_run_mib'] for row in known.values()):.0f} (all)"
        table.append(_line(["by hand", f"{median(start):.1f}" if start else "", "", torch, "", hand]))
    for row, cells in rows.items():
        starts = [_figure(cells.get(name), lambda cell: f"{cell['start_ms']:.1f}") for name in ("sgd", "defaults")]
        once = [_figure(cells.get("process"), _more(key)) for key in ("import_ms", "import_mib", "run_mib")]
        if any(cell != "-" for cell in (*starts, *once)):
            table.append(_line([row, *starts, *once]))
    return table


def _more(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda cell: f"{cell[key]:+.0f}"


def _us(rows: Rows, name: str) -> str:
    times = [cells[name]["hand_us"] for cells in rows.values() if "hand_us" in cells.get(name, ())]
    return f"{median(times):.0f}" if times else ""


def _figure(cell: dict[str, Any] | None, shown: Callable[[dict[str, Any]], str]) -> str:
    if cell is None:
        return "-"
    return "refused" if "refused" in cell else shown(cell)


def _each(cells: dict[str, dict[str, Any]], name: str) -> str:
    """Return the microseconds of one of many callbacks."""
    if "more_us" not in cells.get(name, ()) or "more_us" not in cells.get("sgd", ()):
        return "-"
    return f"{(cells[name]['more_us'] - cells['sgd']['more_us']) / CALLBACKS[name]:.2f}"


def _version(cells: dict[str, dict[str, Any]]) -> str:
    return next((cell["version"] for cell in cells.values() if "version" in cell), "")


def _apart(cells: dict[str, dict[str, Any]]) -> str:
    """Return the largest distance of the weights from those of the hand-written loop."""
    apart = [cell["apart"] for name, cell in cells.items() if cell.get("apart") is not None and name != "evaluation"]
    if not apart:
        return "-"
    return f"within {max(apart):.0e}" if max(apart) else "equal to the bit"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return f"|---|{'---:|' * (columns - 1)}"

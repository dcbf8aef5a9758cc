"""``cadenza compare``: runs side by side in the terminal."""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cadenza.commands.output import (
    add_json,
    clean,
    columns_of,
    complain,
    curve,
    cut,
    cut_at_start,
    print_json,
    print_rows,
    say,
    width,
)
from cadenza.report.best import best_of
from cadenza.report.commands.directories import RunFolder, last_of, read
from cadenza.report.fingerprints import FILE, FirstDifference, Row, first_difference, read_fingerprints
from cadenza.report.settings import differing, text_of
from cadenza.report.story import Series, act_text, name_distinctly
from cadenza.status.formats import counted, precise, shown_date

Cells = tuple[str, list[str]]
_NARROW = 14  # columns for a run; with fewer, the runs are below each other
_LONGEST = 60
_CURVE = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Compare runs: how they ended, the arguments that differ, the best and last values and curves of their metrics, with "
        "a mark below a curve for each act of cadenza tell, the acts, the number of their decisions, the first step and tensor "
        "at which fingerprints part (of runs with the callback Fingerprint), and the differences of their environments. With "
        "two runs, a column shows the difference of values, second minus first. Exit code 0, whether the runs differ or not; "
        "1: a run cannot be read."
    )
    parser.epilog = (
        "examples:\n  cadenza compare runs/first runs/second\n  cadenza compare runs/* --metric eval/acc --metric eval/loss\n"
        "  cadenza compare runs/first runs/second --all\n  cadenza compare runs/first runs/second --json"
    )
    parser.add_argument("first", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("others", nargs="+", type=Path, metavar="RUN", help="the run directories to compare it with")
    parser.add_argument("--all", action="store_true", help="show also the arguments and the environment that are equal")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help="only this metric; may be repeated")
    add_json(parser)
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> None:
    """Print the comparison.

    Raises:
        DirectoryError: A path is not a run directory.
    """
    paths = [arguments.first, *arguments.others]
    runs = [read(path) for path in paths]
    name_distinctly([run.story for run in runs], paths)
    metrics = [name for name in _metrics(runs) if not arguments.metric or name in arguments.metric]
    if arguments.json:
        return print_json(_data(runs, metrics, everything=arguments.all))
    for run in runs:
        for problem in run.story.problems:
            complain(f"{run.path}: {problem}")
    names = [run.story.name for run in runs]
    settings, facts = [run.settings for run in runs], [_environment(run) for run in runs]
    _section("run", names, _outcomes(runs))
    _section("arguments", names, _facts(settings, everything=arguments.all), empty="no argument differs")
    _section("values", [*names, *["difference"] * (len(runs) == 2)], _values(runs, metrics), empty="no metric")
    _curves(runs, metrics)
    _acts(runs)
    _section("decisions", names, _counts(runs), empty="no decision")
    _fingerprints(runs)
    _section("environment", names, _facts(facts, everything=arguments.all), empty="no difference")
    return None


def _section(title: str, names: Sequence[str], rows: Sequence[Cells], *, empty: str = "") -> None:
    """Print a table with a column for each run; on a terminal that is too narrow for it, with a row for each run, or a list."""
    if title != "run":
        say()
    if not rows:
        return say(f"{title}: {empty}")
    most, label = width(), max(len(title), *(columns_of(clean(name)) for name, _ in rows))
    room = _LONGEST if most is None else min(_LONGEST, (most - label - 2 * len(names)) // len(names))
    needed = max(columns_of(clean(cell)) for _, cells in rows for cell in cells)
    if most is None or room >= min(needed, _NARROW):
        head = [title, *(_fitted(name, room) for name in names)]
        return print_rows([head, *([name, *(_fitted(cell, room) for cell in cells)] for name, cells in rows)], fit=True)
    columns = [[title, *names[: len(rows[0][1])]], *([name, *cells] for name, cells in rows)]
    across = [[clean(cell) for cell in row] for row in zip(*columns, strict=True)]
    if sum(max(map(columns_of, cells)) + 2 for cells in zip(*across, strict=True)) - 2 <= most:
        return print_rows(across)
    say(title)
    for name, cells in rows:
        say(cut(f"  {clean(name)}", most))
        longest = max(columns_of(run) for run in names)
        for run, cell in zip(names, cells, strict=True):
            known = cut_at_start(clean(run), most // 3)
            say(cut(f"    {known}{' ' * (min(longest, most // 3) - columns_of(known))}  {clean(cell)}", most))
    return None


def _fitted(text: str, room: int) -> str:
    return cut(clean(text), room)


def _outcomes(runs: Sequence[RunFolder]) -> list[Cells]:
    return [
        ("state", [run.state for run in runs]),
        ("reason", [run.story.outcome.reason if run.story.outcome else "-" for run in runs]),
        ("epochs", [f"{run.story.reached.epoch:,}" for run in runs]),
        ("steps", [f"{run.story.reached.step:,}" for run in runs]),
        ("samples", [f"{run.story.reached.samples:,}" for run in runs]),
        *(
            [("tokens", [f"{run.story.reached.tokens:,}" for run in runs])]
            if any(run.story.reached.tokens for run in runs)
            else []
        ),
        ("time", [run.story.took or "-" for run in runs]),
        ("started", [shown_date(run.story.info.get("started") or "-") for run in runs]),
    ]


def _facts(columns: Sequence[Mapping[str, Any]], *, everything: bool) -> list[Cells]:
    names = list(dict.fromkeys(name for column in columns for name in column)) if everything else differing(columns)
    return [(name, [text_of(column.get(name)) for column in columns]) for name in names]


def _environment(run: RunFolder) -> dict[str, Any]:
    info = run.story.info
    facts = {name: info.get(name) for name in ("device", "git_commit", "command")}
    versions = info.get("versions")
    command = info.get("command")
    return {
        **facts,
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        **(versions if isinstance(versions, Mapping) else {}),
    }


def _metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of all metrics, those that a callback watched first."""
    watched = [name for run in runs for name in run.watched]
    known = {name for run in runs for name in run.story.series}
    return list(dict.fromkeys([name for name in watched if name in known] + [n for run in runs for n in run.story.series]))


def _values(runs: Sequence[RunFolder], metrics: Sequence[str]) -> list[Cells]:
    rows = []
    for name in metrics:
        bests = [best_of(run.story, name) for run in runs]
        if any(bests):
            values = [None if best is None else best.value for best in bests]
            shown = ["-" if best is None else f"{precise(best.value)} (step {best.step:,})" for best in bests]
            rows.append((f"{name}, best", [*shown, *_difference(values)]))
        values = [last_of(run.story.series.get(name)) for run in runs]
        rows.append((f"{name}, last", [*("-" if value is None else precise(value) for value in values), *_difference(values)]))
    return rows


def _difference(values: Sequence[float | None]) -> list[str]:
    """Return the second value minus the first with its sign; nothing for more than two runs."""
    if len(values) != 2:
        return []
    first, second = values
    if first is None or second is None or not math.isfinite(second - first):
        return ["-"]
    return [("+" if second > first else "") + precise(second - first)]


def _curves(runs: Sequence[RunFolder], metrics: Sequence[str]) -> None:
    most = width() or 10_000
    for name in metrics:
        rows = []
        for run in runs:
            series = run.story.series.get(name)
            if series is not None and len(series) > 1:
                finite = [value for value in series.values if math.isfinite(value)]
                ends = f"{precise(min(finite))} to {precise(max(finite))}" if finite else "no finite value"
                room = max(4, min(_CURVE, most // 3))
                rows.append([f"  {cut_at_start(clean(run.story.name), max(8, most // 4))}", curve(series.values, room), ends])
                marks = _marks(series, [act.when.step for act in run.story.acts if act.what == "steered"], room)
                rows += [["  acts", marks, ""]] if marks else []
        if rows:
            say()
            say(cut(f"curve of {clean(name)}", most))
            _print_curves(rows)


def _print_curves(rows: Sequence[Sequence[str]]) -> None:
    label, drawn = (max(columns_of(row[i]) for row in rows) for i in (0, 1))
    for name, line, ends in rows:  # spaces of a curve are gaps, so they stay
        text = f"{name}{' ' * (label - columns_of(name))}  {line:{drawn}}  {ends}"
        say(cut(text if ends else text.rstrip(), width() or 10_000))


def _marks(series: Series, steps: Sequence[int], room: int) -> str:
    """Return a line with a mark below a curve where the run was steered; empty if it was not, in this range."""
    parts = min(room, len(series))
    columns = {bisect_left(series.steps, step) * parts // len(series) for step in steps}
    return "".join("^" if column in columns else " " for column in range(parts)).rstrip()


def _acts(runs: Sequence[RunFolder]) -> None:
    """Print the acts of all runs in the order of their steps; nothing if no run was steered."""
    acts = sorted(((act.when.step, run, act) for run in runs for act in run.story.acts), key=lambda row: row[0])
    if not acts:
        return
    say()
    rows = [["acts", "step", "act", "author", "reason", "result"]]
    for step, run, act in acts:
        done = str(act.data.get("result")) if act.what == "steered" else f"refused: {act.why.partition(': ')[2]}"
        texts = [str(act.data.get(name, "")) for name in ("author", "reason")]
        cells = [cut(clean(text), _LONGEST) for text in (*texts, done)]
        rows.append([run.story.name, f"{step:,}", act_text(act), *cells])
    print_rows(rows, right={1}, fit=True)


def _counts(runs: Sequence[RunFolder]) -> list[Cells]:
    counts = [Counter(decision.what for decision in run.story.decisions) for run in runs]
    names = dict.fromkeys(name for count in counts for name in count)
    return [(name, [f"{count[name]:,}" for count in counts]) for name in names]


def _fingerprints(runs: Sequence[RunFolder]) -> None:
    """Say where each run parts from the first one, if one of them has fingerprints."""
    found = _partings(runs)
    if all(not rows for rows, _ in found):
        return
    say()
    for run, (rows, parted) in zip(runs[1:], found[1:], strict=True):
        without = [folder.story.name for folder, (own, _) in ((runs[0], found[0]), (run, (rows, parted))) if not own]
        told = f"{clean(', '.join(without))} has none" if parted is None else str(parted)
        say(f"fingerprints{f' of {clean(run.story.name)}' if len(runs) > 2 else ''}: {told}")


def _partings(runs: Sequence[RunFolder]) -> list[tuple[Mapping[int, Row], FirstDifference | None]]:
    """Return the fingerprints of each run, and where it parts from the first run."""
    read: list[Mapping[int, Row]] = []
    for run in runs:
        broken: list[int] = []
        read.append(read_fingerprints(run.path / FILE, broken=broken))
        if broken:
            complain(f"{run.path / FILE}: {counted(len(broken), 'line')} cannot be read, the first is line {broken[0]}")
    return [(rows, first_difference(read[0], rows)) for rows in read]


def _data(runs: Sequence[RunFolder], metrics: Sequence[str], *, everything: bool) -> dict[str, Any]:
    settings, facts = [run.settings for run in runs], [_environment(run) for run in runs]
    names = {
        kind: list(dict.fromkeys(name for column in columns for name in column)) if everything else differing(columns)
        for kind, columns in (("arguments", settings), ("environment", facts))
    }
    found = []
    partings = [parted for _, parted in _partings(runs)]
    for run, given, fact, parted in zip(runs, settings, facts, partings, strict=True):
        story = run.story
        bests = {name: best for name in metrics if (best := best_of(story, name))}
        found.append(
            {
                "path": str(run.path),
                "name": story.name,
                "state": run.state,
                "ending": run.ending,
                **asdict(story.reached),
                "duration_s": story.duration_s,
                "arguments": {name: given.get(name) for name in names["arguments"]},
                "environment": {name: fact.get(name) for name in names["environment"]},
                "best": {name: {"value": best.value, "step": best.step, "mode": best.mode} for name, best in bests.items()},
                "last": {name: last_of(story.series[name]) for name in metrics if name in story.series},
                "curves": {name: list(story.series[name].points) for name in metrics if name in story.series},
                "acts": [act.to_dict() for act in story.acts],
                "decisions": Counter(decision.what for decision in story.decisions),
                "fingerprints": None if parted is None else {**asdict(parted), "comparable": parted.comparable},
                "problems": story.problems,
            }
        )
    return {"differ": names, "runs": found}

"""``cadenza runs``: a table of the runs below a folder."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cadenza.commands.output import add_json, clean, complain, cut, cut_at_start, fitting, print_json, print_rows, say, width
from cadenza.errors import CadenzaError, nearest
from cadenza.report.best import best_checkpoints
from cadenza.report.commands.directories import RunFolder, found, read, values_of
from cadenza.report.evaluations import evaluation_results
from cadenza.report.settings import differing, text_of
from cadenza.status.formats import counted, parsed_date, precise, shown_date

_FIXED = ("run", "state", "steps", "time", "started")
LOSS = "train/loss"
_LONGEST = 28  # columns of an argument in the table; --json has all of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Print a table of the runs below a folder: state, the best value of each metric that a callback watched (without one, "
        "the last results of the evaluations), the trainer's arguments that differ, steps, time. A terminal that is too narrow "
        "shows fewer columns; a pipe and --json get all."
    )
    parser.epilog = (
        "examples:\n  cadenza runs\n  cadenza runs runs/sweep --sort eval/acc\n"
        "  cadenza runs runs --metric train/loss --state running\n  cadenza runs runs --json | jq '.[].best'"
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="where to look; the current folder if left out")
    parser.add_argument(
        "--sort", metavar="COLUMN", help="a column of the table; metrics come with the best first. Without it: by start"
    )
    parser.add_argument("--reverse", action="store_true", help="turn the order around")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help="show this metric, too; may be repeated")
    parser.add_argument(
        "--state", metavar="STATE", help="only runs in this state, such as running, killed, finished, stopped, failed"
    )
    add_json(parser)
    parser.set_defaults(command=show)


def show(arguments: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        DirectoryError: A folder does not exist.
        CadenzaError: The column to sort by does not exist.
    """
    folders = arguments.folders or [Path()]
    runs = []
    for path in found(folders):
        try:
            runs.append(read(path, names=[*arguments.metric, LOSS]))
        except (CadenzaError, OSError) as error:
            complain(f"left out: {error}")
    runs = [run for run in runs if arguments.state in (None, run.state)]
    metrics = list(dict.fromkeys([*arguments.metric, *_shown(runs)]))
    known = [run.settings for run in runs if run.settings]  # a run.json that cannot be read has no arguments that differ
    differ = differing(known) if known else []
    _sort(runs, arguments.sort, metrics, differ, folders, reverse=arguments.reverse)
    if arguments.json:
        return print_json([_data(run, metrics) for run in runs])
    for run in runs:
        for problem in run.story.problems:
            complain(f"{run.path}: {problem}")
    if not runs:
        in_state = f" that are {arguments.state!r}" if arguments.state else ""
        return say(f"no runs{in_state} in {', '.join(map(str, folders))}")
    return _print(runs, metrics, differ, folders)


def _shown(runs: Sequence[RunFolder]) -> list[str]:
    """Return the metrics that callbacks watched; without any the results of evaluations, and without these the loss."""
    watched = [name for run in runs for name in run.watched]
    results = watched or [name for run in runs for name in evaluation_results(run.story).names]
    return results or [LOSS for run in runs if LOSS in run.story.series]


def _print(runs: Sequence[RunFolder], metrics: Sequence[str], differ: Sequence[str], folders: Sequence[Path]) -> None:
    names = [_name(run, folders) for run in runs]
    most = width()
    if most is not None:  # the name is in each row, whatever the width
        names = [cut_at_start(clean(name), max(12, most // 3)) for name in names]
    # The values and arguments are what a reader compares: narrow terminals leave out the times first.
    head = ["run", "state", *metrics, *differ, "steps", "time", "started"]
    rows = [head]
    for name, run in zip(names, runs, strict=True):
        values = [_value(run, metric) for metric in metrics]
        given = [cut(text_of(run.settings.get(name)), _LONGEST) for name in differ]
        rows.append([name, run.state, *values, *given, f"{run.story.reached.step:,}", run.story.took or "-", _started(run)])
    kept = fitting(rows, 2)
    numbers = {*range(2, 2 + len(metrics)), len(head) - 3}
    right = {at for at, column in enumerate(kept) if column in numbers}
    print_rows([[row[i] for i in kept] for row in rows], right=right, fit=True)
    hidden = [head[i] for i in range(len(head)) if i not in kept]
    if hidden:
        say(cut(f"{counted(len(runs), 'run')}; not shown: {', '.join(hidden)}", most or 10_000))


def _sort(
    runs: list[RunFolder],
    column: str | None,
    metrics: Sequence[str],
    differ: Sequence[str],
    folders: Sequence[Path],
    *,
    reverse: bool,
) -> None:
    known = [*_FIXED, *metrics, *differ, *(name for run in runs for name in run.settings)]
    if column is not None and runs and column not in known:
        columns = ", ".join(dict.fromkeys([*_FIXED, *metrics, *differ]))
        raise CadenzaError(f"--sort {column!r} is no column of the table.{nearest(column, known)} There are: {columns}")

    def key(run: RunFolder) -> tuple[Any, ...]:
        reached = run.story.reached
        fixed = {"run": _name(run, folders), "state": run.state, "steps": reached.step, "time": run.story.duration_s}
        value = fixed.get(column or "", run.settings.get(column or ""))
        if column is not None and column in metrics:
            best, last = values_of(run, column)
            value = last if best is None else best
            higher = any(mode == "max" for name, mode, _ in run.story.watched if name == column)
            value = -value if value is not None and higher else value
        if column in (None, "started"):
            started = parsed_date(run.story.info.get("started"))
            value = None if started is None else started.timestamp()
        if value is None or value != value:  # NaN
            return (2, 0.0, "")
        return (0, value, "") if isinstance(value, int | float) else (1, 0.0, str(value))

    runs.sort(key=key, reverse=reverse)


def _name(run: RunFolder, folders: Sequence[Path]) -> str:
    """Return the path below the folder, or the name of a folder that is a run itself; with several folders, the path."""
    if len(folders) > 1:
        return str(run.path)
    inner = os.path.relpath(run.path, folders[0])
    return run.path.resolve().name if inner == "." else inner


def _value(run: RunFolder, metric: str) -> str:
    best, last = values_of(run, metric)
    value = last if best is None else best
    return "-" if value is None else precise(value) + ("" if best is not None or math.isnan(value) else " last")


def _started(run: RunFolder) -> str:
    return shown_date(run.story.info.get("started") or "-")[:16]


def _data(run: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    values = {name: values_of(run, name) for name in metrics}
    story = run.story
    return {
        "path": str(run.path),
        "id": story.info.get("id"),
        "state": run.state,
        "ending": run.ending,
        "step": story.reached.step,
        "epoch": story.reached.epoch,
        "samples": story.reached.samples,
        "tokens": story.reached.tokens,
        "started": story.info.get("started"),
        "ended": story.info.get("ended"),
        "duration_s": story.duration_s,
        "best": {name: best for name, (best, _) in values.items() if best is not None},
        "kept": best_checkpoints(story),
        "last": {name: last for name, (_, last) in values.items() if last is not None},
        "arguments": run.settings,
        "problems": story.problems,
    }

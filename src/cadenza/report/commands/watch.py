"""``cadenza watch``: follow a run from its directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from cadenza.commands.output import add_json, clean, columns_of, curve, cut, print_json, say, width
from cadenza.errors import CadenzaError
from cadenza.records.branch_files import MEDIA, media_in
from cadenza.records.record import Record
from cadenza.report.best import best_of
from cadenza.report.commands.directories import SUCCESS, last_of
from cadenza.report.commands.following import Following
from cadenza.status.formats import amount, clock, counted, number, precise
from cadenza.status.progress import Counters

INTERRUPTED = 130
_EARLIER = 10  # records of the past that plain lines begin with
_DECISIONS = 4
_KINDS = {".png": "image", ".wav": "sound", ".json": "histogram", ".txt": "text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Follow a run in the terminal until it ends: progress, throughput, newest values with their curves, decisions, "
        "checkpoints. The command only reads the run's directory. Without a terminal, or without the package rich, it prints "
        "one line for each record. Exit code 0: the run finished or stopped; 1: it failed, was killed, interrupted or "
        "preempted; 130: Ctrl-C ended the command, not the run."
    )
    parser.epilog = (
        "examples:\n  cadenza watch runs/first\n  cadenza watch runs/first --once\n"
        "  cadenza watch runs/first && cadenza report runs/first\n  cadenza watch runs/first --json | jq .values"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory; the run may be starting, going on or over")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look; 1 if left out")
    parser.add_argument(
        "--once", action="store_true", help="print the present state and end; exit code 0 also if it is running"
    )
    add_json(parser, "print one line of JSON for each update")
    parser.set_defaults(command=watch)


def watch(arguments: argparse.Namespace) -> int:
    """Show the run until it ends; return the exit code.

    Raises:
        DirectoryError: The directory holds no run.
        CadenzaError: The interval is wrong.
    """
    if not arguments.every >= 0.05:
        raise CadenzaError(f"--every must be at least 0.05 seconds; got {arguments.every}")
    run = Following(arguments.run)
    try:
        if arguments.once:
            records = run.update()
            print_json(run.data(records), indent=None) if arguments.json else _print_all(run)
        elif arguments.json:
            _follow(run, arguments.every, lambda records: print_json(run.data(records), indent=None))
        elif sys.stdout.isatty() and find_spec("rich") is not None and (screen := _screen()) is not None:
            with screen(run) as refresh:
                _follow(run, arguments.every, lambda _: refresh(), always=True)
            _print_all(run)
        else:
            _follow(run, arguments.every, partial(_print_records, run.path), most=_EARLIER)
            say(clean(f"{run.path}: {run.ending}"))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if run.state in (*SUCCESS, "starting", "paused") else 1


def _follow(
    run: Following,
    every_s: float,
    show: Callable[[list[Record]], object],
    *,
    most: int | None = None,
    always: bool = False,
) -> None:
    """Update a run until it is over. Show each update that brings something new, or each one.

    Args:
        run: The run.
        every_s: The seconds between two updates.
        show: Receives the new records.
        most: The most records of the first update; None: all.
        always: Show updates without news, too: a clock goes on.
    """
    records, before = list(run.update(most)), None
    while True:
        now = (run.state, run.story.reached, len(run.story.decisions), tuple(run.checkpoints))
        if records or always or now != before:
            show(records)
            sys.stdout.flush()
        if run.is_over:
            return
        time.sleep(every_s)
        before, records = now, list(run.update())


def _print_records(folder: Path, records: list[Record]) -> None:
    media = Counter((step, _KINDS.get(path.suffix, "file")) for _, step, path in media_in(folder / MEDIA)) if records else {}
    for record in records:
        values = "  ".join(f"{clean(name)} {number(value)}" for name, value in record.values.items())
        values = values or ", ".join(counted(count, kind) for (step, kind), count in media.items() if step == record.step)
        epoch = "" if _has_no_epochs(record.at) else f"epoch {record.at.epoch}, "
        say(f"{epoch}step {record.step}: {values}")


def _print_all(run: Following) -> None:
    for line in lines(run, width() or 100, 10_000):
        say(line)


def _screen() -> Callable[[Following], AbstractContextManager[Callable[[], None]]] | None:
    """Return the live view; None on a terminal that cannot move its cursor."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_dumb_terminal or not console.is_terminal:
        return None

    @contextmanager
    def opened(run: Following) -> Iterator[Callable[[], None]]:
        from rich.live import Live
        from rich.text import Text

        def drawn() -> Text:
            title, *rest = lines(run, console.width, console.height)
            return Text.assemble((title, "bold"), "\n", "\n".join(rest), no_wrap=True, overflow="crop")

        with Live(get_renderable=drawn, console=console, screen=True, auto_refresh=False) as live:
            yield live.refresh

    return opened


# -- the view: lines of text that fit ---------------------------------------------------------------


def lines(run: Following, columns: int, rows: int) -> list[str]:
    """Return the view of a run as lines that fit into a terminal of so many columns and rows."""
    head = [_title(run), *_progress(run, columns)]
    tail = _news(run)
    room = rows - len(head) - len(tail) - 3  # for the head of the table, its note and the empty line
    table = _table(run, columns, max(room, 1))
    return [cut(line, columns) for line in [*head, *([""] if table else []), *table, *([""] if tail else []), *tail]][:rows]


def _title(run: Following) -> str:
    at = run.story.reached
    epochs = f"epoch {at.epoch:,}" + (f" of {run.epochs:,}, " if run.epochs else ", ")
    steps = f"step {at.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    return clean(f"{run.story.name}: {run.state}, {'' if _has_no_epochs(at) else epochs}{steps}")


def _has_no_epochs(at: Counters) -> bool:
    """Return whether the steps are those of a loop of ``cadenza.attach``: no loader gave them a batch."""
    return at.step > 0 and at.batch == 0


def _progress(run: Following, columns: int) -> list[str]:
    rates, left, elapsed = run.rates(), run.remaining_s(), run.elapsed_s()
    parts = [f"{clock(elapsed)} elapsed"] if elapsed is not None else []
    parts += [f"{clock(left)} left"] if left is not None else []
    if rates and not run.is_over:
        units = zip(rates, ("steps", "samples", "tokens"), strict=True)
        parts += [f"{amount(rate)} {unit}/s" for rate, unit in units if rate or unit == "steps"]
    told = [", ".join(parts)] if parts else []
    if run.is_over:
        told.append(clean(run.ending))
    fraction = run.fraction
    if fraction is None:
        return told
    wide = min(40, columns - 6)
    done = round(fraction * wide)
    return [f"[{'#' * done}{'.' * (wide - done)}] {fraction * 100:.0f}%", *told]


def _table(run: Following, columns: int, most: int) -> list[str]:
    """Return the newest values: name, last, best, and a curve where it fits. Metrics that a callback watched come first."""
    story = run.story
    watched = dict.fromkeys(name for name, _, _ in story.watched if name in story.series)
    names = [*watched, *(name for name in story.series if name not in watched)]
    if not names:
        return []
    shown = names if len(names) <= most else names[: max(most - 1, 1)]
    rows = [("", "last", "best")]
    for name in shown:
        best, last = best_of(story, name), last_of(story.series[name])
        label = cut(clean(name), max(10, columns // 2))
        rows.append((label, "-" if last is None else precise(last), "" if best is None else precise(best.value)))
    first, second, third = (max(columns_of(row[i]) for row in rows) for i in range(3))
    room = min(40, columns - first - second - third - 6)
    table = []
    for i, (name, last_value, best_value) in enumerate(rows):
        line = f"{name}{' ' * (first - columns_of(name))}  {last_value:>{second}}  {best_value:>{third}}"
        if i and room >= 8:
            line += f"  {curve(story.series[shown[i - 1]].values, room)}"
        table.append(line.rstrip())
    hidden = len(names) - len(shown)
    return [*table, f"and {counted(hidden, 'more value')}"] if hidden else table


def _news(run: Following) -> list[str]:
    told = [
        f"step {decision.when.step:,}: {decision.what} by {decision.who}: {decision.why}"
        for decision in run.story.decisions[-_DECISIONS:]
    ]
    if run.checkpoints:
        told.append(f"{counted(len(run.checkpoints), 'checkpoint')}, the newest is {run.checkpoints[-1]}")
    return [clean(line) for line in told]

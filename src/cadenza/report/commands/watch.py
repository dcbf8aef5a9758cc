"""``cadenza watch``: follow runs from their directories."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from cadenza.report.commands.following import FollowedRuns, Following
from cadenza.status import stragglers
from cadenza.status.decisions import Decision
from cadenza.status.formats import amount, clock, counted, number, precise
from cadenza.status.progress import Counters

INTERRUPTED = 130
_EARLIER = 10  # records of the past that plain lines begin with
_DECISIONS = 4
_NOTABLE = 3
_MOST_NEWS = 6
_LEAST_CURVE = 8  # columns
LOSS = "train/loss"
_KINDS = {".png": "image", ".wav": "sound", ".json": "histogram", ".txt": "text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Follow runs in the terminal until they end. One run: progress, throughput, newest values with their curves, "
        "decisions, alerts, acts, checkpoints. Several, or a folder of them: a table with their newest alerts and acts below. "
        "The command only reads the directories. Without a terminal, or without the package rich, it prints one line for each "
        "record. Exit code 0: all runs finished or stopped; 1: one failed, was killed, interrupted or preempted; 130: Ctrl-C "
        "ended the command, not the runs."
    )
    parser.epilog = (
        "examples:\n  cadenza watch runs/first\n  cadenza watch runs\n  cadenza watch runs/first --once\n"
        "  cadenza watch runs/first && cadenza report runs/first\n  cadenza watch runs/first --json | jq .values"
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, or a folder of them; a run may start, go on or be over",
    )
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look; 1 if left out")
    parser.add_argument(
        "--once", action="store_true", help="print the present state and end; exit code 0 also if it is running"
    )
    parser.add_argument("--metric", metavar="NAME", help="the value in the table; if left out, one that a callback watches")
    add_json(parser, "print one line of JSON for each update of a run")
    parser.set_defaults(command=watch)


def watch(arguments: argparse.Namespace) -> int:
    """Show runs until all are over; return the exit code.

    Raises:
        DirectoryError: A directory holds no run.
        CadenzaError: The interval is wrong.
    """
    if not arguments.every >= 0.05:
        raise CadenzaError(f"--every must be at least 0.05 seconds; got {arguments.every}")
    runs = FollowedRuns(arguments.runs)
    try:
        if arguments.json:
            _follow(runs, arguments, lambda run, records: print_json(run.data(records), indent=None))
        elif arguments.once:
            _follow(runs, arguments, lambda run, records: None)
            _print_all(runs, arguments.metric)
        elif sys.stdout.isatty() and find_spec("rich") is not None and (screen := _screen()) is not None:
            with screen(lambda columns, rows: _view(runs, arguments.metric, columns, rows)) as refresh:
                _follow(runs, arguments, lambda run, records: None, refresh)
            _print_all(runs, arguments.metric)
        else:
            _follow(runs, arguments, partial(_print_records, several=runs.several), most=_EARLIER)
            for run in runs.present():
                say(clean(f"{run.path}: {run.ending}"))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if all(run.state in (*SUCCESS, "starting", "paused") for run in runs.present()) else 1


def _follow(
    runs: FollowedRuns,
    arguments: argparse.Namespace,
    show: Callable[[Following, list[Record]], object],
    refresh: Callable[[], object] = lambda: None,
    *,
    most: int | None = None,
) -> None:
    """Update runs until all are over, or once. Show each update of a run that brings something new.

    Args:
        runs: The runs.
        arguments: Those of the command.
        show: Receives a run and its new records.
        refresh: Called after each look, also without news: a clock goes on.
        most: The most records of the first update; None: all.
    """
    before: dict[Path, object] = {}
    while True:
        for run in runs.present():
            records = list(run.update(None if run.path in before else most))
            now = (run.state, run.story.reached, len(run.story.decisions), tuple(run.checkpoints))
            if records or now != before.get(run.path):
                show(run, records)
            before[run.path] = now
        refresh()
        sys.stdout.flush()
        if arguments.once or runs.is_over:
            return
        time.sleep(arguments.every)


def _print_records(run: Following, records: list[Record], *, several: bool) -> None:
    name = f"{clean(run.story.name)}: " if several else ""
    folder = run.path / MEDIA
    media = Counter((step, _KINDS.get(path.suffix, "file")) for _, step, path in media_in(folder)) if records else {}
    for record in records:
        values = "  ".join(f"{clean(name)} {number(value)}" for name, value in record.values.items())
        values = values or ", ".join(counted(count, kind) for (step, kind), count in media.items() if step == record.step)
        epoch = "" if _has_no_epochs(record.at) else f"epoch {record.at.epoch}, "
        say(f"{name}{epoch}step {record.step}: {values}")


def _print_all(runs: FollowedRuns, metric: str | None) -> None:
    for line in _view(runs, metric, width() or 100, 10_000):
        say(line)


def _view(runs: FollowedRuns, metric: str | None, columns: int, rows: int) -> list[str]:
    present = runs.present()
    return table_of(present, metric, columns, rows) if runs.several else lines(present[0], columns, rows)


View = Callable[[int, int], list[str]]
"""Returns the lines for a terminal of so many columns and rows."""


def _screen() -> Callable[[View], AbstractContextManager[Callable[[], None]]] | None:
    """Return the live view; None on a terminal that cannot move its cursor."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_dumb_terminal or not console.is_terminal:
        return None

    @contextmanager
    def opened(view: View) -> Iterator[Callable[[], None]]:
        from rich.live import Live
        from rich.text import Text

        def drawn() -> Text:
            title, *rest = view(console.width, console.height)
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
    decisions = run.story.decisions
    newest = decisions[-_DECISIONS:]
    earlier = [one for one in decisions[:-_DECISIONS] if _is_notable(one)][-_NOTABLE:]  # others came later, and hide no alert
    told = [_sentence(decision) for decision in [*earlier, *newest]]
    told += [] if run.story.ranks is None else stragglers.sentences(run.story.ranks)
    if run.checkpoints:
        told.append(f"{counted(len(run.checkpoints), 'checkpoint')}, the newest is {run.checkpoints[-1]}")
    return [clean(line) for line in told]


def _is_notable(decision: Decision) -> bool:
    """Return whether a decision is an alert, an act or its refusal."""
    return decision.what in ("alerted", "steered", "not steered")


def _sentence(decision: Decision) -> str:
    return f"step {decision.when.step:,}: {decision.what} by {decision.who}: {decision.why}"


# -- the view of several runs -----------------------------------------------------------------------

_HEAD = ("run", "state", "step", "done", "left", "alerts", "acts")


def table_of(runs: Sequence[Following], metric: str | None, columns: int, rows: int) -> list[str]:
    """Return the view of several runs as lines that fit: a row for each, and their newest alerts and acts.

    Args:
        runs: The runs, in the order of the rows.
        metric: The value in the last columns; None: the first one that a callback watches, otherwise the loss.
        columns: The columns of the terminal.
        rows: The rows of the terminal.
    """
    states = Counter(run.state for run in runs)
    title = f"{counted(len(runs), 'run')}: {', '.join(f'{count} {state}' for state, count in states.items())}"
    news = _news_of(runs)[: min(_MOST_NEWS, max(rows - len(runs) - 5, 2 if rows >= 10 else 0))]
    room = max(1, rows - 3 - len(news) - bool(news))
    shown = runs if len(runs) <= room else runs[: room - 1]
    chosen = [metric or _watched_by(run) for run in shown]
    value = metric or (chosen[0] if len({*chosen}) == 1 else "value")
    cells = [(*_HEAD, value), *(_row(run, name, several=value == "value") for run, name in zip(shown, chosen, strict=True))]
    widths = [min(max(map(columns_of, column)), columns // 3) for column in zip(*cells, strict=True)]
    kept = _fitting(widths, columns)
    table = ["  ".join(_cell(row[i], widths[i], i) for i in kept) for row in cells]
    left = columns - max(map(columns_of, table)) - 2
    for i, (run, name) in enumerate(zip(shown, chosen, strict=True), 1):
        if left >= _LEAST_CURVE and name in run.story.series:
            table[i] += f"  {curve(run.story.series[name].values, min(30, left))}"
    hidden = [f"and {counted(len(runs) - len(shown), 'more run')}"] if len(shown) < len(runs) else []
    whole = [title, "", *table, *hidden, *([""] if news else []), *news]
    return [cut(line.rstrip(), columns) for line in whole][:rows]


def _watched_by(run: Following) -> str:
    names = [name for name, _, _ in run.story.watched if name in run.story.series]
    return names[0] if names else LOSS


def _row(run: Following, name: str, *, several: bool) -> tuple[str, ...]:
    story = run.story
    left = run.remaining_s()
    done = "" if run.fraction is None else f"{run.fraction * 100:.0f}%"
    step = f"{story.reached.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    last = last_of(story.series.get(name))
    value = "-" if last is None else f"{clean(name)} {precise(last)}" if several else precise(last)
    counts = [sum(decision.what == what for decision in story.decisions) for what in ("alerted", "steered")]
    shown = [str(count) if count else "" for count in counts]
    return clean(story.name), run.state, step, done, "" if left is None else clock(left), *shown, value


def _fitting(widths: Sequence[int], columns: int) -> list[int]:
    """Return the indices of the columns that fit. Those that go first are the least important ones."""
    kept = [*range(len(widths))]
    for index in (6, 5, 4, 2, 3, 7):
        if sum(widths[i] + 2 for i in kept) - 2 > columns:
            kept.remove(index)
    return kept


def _cell(text: str, wide: int, index: int) -> str:
    text = cut(text, wide)
    space = " " * (wide - columns_of(text))
    return text + space if index < 2 else space + text


def _news_of(runs: Sequence[Following]) -> list[str]:
    """Return the newest alert and the newest act of each run. Decisions have no time, so they are in the order of the runs."""
    told = []
    for run in runs:
        newest = {decision.what == "alerted": decision for decision in run.story.decisions if _is_notable(decision)}
        told += [clean(f"{run.story.name}: {_sentence(decision)}") for decision in newest.values()]
    return told

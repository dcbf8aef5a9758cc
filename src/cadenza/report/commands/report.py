"""``cadenza report``: write runs as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from cadenza import report
from cadenza.commands.output import say
from cadenza.errors import DirectoryError
from cadenza.files.disk import replacing
from cadenza.status.formats import counted, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Write runs as one HTML page that needs no network: curves, evaluations, checkpoints, times, decisions, environment."
    )
    parser.epilog = "examples:\n  cadenza report runs/first\n  cadenza report runs/* --output all.html"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory; several are laid side by side")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="report.html if left out")
    parser.set_defaults(command=write)


def write(arguments: argparse.Namespace) -> None:
    """Write the page and print its path. An older page is replaced as a whole: on a full disk it stays.

    Raises:
        DirectoryError: A path is not a run directory, or the page cannot be written.
    """
    stories = [report.story_at(path) for path in arguments.runs]
    report.name_distinctly(stories, arguments.runs)
    text = report.page(stories)
    try:
        _write(arguments.output.resolve(), text)
    except OSError as error:
        raise DirectoryError(
            f"the report cannot be written to {str(arguments.output)!r}: {error.strerror or error}. Give another --output."
        ) from error
    length = size(len(text.encode()))
    say(f"{arguments.output}: {counted(len(stories), 'run')}, {length}; open it in a browser")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # such as a device
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")

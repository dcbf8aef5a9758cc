"""``cadenza report``: write runs as one HTML page."""

from __future__ import annotations

import argparse
import sys

from cadenza import report
from cadenza.errors import DirectoryError
from cadenza.records.formats import counted, size


def write(arguments: argparse.Namespace) -> None:
    """Write the page and print its path. An older page is replaced.

    Raises:
        DirectoryError: A path is not a run directory, or the page cannot be written.
    """
    stories = [report.story_at(path) for path in arguments.runs]
    report.name_distinctly(stories, arguments.runs)
    text = report.page(stories)
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DirectoryError(
            f"the report cannot be written to {str(arguments.output)!r}: {error.strerror or error}. Give another --output."
        ) from error
    length = size(len(text.encode()))
    sys.stdout.write(f"{arguments.output}: {counted(len(stories), 'run')}, {length}; open it in a browser\n")

"""A run directory that was moved or deleted while its run goes on."""

from __future__ import annotations

import json

from cadenza.engine.session import Session
from cadenza.records.history import write_again
from cadenza.status.formats import counted
from cadenza.status.masking import masked

NOTE = "MOVED.txt"
"""The file in the new directory that says what happened."""


def make_again(session: Session) -> None:
    """Make the directory of a run again at its path, with the rows and decisions that are in memory. Say it once.

    If that is not possible, nothing is said here: logs and checkpoints report that they cannot be written, and wait.
    """
    files = session.files
    assert files is not None, "the directory of the main process"
    try:
        files.make_again()
    except OSError:
        return
    rows = write_again(files.path / "metrics.jsonl", session.metrics.history)
    decisions = files.path / "decisions.jsonl"
    there = set(decisions.read_text(encoding="utf-8").splitlines()) if decisions.exists() else set()
    for decision in session.decisions:
        if json.dumps(masked(decision.to_dict())) not in there:
            files.add_decision(decision.to_dict())
    text = (
        f"the directory {str(files.path)!r} was moved or deleted while its run was at {session.progress.now()}. It was made "
        f"again, and the run goes on in it. {counted(rows, 'row')} of metrics.jsonl and the decisions of this process were "
        "written from memory. Earlier checkpoints, console.log, and files that sinks hold open are in the moved directory, if "
        "there is one"
    )
    (files.path / NOTE).write_text(f"{text[0].upper()}{text[1:]}.\n", encoding="utf-8")
    session.warn(text)

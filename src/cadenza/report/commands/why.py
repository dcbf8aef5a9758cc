"""``cadenza why``: the last decision of a kind, or how the run ended."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cadenza.commands.output import add_json, clean, complain, print_json, say
from cadenza.report.commands.directories import RunFolder, read
from cadenza.status.decisions import Decision, why

_ENDINGS = ("ended", "stopped", "finished", "left", "rolled back", "interrupted", "preempted", "failed", "killed", "running")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Say why a run took a decision, from its decisions.jsonl: as run.why(...) in Python. "
        "Exit code 0: there is an answer; 1: the run decided nothing of this kind."
    )
    parser.epilog = (
        "examples:\n  cadenza why runs/first\n  cadenza why runs/first stopped\n  cadenza why runs/first saved --all\n"
        "  cadenza why runs/first EarlyStopping\n  cadenza why runs/first epoch ended"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="a decision, such as stopped, saved, evaluated, disabled or epoch ended; or a callback. Without it: how it ended",
    )
    parser.add_argument("--all", action="store_true", help="print all decisions of this kind, oldest first")
    add_json(parser)
    parser.set_defaults(command=answer)


def answer(arguments: argparse.Namespace) -> int:
    """Print the answer; return 0, or 1 if there is none.

    Raises:
        DirectoryError: The directory holds no run.
    """
    run, what = read(arguments.run, names=()), " ".join(arguments.what) or "ended"
    found = [decision for decision in run.story.decisions if what in (decision.what, decision.who)]
    if what == "ended":
        found = [decision for decision in run.story.decisions if decision.what == run.state]
    about_end = what in ("ended", run.state) or (what == "stopped" and run.state not in ("running", "unknown"))
    sentences = _sentences(run, what, found[-1:] if not arguments.all else found, about_end=about_end)
    if arguments.json:
        outcome = run.story.info.get("outcome")
        decisions = [decision.to_dict() for decision in found]
        print_json(
            {
                "run": str(run.path), "state": run.state, "outcome": outcome, "what": what,
                "answer": sentences, "decisions": decisions,
            }
        )  # fmt: skip
    else:
        for sentence in sentences:
            say(clean(sentence))
        for problem in run.story.problems:
            complain(problem)
    return 0 if found or about_end else 1


def _sentences(run: RunFolder, what: str, found: Sequence[Decision], *, about_end: bool) -> list[str]:
    if found:
        return [str(decision) for decision in found]
    if about_end:
        return [run.ending if what != "stopped" else f"the run was not stopped by a request. It is {run.ending}"]
    known = [] if what in _ENDINGS else [why(what, run.story.decisions)]
    return [*known, f"the run was not {what}. It is {run.ending}" if what in _ENDINGS else f"the run is {run.ending}"]

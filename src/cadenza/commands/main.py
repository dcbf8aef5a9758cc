"""The command ``cadenza``: each of its commands is a parser and a function that does it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cadenza.commands import checkpoint as checkpoint_commands
from cadenza.commands import replay as replay_command
from cadenza.errors import CadenzaError
from cadenza.version import __version__

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        argv: The arguments without the program's name; None takes those of this process.

    Raises:
        SystemExit: The arguments cannot be read (code 2), or only ask for help or the version (code 0).
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except CadenzaError as error:  # these say what to do; the way through our code would only hide that
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    return 0


def _fail(reason: str, code: int) -> int:
    sys.stderr.write(f"cadenza: {reason}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cadenza", description="Train PyTorch models.")
    parser.add_argument("--version", action="version", version=f"cadenza {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="train a small network on handwritten digits, in seconds", description=_DEMO)
    demo.add_argument("--directory", type=Path, metavar="DIR", help="where to write; runs/demo-<time> if left out")
    demo.set_defaults(command=_demo)
    _add_checkpoint(commands.add_parser("checkpoint", help="look at, verify, export and delete checkpoints"))
    _add_report(commands.add_parser("report", help="write runs as one HTML page", description=_REPORT))
    _add_replay(commands.add_parser("replay", help="take a run's records to a tracker, or to a table", description=_REPLAY))
    return parser


def _add_checkpoint(checkpoint: argparse.ArgumentParser) -> None:
    commands = checkpoint.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        ("list", checkpoint_commands.show_list, "one line a checkpoint, oldest first"),
        (
            "verify",
            checkpoint_commands.verify_all,
            "read every file, and compare it with its checksum; exit code 1 if one differs",
        ),
        ("show", checkpoint_commands.show_newest, "what a checkpoint holds"),
        ("export", checkpoint_commands.export, "write the model's weights to one safetensors file"),
        ("prune", checkpoint_commands.prune, "delete all but the newest"),
    ):
        parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("path", metavar="PATH", help="a run directory, a folder of checkpoints, or an fsspec URL")
        parser.set_defaults(command=command)
        if name == "prune":
            parser.add_argument("--keep-last", type=int, default=1, metavar="N", help="how many to keep; 1 if left out")
        if name == "export":
            parser.add_argument("file", metavar="FILE", help="the file to write, such as weights.safetensors")
            parser.add_argument("--weights", metavar="NAME", help="model, or averaged ones such as ema; as load_weights")
        if name in ("show", "export", "prune"):
            parser.add_argument("--run", metavar="ID", help="if several runs save here: the id of one, or its beginning")
        if name in ("show", "export"):
            parser.add_argument("--name", help="which checkpoint; the newest that verifies if left out")


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory; several are laid side by side")
    report.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="report.html if left out")
    report.set_defaults(command=_report)


_REPORT = "Write runs as one HTML page that needs no network: curves, evaluations, checkpoints, times, decisions, environment."


def _report(arguments: argparse.Namespace) -> None:
    from cadenza.commands import report as report_command  # here, as the other commands do without

    report_command.write(arguments)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("run", type=Path, metavar="RUN", help="a run directory; the run may be over, killed or going on")
    replay.add_argument("--to", required=True, choices=replay_command.TARGETS, help="where to take them")
    replay.add_argument(
        "--output", metavar="TARGET", help="a file, folder, tracking URI or, for trackio, project; inside of RUN if left out"
    )
    replay.add_argument("--follow", action="store_true", help="go on until the run has ended")
    replay.set_defaults(command=replay_command.replay)


_REPLAY = (
    "Take the records of a run, which it keeps in metrics.jsonl, to a tracker, or to a table. The run itself is not changed."
)

_DEMO = "Train a small network on the handwritten digits that come with scikit-learn. Nothing is downloaded."


def _demo(arguments: argparse.Namespace) -> None:
    from cadenza.commands.demo import demo

    demo(arguments.directory)

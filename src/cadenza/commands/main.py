"""The command ``cadenza``: a table of its commands. Each is a module with `add_arguments`, imported when it is used."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cadenza.commands.output import complain
from cadenza.errors import CadenzaError, nearest
from cadenza.lazy import imported
from cadenza.status.formats import printable
from cadenza.version import __version__

COMMANDS = {
    "demo": "train a small network on handwritten digits, in seconds",
    "plan": "show which callbacks a script's trainer calls, and when; nothing is trained",
    "compat": "say which hooks and attributes of a Hugging Face, Lightning or Keras callback work here",
    "runs": "list the runs below a folder, with their best values",
    "watch": "follow a run in the terminal",
    "ask": "ask a run for its status, values, decisions or problems, in a form for programs",
    "tell": "stop, pause, save or evaluate a run that goes on, or set its learning rate",
    "serve": "serve the report of runs as a local page that follows them",
    "mcp": "let agents ask runs by the Model Context Protocol",
    "step": "name the samples that each rank read in a step",
    "why": "say why a run stopped, or took another decision",
    "compare": "compare runs: arguments, values, curves, environment",
    "report": "write runs as one HTML page",
    "replay": "take a run's records to a tracker, or to a table",
    "checkpoint": "look at, verify, export and delete checkpoints",
    "capsule": "show what broke in a step, from its capsule",
    "completion": "print the completion script of a shell",
}
_WINGS = {"report": "runs watch why compare report replay", "steering": "ask tell serve mcp", "timetravel": "step capsule"}
_IN_WINGS = {"compat": "cadenza.compat.command"} | {
    name: f"cadenza.{wing}.commands.{name}" for wing, names in _WINGS.items() for name in names.split()
}
"""The modules of commands that are not in this package."""

FAILED = 1
INTERRUPTED = 130  # the exit code of a shell for a program ended by Ctrl-C
PIPE_CLOSED = 141  # the same for a program that wrote to a pipe without a reader
_CODES = (
    "exit codes: 0 success; 1 an error, or the answer is negative (see the help of the command); "
    "2 the arguments cannot be read; 130 Ctrl-C"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 after an error, 130 after Ctrl-C, 141 after a closed pipe.

    Args:
        argv: The arguments without the program's name; None takes those of this process.

    Raises:
        SystemExit: The arguments cannot be read (code 2), or only ask for help or the version (code 0).
    """
    given = [*(sys.argv[1:] if argv is None else argv)]
    try:
        try:
            return _run(given)
        finally:
            sys.stdout.flush()
    except CadenzaError as error:  # these messages say what to do; a traceback through Cadenza would hide that
        return _fail(str(error), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe, as in: cadenza runs | head
        # otherwise Python reports an error when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:  # such as a full disk behind stdout or an unreadable file
        return _fail(f"{type(error).__name__}: {error}", FAILED)


def parser(wanted: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser. Only the commands in `wanted` get their arguments; the help lists the others with one line each."""
    whole = Parser(prog="cadenza", description="Train PyTorch models.", epilog=_CODES)
    whole.add_argument("--version", action="version", version=f"cadenza {__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in wanted:
            module = _IN_WINGS.get(name, f"cadenza.commands.{name}")
            imported(module, needed_by=f"cadenza {name}").add_arguments(command)
            command.set_defaults(parser=command)
    return whole


class Parser(argparse.ArgumentParser):
    """A parser with uniform error messages that keeps the line breaks of examples in its help."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **arguments})

    def error(self, message: str) -> NoReturn:
        """Print an error and end the program with code 2."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        self.exit(2, f"cadenza: {printable(message)}.{hint} See: {self.prog} --help\n")


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in text.splitlines())


def _run(argv: list[str]) -> int:
    own, rest = argv, list[str]()
    if argv[:1] == ["plan"] and "--" in argv:  # the rest is for the script
        own, rest = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    whole = parser(own[:1])
    arguments, unknown = whole.parse_known_args(own)
    if unknown:
        getattr(arguments, "parser", whole).error(f"unrecognized arguments: {' '.join(unknown)}")
    if not hasattr(arguments, "command"):
        whole.print_help()
        return 0
    arguments.rest = rest
    return arguments.command(arguments) or 0


def _fail(reason: str, code: int) -> int:
    complain(reason)
    return code

"""Make the completion scripts of the command line with shtab: ``python docs/completions.py``. A test compares them."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

import cadenza.commands
from cadenza.commands.completion import SHELLS
from cadenza.commands.main import COMMANDS, parser

FOLDER = Path(cadenza.commands.__file__).parent / "completions"


def generated(shell: str) -> str:
    """Return the script of a shell for the present commands."""
    whole = parser([*COMMANDS])
    _complete_paths(whole)
    script = str(shtab.complete(whole, shell)).replace("-- $1  #", '-- "$1"  #')  # names with spaces, in bash
    return script.rstrip() + "\n"


_PATHS = {"RUN": "directory", "DIR": "directory", "PATH": "directory", "FILE": "file", "TARGET": "file"}


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are paths, by their names in the help."""
    kinds = {"directory": shtab.DIRECTORY, "file": shtab.FILE}
    for action in parser._actions:  # argparse has no public list of them, and shtab reads the same
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                _complete_paths(one)
        elif action.metavar in _PATHS:
            action.complete = kinds[_PATHS[str(action.metavar)]]  # type: ignore[attr-defined]  # what shtab looks for


def main() -> None:
    """Write the scripts."""
    FOLDER.mkdir(exist_ok=True)
    for shell in SHELLS:
        (FOLDER / f"cadenza.{shell}").write_text(generated(shell), encoding="utf-8")


if __name__ == "__main__":
    main()

"""``cadenza completion``: the completion script of a shell. ``python docs/completions.py`` generates them with shtab."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files

SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Print a script that completes commands, options and paths of cadenza in a shell."
    parser.epilog = (
        'examples:\n  bash, in ~/.bashrc:              eval "$(cadenza completion bash)"\n'
        '  zsh, in ~/.zshrc after compinit: eval "$(cadenza completion zsh)"'
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(command=show)


def show(arguments: argparse.Namespace) -> None:
    """Print the script."""
    script = files("cadenza.commands").joinpath("completions", f"cadenza.{arguments.shell}")
    sys.stdout.write(script.read_text(encoding="utf-8"))

"""``cadenza plan``: the plan of a trainer in a script or module. Nothing is trained or written."""

from __future__ import annotations

import argparse
from types import ModuleType

from cadenza.commands.importing import guarded, imported, nothing_on_stdout
from cadenza.commands.output import add_json, print_json, say
from cadenza.engine.dry_run import Calendar
from cadenza.engine.plan import Plan
from cadenza.errors import CadenzaError, nearest
from cadenza.status.reprs import signature_of
from cadenza.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Print the plan of a trainer: the moments of a run and the callbacks that each one calls, in order, with warnings "
        'about callbacks that never run. The script is imported: code below `if __name__ == "__main__":` does not run, '
        "nothing is trained or written. Exit code 1: there is no such trainer, or the script fails."
    )
    parser.epilog = (
        "examples:\n  cadenza plan train.py\n  cadenza plan train.py:trainer\n  cadenza plan train.py:build -- --lr 0.1\n"
        '  cadenza plan train.py --calendar "2 epochs"\n  cadenza plan train.py --calendar --resume\n'
        "  cadenza plan project.training:build_trainer --json"
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="script.py:NAME or package.module:NAME. NAME is a Trainer, or a function without arguments that returns one; "
        "it can be left out if there is one Trainer. Arguments after -- are the script's own",
    )
    parser.add_argument(
        "--calendar", nargs="?", const="", metavar="LENGTH", help='list when each callback is called, in all or in "2 epochs"'
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        default=False,
        metavar="WHICH",
        help="with --calendar: list the rest of a run that continues, at WHICH as in fit(resume=WHICH)",
    )
    parser.add_argument("--since", metavar="DIR", help="show the differences from the plan of the run in DIR")
    add_json(parser)
    parser.set_defaults(command=show)


def show(arguments: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        CadenzaError: There is no such script or trainer, or the script fails, or it trains when it is imported.
    """
    source, name = _parts(arguments.target)
    with nothing_on_stdout():
        plan = guarded("plan", source, arguments.rest, lambda: _shown_of(_trainer(imported(source), name, source), arguments))
    if arguments.json:
        print_json(plan.to_dict())
    else:
        say(str(plan))


def _shown_of(trainer: Trainer, arguments: argparse.Namespace) -> Plan | Calendar:
    if arguments.calendar is None:
        return trainer.plan(arguments.since)
    return trainer.calendar(arguments.calendar or None, resume=arguments.resume)


def _parts(target: str) -> tuple[str, str]:
    """Split into the script or module and the name in it, which may be empty."""
    source, colon, name = target.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:  # C:\train.py
        return target, ""
    return source, name


def _trainer(module: ModuleType, name: str, source: str) -> Trainer:
    there = {key: value for key, value in vars(module).items() if isinstance(value, Trainer)}
    listed = f"There {'is' if len(there) == 1 else 'are'}: {', '.join(there)}" if there else _without_trainer(module)
    if not name:
        if len(there) != 1:
            asked = f"Name one, as in {source}:{next(iter(there))}. {listed}" if there else listed
            raise CadenzaError(
                f"{source!r} has {len(there) or 'no'} Trainer{'s' * (len(there) != 1)} at its top level. {asked}"
            )
        return next(iter(there.values()))
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise CadenzaError(f"{source!r} has no {name!r}.{nearest(name, known)} {listed}")
    value = getattr(module, name)
    if callable(value) and not isinstance(value, Trainer):
        try:
            signature_of(value).bind()
        except TypeError as error:
            raise CadenzaError(f"{source}:{name} must be a function without arguments: {error}. {listed}") from None
        made = value()
        if isinstance(made, Trainer):
            return made
        raise CadenzaError(f"{source}:{name} must return a Trainer; it returned {type(made).__name__}. {listed}")
    if not isinstance(value, Trainer):
        raise CadenzaError(
            f"{source}:{name} must be a Trainer, or a function without arguments that returns one; it is "
            f"{type(value).__name__}. {listed}"
        )
    return value


def _without_trainer(module: ModuleType) -> str:
    functions = [
        key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    hint = f" Its functions and classes: {', '.join(functions)}." if functions else ""
    return f"Make one at its top level, or name a function that returns one.{hint}"

"""``cadenza plan``: the plan of a trainer in a script or module. Nothing is trained or written."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from cadenza.commands.output import add_json, print_json, say
from cadenza.engine.calendar import Calendar
from cadenza.engine.plan import Plan
from cadenza.errors import CadenzaError, nearest
from cadenza.status.signatures import signature_of
from cadenza.trainer import Trainer

_GUARD = 'Put the call below `if __name__ == "__main__":`, and leave the trainer above it, or return it from a function.'


class _TrainsError(BaseException):
    """The script called ``fit``. No ``except Exception`` in it catches this."""


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
    with _nothing_on_stdout():
        plan = _guarded(source, arguments.rest, lambda: _shown_of(_trainer(_imported(source), name, source), arguments))
    if arguments.json:
        print_json(plan.to_dict())
    else:
        say(str(plan))


def _shown_of(trainer: Trainer, arguments: argparse.Namespace) -> Plan | Calendar:
    if arguments.calendar is None:
        return trainer.plan(arguments.since)
    return trainer.calendar(arguments.calendar or None, resume=arguments.resume)


def _parts(target: str) -> tuple[str, str]:
    """Return script or module, and the name in it, which may be empty."""
    source, colon, name = target.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:  # C:\train.py
        return target, ""
    return source, name


def _guarded(source: str, arguments: Sequence[str], make: Callable[[], Plan | Calendar]) -> Plan | Calendar:
    """Call a function in which code of the user runs. Its errors are shown without our part of the traceback."""
    before = sys.argv, sys.path[:]
    sys.argv = [source, *arguments]
    sys.path.insert(0, str(Path(source).resolve().parent) if _is_script(source) else os.getcwd())
    try:
        with _no_training():
            return make()
    except _TrainsError:
        raise CadenzaError(f"{source!r} trains when it is imported: it calls fit(). {_GUARD}") from None
    except SystemExit as error:
        raise CadenzaError(
            f"{source!r} ended with sys.exit({error.code!r}) when it was imported. Pass its arguments after --, as in: "
            f'cadenza plan {source} -- --lr 0.1. Put what a program does at its end below `if __name__ == "__main__":`.'
        ) from None
    except CadenzaError as error:
        if _in_script(error) is None:
            raise
        raise _shown(error, source) from None
    except Exception as error:
        raise _shown(error, source) from None
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Send to stderr what the script prints, and what a program that it starts or a C library prints."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _no_training() -> Iterator[None]:
    fit = Trainer.fit

    def refuse(self: Trainer, *_: Any, **__: Any) -> Any:
        raise _TrainsError

    Trainer.fit = refuse  # type: ignore[method-assign]  # in this process alone, which ends with the plan
    try:
        yield
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]


def _is_script(source: str) -> bool:
    return source.endswith(".py") or os.sep in source or "/" in source


def _imported(source: str) -> ModuleType:
    if not _is_script(source):
        if not all(part.isidentifier() for part in source.split(".")):
            raise CadenzaError(f"{source!r} is no script or module. Expected script.py:NAME or package.module:NAME")
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name and (source == error.name or source.startswith(f"{error.name}.")):
                hint = f" Did you mean {f'{source}.py'!r}?" if Path(f"{source}.py").is_file() else ""
                raise CadenzaError(
                    f"there is no module {error.name!r} in the current folder or the environment.{hint}"
                ) from None
            raise
    path = Path(source)
    if not path.is_file():
        there = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise CadenzaError(f"there is no script {source!r}.{nearest(source, there)}")
    name = path.stem if path.stem not in sys.modules else f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CadenzaError(f"{source!r} is no Python script: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


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


def _shown(error: Exception, source: str) -> CadenzaError:
    """Print the traceback of the user's code, and return the error of the command."""
    traceback.print_exception(type(error), error, _in_script(error))
    return CadenzaError(f"{source!r} failed; its error is above{_relative_imports(error, source)}")


def _relative_imports(error: Exception, source: str) -> str:
    """Return how to name a script of a package, where that is the cure of its error."""
    if not _is_script(source) or not isinstance(error, ImportError) or "no known parent package" not in str(error):
        return ""
    script = Path(source).resolve()
    top = script.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    if top == script.parent:  # a package without __init__.py
        top = Path.cwd() if Path.cwd() in top.parents else top.parent
    module = ".".join(script.relative_to(top).with_suffix("").parts)
    where = "" if top == Path.cwd() else f", in the folder {str(top)!r}"
    return f". Relative imports need the name of the module{where}: cadenza plan {module}:NAME"


def _in_script(error: BaseException) -> Any:
    """Return the traceback from the first line that is neither of this file nor of Python's import system; None without one."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith((__file__, "<frozen", importlib.__file__)):
        step = step.tb_next
    return None if step is not None and _is_ours(step.tb_frame.f_code.co_filename) else step


def _is_ours(file: str) -> bool:
    return Path(file).resolve().is_relative_to(Path(__file__).resolve().parents[1])

"""Imports a user's script or module for a command. Nothing is trained, and stdout holds only the command's output."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cadenza.errors import CadenzaError, nearest
from cadenza.trainer import Trainer

T = TypeVar("T")

_COMMANDS = str(Path(__file__).parent)
_GUARD = 'Put the call below `if __name__ == "__main__":`, and leave the trainer above it, or return it from a function.'


class _TrainsError(BaseException):
    """The script called ``fit``. No ``except Exception`` in it catches this."""


def guarded(command: str, source: str, arguments: Sequence[str], make: Callable[[], T]) -> T:
    """Call a function that runs user code. Its errors are shown without Cadenza's part of the traceback."""
    before = sys.argv, sys.path[:]
    sys.argv = [source, *arguments]
    sys.path.insert(0, str(Path(source).resolve().parent) if is_script(source) else os.getcwd())
    try:
        with _no_training():
            return make()
    except _TrainsError:
        raise CadenzaError(f"{source!r} trains when it is imported: it calls fit(). {_GUARD}") from None
    except SystemExit as error:
        raise CadenzaError(
            f"{source!r} ended with sys.exit({error.code!r}) when it was imported.{_arguments(command, source)}"
            ' Put what a program does at its end below `if __name__ == "__main__":`.'
        ) from None
    except CadenzaError as error:
        if _in_script(error) is None:
            raise
        raise _shown(command, error, source) from None
    except Exception as error:
        raise _shown(command, error, source) from None
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


@contextmanager
def nothing_on_stdout() -> Iterator[None]:
    """Redirect the script's output to stderr, including that of subprocesses and C libraries."""
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


def is_script(source: str) -> bool:
    """Return whether the text names a file rather than a module."""
    return source.endswith(".py") or os.sep in source or "/" in source


def imported(source: str) -> ModuleType:
    """Import a script or a module by name.

    Raises:
        CadenzaError: It does not exist.
    """
    if not is_script(source):
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
        there = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise CadenzaError(f"there is no script {source!r}.{nearest(source, there)}")
    name = path.stem if path.stem not in sys.modules else f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CadenzaError(f"{source!r} is no Python script: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


def _shown(command: str, error: Exception, source: str) -> CadenzaError:
    """Print the traceback of the user's code, and return the error of the command."""
    traceback.print_exception(type(error), error, _in_script(error))
    return CadenzaError(f"{source!r} failed; its error is above{_relative_imports(command, error, source)}")


def _relative_imports(command: str, error: Exception, source: str) -> str:
    """Return how to name a script inside a package, if that would fix its error."""
    if not is_script(source) or not isinstance(error, ImportError) or "no known parent package" not in str(error):
        return ""
    script = Path(source).resolve()
    top = script.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    if top == script.parent:  # a package without __init__.py
        top = Path.cwd() if Path.cwd() in top.parents else top.parent
    module = ".".join(script.relative_to(top).with_suffix("").parts)
    where = "" if top == Path.cwd() else f", in the folder {str(top)!r}"
    return f". Relative imports need the name of the module{where}: cadenza {command} {module}:NAME"


def _in_script(error: BaseException) -> Any:
    """Return the traceback from the first frame outside the commands and Python's import system; None if there is none."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith((_COMMANDS, "<frozen", importlib.__file__)):
        step = step.tb_next
    return None if step is not None and _is_ours(step.tb_frame.f_code.co_filename) else step


def _is_ours(file: str) -> bool:
    return Path(file).resolve().is_relative_to(Path(__file__).resolve().parents[1])


def _arguments(command: str, source: str) -> str:
    return f" Pass its arguments after --, as in: cadenza plan {source} -- --lr 0.1." if command == "plan" else ""

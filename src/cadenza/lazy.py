"""Packages as tables of contents: a name is imported when it is first read (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def contents(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package, of the names that it imports for type checkers.

    Each stands in a line of its source such as ``from cadenza.run import Run as Run``, below ``if TYPE_CHECKING:``. Those that
    are modules of the package, ``from cadenza import sinks as sinks``, are not in ``__all__``.

    Raises:
        ImportError: The installation has no source files, such as one of compiled files alone.
    """
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(
            f"{package} reads its names from its source file, which this installation lacks. Install it with .py files"
        )
    rows = map(str.split, source.splitlines())
    lines = [parts for parts in rows if parts[:1] == ["from"] and parts[4:5] == ["as"]]
    modules = [name for _, home, _, name, *_ in lines if home == package]
    home_of = {name: home for _, home, _, name, *_ in lines if home != package}

    def get(name: str) -> Any:
        if name in modules:
            return imported(f"{package}.{name}", needed_by=f"{package}.{name}")  # the import makes it an attribute
        if name not in home_of:
            known = not name.startswith("_")  # imported here: programs that are right build no error
            said = import_module("cadenza.text.hints").instead_of_name(name, [package, *modules]) if known else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{said}")
        value = getattr(imported(home_of[name], needed_by=f"{package}.{name}"), name)
        setattr(sys.modules[package], name, value)  # later reads do not come here
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    if not _NAMES:
        sys.meta_path.append(_Advice)
    _NAMES[package] = {*home_of, *modules}
    return sorted(home_of), get, directory


_NAMES: dict[str, set[str]] = {}
"""By package that is a table of contents, its names."""


class _Advice:
    """The last finder of modules: ``from cadenza.callbacks import ModelCheckpoint`` looks for a module of this name, too."""

    @staticmethod
    def find_spec(module: str, path: object = None, target: object = None) -> None:
        """Raise `ModuleNotFoundError` for a name that a package does not have, if there is something to use instead.

        It finds nothing. Without such advice the error is that of Python, or none: ``importlib.util.find_spec`` returns None.
        """
        package, _, name = module.rpartition(".")
        if package in _NAMES and not name.startswith("_") and name not in _NAMES[package]:
            if name.islower() and name not in import_module("cadenza.text.hints").hints("names"):  # it can be a module
                return
            try:
                getattr(sys.modules[package], name)
            except AttributeError as error:
                if not str(error).endswith(f"no attribute {name!r}"):
                    raise ModuleNotFoundError(str(error)) from None  # without name=: "from" hides an error of this name


def imported(module: str, *, needed_by: str) -> ModuleType:
    """Import a module of Cadenza that may be in a wing.

    Raises:
        MissingExtraError: The installation lacks the folder of the wing.
    """
    wing = ".".join(module.split(".")[:2])
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != wing:
            raise
    raise import_module("cadenza.errors").MissingExtraError(wing, needed_by=needed_by)

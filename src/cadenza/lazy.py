"""Packages as tables of contents: a name is imported when it is first read (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def contents(
    package: str, homes: Mapping[str, str], inner: str = ""
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package. For type checkers it repeats them as imports.

    Args:
        package: The ``__name__`` of the package.
        homes: Maps the full name of each module to its public names, separated by spaces.
        inner: Modules of the package that are also attributes of it, separated by spaces. They are not in ``__all__``.
    """
    modules = inner.split()
    public = sorted(name for names in homes.values() for name in names.split())
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules:
            return imported(f"{package}.{name}", needed_by=f"{package}.{name}")  # the import makes it an attribute
        if name not in home_of:
            known = not name.startswith("_")  # imported here: programs that are right build no error
            said = import_module("cadenza.text.hints").instead_of_name(name, [package, *modules]) if known else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{said}", name=name, obj=sys.modules[package])
        value = getattr(imported(home_of[name], needed_by=f"{package}.{name}"), name)
        setattr(sys.modules[package], name, value)  # later reads do not come here
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    return public, get, directory


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

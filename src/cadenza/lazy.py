"""Packages as tables of contents: a name is imported when somebody asks for it (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def contents(
    package: str, homes: Mapping[str, str], inner: str = "", helpers: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package. For type checkers it repeats them as imports.

    Args:
        package: Its ``__name__``.
        homes: By full name, the modules that hold its public names; the names with spaces between them.
        helpers: Public names in the same form that are not in ``__all__``.
        inner: Modules in it that are found by attribute as well, with spaces between them; no part of ``__all__``.
    """
    modules = inner.split()
    public = sorted(name for names in homes.values() for name in names.split())
    home_of = {name: home for home, names in (*homes.items(), *(helpers or {}).items()) for name in names.split()}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")  # which makes it an attribute
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next time it is found without asking
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    return public, get, directory

"""The public names of Cadenza and the page of each in the site, for `docs/pages.py` and its test."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType

# A name that several modules offer has its page with the first of them.
MODULES = (
    "cadenza.callbacks",
    "cadenza.sinks",
    "cadenza.drivers",
    "cadenza",
    "cadenza.loading",
    "cadenza.testing",
    "cadenza.timetravel",
    "cadenza.parallel",
    "cadenza.hooks",
    "cadenza.records",
    "cadenza.report",
    "cadenza.errors",
    "cadenza.compat.transformers",
)
ON_ONE_PAGE = ("cadenza.errors",)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: its ``__all__``, or else what it defines, in the order of the source."""
    if (listed := getattr(module, "__all__", None)) is not None:
        return [name for name in listed if not name.startswith("_")]
    return [name for name, value in vars(module).items() if name[0] != "_" and _defined_in(module, value)]


def _defined_in(module: ModuleType, value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__


def all_names() -> dict[str, list[str]]:
    """Return the public names of each public module."""
    return {module: names_of(import_module(module)) for module in MODULES}


def homes() -> dict[str, str]:
    """Return for each full name, such as ``cadenza.hooks.on``, the full name that has the page, such as ``cadenza.on``."""
    first: dict[int, str] = {}
    found = {}
    for module, names in all_names().items():
        for name in names:
            full = f"{module}.{name}"
            found[full] = first.setdefault(id(getattr(import_module(module), name)), full)
    return found


def page_of(full: str) -> str:
    """Return the page of a full name, relative to docs."""
    module, _, name = full.rpartition(".")
    folder = index_of(module).rpartition("/")[0]
    return index_of(module) if module in ON_ONE_PAGE else f"{folder}/{name}.md"


def index_of(module: str) -> str:
    """Return the page of a module."""
    return f"reference/{module.removeprefix('cadenza').removeprefix('.') or 'cadenza'}/index.md"

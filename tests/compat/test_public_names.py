"""Every public name of an original is provided, or listed with what to use instead.

``public_names.txt`` in the folder of each adapter has the names: those that a module defines or lists in ``__all__``, and those
that a package exports. Names that a module only imports from elsewhere are not in it, unless scripts import them from there.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.compat.absent import entries

FILES = sorted(Path(__file__).parent.glob("*/public_names*.txt"))
ADAPTERS = sorted({file.parent.name for file in FILES})


def public_names(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each module of an original, "" for the package itself, and its names."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            module, _, names = line.partition(":")
            yield module.strip("."), names.split()


def found(module: str, name: str) -> str:
    """Return "" if a name can be imported, or else the error."""
    try:
        exec(f"from {module} import {name}", {})
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_each_name_is_provided_or_listed(file: Path) -> None:
    home = f"cadenza.compat.{file.parent.name}"
    checked, bare = 0, []
    for path, names in public_names(file):
        module = ".".join(filter(None, (home, path)))
        try:
            importlib.import_module(module)
        except ImportError as error:
            checked += 1
            bare += [] if "of the original)" in str(error) else [module]
        else:
            checked += len(names)
            bare += [f"{module}.{name}" for name in names if (text := found(module, name)) and "of the original)" not in text]
    assert checked > 30
    assert not bare, "provide these names, or list them in ABSENT with what to use instead"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_listed_name_is_provided(adapter: str) -> None:
    stale = []
    for path, name, _ in entries(adapter):
        module = ".".join(filter(None, (f"cadenza.compat.{adapter}", path)))
        try:
            importlib.import_module(module)
        except ImportError:
            continue  # the whole module is missing
        stale += [f"{module}.{name}"] if name == "*" or not found(module, name) else []
    assert not stale, "take these names off the list"


def resolves(dotted: str) -> bool:
    """Return whether a dotted name can be imported, or read from what can be imported."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            value = getattr(value, part, getattr(value, "__annotations__", {}).get(part))
        return value is not None
    return False


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_each_advice_names_something_that_exists(adapter: str) -> None:
    advices = {entry.advice for entry in entries(adapter)}
    assert advices
    for advice in advices:
        dotted = re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", advice)
        assert advice.endswith((".", ")")), advice
        assert dotted or re.search(r"`\w*(?:Error|Exception)`|`dict`", advice), advice
        assert all(map(resolves, dotted)), advice


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_listed_module_or_name_is_one_of_the_original(adapter: str) -> None:
    modules, names = set(), set()
    for file in FILES:
        for path, found in public_names(file) if file.parent.name == adapter else ():
            modules |= {path, *(path[: dot.start()] for dot in re.finditer(r"\.", path))}
            names |= {"*", *found}
    for entry in entries(adapter):
        assert entry.module in modules, entry
        assert entry.name in names, entry


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_guide_has_the_generated_table(adapter: str) -> None:
    guide = Path(__file__).parents[2] / importlib.import_module(f"cadenza.compat.{adapter}.absent").GUIDE
    text = guide.read_text(encoding="utf-8")
    assert f"<!-- generated: absent_{adapter.removesuffix('10')} -->" in text  # tests/test_docs.py checks that it is up to date
    for entry in entries(adapter):
        assert f"`{entry.name}`" in text or entry.name == "*", entry

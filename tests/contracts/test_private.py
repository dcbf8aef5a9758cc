"""Each private name of another package has a row in docs/private.md, and each row is still needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contracts.test_floors import SOURCE, parsed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "private.md"
FOREIGN = ("adapters", "compat")  # they follow the insides of other systems
ASKING = ("getattr", "hasattr", "setattr", "delattr")


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module of ours defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module reads or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("cadenza"):
            yield from (node.module or "").split(".")
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            yield from (one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and isinstance(one.value, str))


def found() -> dict[str, set[str]]:
    """Return the rooms that use a private name which Cadenza does not define."""
    trees = {path: parsed(path) for path in SOURCE.rglob("*.py")}
    own = {name for tree in trees.values() for name in defined(tree)}
    rooms: dict[str, set[str]] = {}
    for path, tree in trees.items():
        room = path.relative_to(SOURCE).parts[0]
        for name in used(tree) if room not in FOREIGN else ():
            if is_private(name) and name not in own:
                rooms.setdefault(name, set()).add(room)
    return rooms


def rows() -> list[tuple[set[str], set[str]]]:
    """Return the private names and the rooms of each row of the page."""
    cells = (line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines())
    listed = [
        (set(filter(is_private, re.findall(r"`(\w+)`", row[1]))), set(row[2].strip().split(", ")))
        for row in cells
        if len(row) == 6
    ]
    return [(names, rooms) for names, rooms in listed if names]


def test_each_private_name_has_a_row_and_each_row_names_the_rooms_that_use_it() -> None:
    used_in, listed = found(), rows()
    assert used_in.keys() ^ set.union(*(names for names, _ in listed)) == set()
    for name, used_by in used_in.items():
        assert used_by <= set.union(*(rooms for names, rooms in listed if name in names)), name
    for names, rooms in listed:
        assert rooms <= set.union(*(used_in[name] for name in names)), names

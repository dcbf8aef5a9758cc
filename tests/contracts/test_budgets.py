"""The budget of each room, and of each path through the house: what grows in one place shrinks in another.

The figures in the tables are limits. A change may lower them; decision 3 in docs/decisions says how one may rise.
``python benchmarks/house.py --names`` lists what the paths consist of.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_floors import SOURCE, modules, named_by, parsed

ROOT = Path(__file__).resolve().parents[2]

ROOMS = """
room         lines  files  arrows
front doors    848      9      14
text            96      2       1
status        1231     13       1
files          404      5       0
profiling      319      3       1
loading       2159     12       3
records       1638     10       6
hooks         1568     10       7
drivers       2535     17       5
optim         1349     11       6
sinks         1133     10       7
engine        5051     21      11
checkpoint    3876     16      11
callbacks     3017     29      14
loops         1101      6      13
testing        946      6      14
commands       687      8      11
report        2535     24       8
steering      1842     16      10
timetravel    2995     18      22
parallel      1593     10      11
compiled       422      2       6
sources        517      3       4
compat       24706    317      19
trackers      2060     15      11
"""
"""Code lines have a token that is neither a comment nor a docstring. An arrow leads to another room whose modules are imported,
at run time or for types; `Run` may be named from anywhere."""

WINGS = ("compat", "compiled", "parallel", "report", "sources", "steering", "timetravel", "trackers")

SUMS = """
sum                             core   wings
files                            188     405
lines                          27958   36670
words                         196919  249472
words a line                    7.05    6.81
data files and long literals     495     825
modules under 30 lines            10      46
"""
"""Words are tokens without brackets, commas and colons. Data files are toml and json; a long literal has over 40 lines. An
``__init__`` is a table of contents, and does not count as a module under 30 lines."""

PATHS = """
path        functions  body
forward             4    30
checkpoint         67   528
record             16   154
resume             99   850
stop               10    64
"""
"""The functions of more than two body lines, and their body lines: `benchmarks/house.py` says from where to where."""

NAMES = """
names                 count
public names             36
session                  40
session in callbacks      8
"""

FILE_LINES, FUNCTION_LINES = 600, 60

Limits = dict[str, dict[str, float]]


def table(text: str) -> Limits:
    """Return the rows of a table: columns stand apart by two spaces or more."""
    head, *rows = ([cell for cell in line.split("  ") if cell] for line in text.strip().splitlines())
    columns = [column.strip() for column in head[1:]]
    return {name: dict(zip(columns, map(float, cells), strict=True)) for name, *cells in rows}


@dataclass(frozen=True)
class Module:
    """A module of the package, measured."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        inner = self.path.relative_to(SOURCE)
        return inner.parts[0] if len(inner.parts) > 1 else "front doors"

    @property
    def lines(self) -> int:
        return len(house_source().code_lines(str(self.path)))

    @property
    def words(self) -> int:
        text = self.path.read_text(encoding="utf-8")
        docstrings = house_source()._docstrings(parsed(self.path))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        counted = (token for token in tokens if token.type not in house_source()._NO_CODE and token.start[0] not in docstrings)
        return sum(token.string not in {*"()[]{},:"} for token in counted)

    @property
    def long_literals(self) -> int:
        """The lines of the literals that are a value of a name and have over 40 lines."""
        values = [
            node.value for node in ast.walk(parsed(self.path)) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        ]
        kinds = (ast.Constant, ast.JoinedStr, ast.Dict, ast.List, ast.Tuple, ast.Set)
        lengths = ((node.end_lineno or 0) - node.lineno + 1 for node in values if isinstance(node, kinds))
        return sum(length for length in lengths if length > 40)


@cache
def benchmark(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def house_source() -> Any:
    return benchmark("house_source")


@cache
def measured() -> list[Module]:
    return [Module(name, path) for name, path in {**modules(), "__init__": SOURCE / "__init__.py"}.items()]


def rooms() -> Limits:
    found: Limits = {}
    for room in {one.room for one in measured()}:
        own = [one for one in measured() if one.room == room]
        entered = {name.split(".")[0] for one in own for name in named_by(one.path)} - {room}
        if room == "front doors":
            entered -= {one.name.split(".")[0] for one in own}
        found[room] = {"lines": sum(one.lines for one in own), "files": len(own), "arrows": len(entered)}
    return found


def sums() -> Limits:
    def of(some: list[Module], wings: bool) -> Iterator[tuple[str, float]]:
        lines, words = sum(one.lines for one in some), sum(one.words for one in some)
        data = [path for path in SOURCE.rglob("*") if path.suffix in (".toml", ".json")]
        held = [path for path in data if (path.relative_to(SOURCE).parts[0] in WINGS) == wings]
        yield from {"files": len(some), "lines": lines, "words": words, "words a line": words / lines}.items()
        in_files = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in held)
        yield "data files and long literals", in_files + sum(one.long_literals for one in some)
        yield "modules under 30 lines", sum(one.lines < 30 for one in some if one.path.name != "__init__.py")

    core = dict(of([one for one in measured() if one.room not in WINGS], False))
    wings = dict(of([one for one in measured() if one.room in WINGS], True))
    return {name: {"core": value, "wings": wings[name]} for name, value in core.items()}


MEASURE = """
import json, sys
import house
import house_source
print(json.dumps({name: [len(one), house_source.body(one)] for name, one in
    ((name, [one for one in some if len(one.body) > 2]) for name, some in house.ways().items())}))
"""


def paths() -> Limits:
    """Measure in a new process: what other tests have imported adds functions to some paths."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {"functions": found[name][0], "body": found[name][1]} for name in table(PATHS)}


def names() -> Limits:
    house = benchmark("house")
    found = house.public_names(), house_source().session_attributes(), house_source().callbacks_with_session()
    return {name: {"count": len(some)} for name, some in zip(table(NAMES), found, strict=True)}


def over(found: Limits, limits: Limits) -> list[str]:
    """Return the figures that are above their limits, or have none."""
    return [
        f"{name}: {value:g} {column}, and the limit is {limits.get(name, {}).get(column, 0):g}"
        for name, figures in found.items()
        for column, value in figures.items()
        if value > limits.get(name, {}).get(column, 0)
    ]


def check(found: Limits, limits: Limits) -> None:
    exceeded = over(found, limits)
    assert not exceeded, "\n".join(exceeded)


def test_no_room_is_over_its_budget() -> None:
    check(rooms(), table(ROOMS))


def test_core_and_wings_are_in_their_budgets() -> None:
    check(sums(), table(SUMS))


def test_the_paths_through_the_house_are_not_longer() -> None:
    """Some functions run only if the clock says so, such as those that write records at once: the shortest of three counts."""
    for _ in range(3):
        if not (exceeded := over(paths(), table(PATHS))):
            return
    raise AssertionError("\n".join(exceeded))


def test_hooks_get_no_more_names_and_the_session_is_used_no_wider() -> None:
    check(names(), table(NAMES))


FOLDERS = [ROOT / name for name in ("src", "tests", "examples", "benchmarks")]


def test_no_file_is_longer_than_one_can_read_at_once() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for folder in FOLDERS for path in folder.rglob("*.py")}
    assert lengths
    assert not {path: length for path, length in lengths.items() if length > FILE_LINES}


def lines_of(function: ast.FunctionDef) -> int:
    """Return how many lines its statements have; words about it, also about its attributes, do not count."""
    told = [node for node in ast.walk(function) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    words = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in told)
    return (function.end_lineno or 0) - function.body[0].lineno + 1 - words


def test_no_function_of_the_package_is_longer() -> None:
    functions = {
        f"{name}.{node.name}": lines_of(node)
        for name, path in modules().items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES}


@pytest.mark.parametrize("text", [ROOMS, SUMS, PATHS, NAMES])
def test_a_figure_above_its_limit_is_named(text: str) -> None:
    limits = table(text)
    name, column = next((name, column) for name, row in limits.items() for column in row)
    grown = {**limits, name: {**limits[name], column: limits[name][column] + 1}}
    assert [line.startswith(f"{name}: ") for line in over(grown, limits)] == [True]

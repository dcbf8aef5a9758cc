"""Measure what the tests find: small defects are put into the package, and the tests that reach them are run.

    python tests/mutants.py --report mutants.json [--seed 1] [--core 60] [--guests 40] [--jobs 2]
    python tests/mutants.py --report after.json --again mutants.json

A *mutant* is one changed place: a comparison that is flipped, a call that is removed, an integer that is one too large, a
branch that is inverted. The seed draws as many of each kind from the core as from the adapters (`compat/`).
``--again`` takes the mutants of an earlier report, so that two versions of the tests are compared by the same ones.

1. The whole suite runs once in a copy of the checkout in which each of these places records the test that reaches it, in
   other processes too. Tests that fail there are told, and are not used.
2. Each mutant gets the tests that reach its place: those of its own room first, then the quickest, 40 s of them at most. A run
   with ``-x`` that fails, or that takes 60 s, means that the mutant died.

Nobody reaches some places: such a mutant lives. Some live because they change nothing that a program can see.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
GUESTS = "src/cadenza/compat/"
KINDS = ("comparison", "call", "constant", "branch")
CHOSEN_S, LIMIT_S = 40.0, 60.0
UNUSED = ["--deselect=tests/contracts", "--ignore=tests/test_benchmarks.py", "--ignore=tests/test_site.py"]
"""Tests that read the source, or measure it: they would fail at any change, or at none."""

OPPOSITE = {
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}

PROBE = '''"""Records which test reaches a place: the test that this process runs, or that the process which started it runs."""

import os

current = None
_seen = set()
_process = None


def hit(number):
    global _process, current
    if _process != os.getpid():
        if _process is not None or current is None:  # a child, or no process of pytest
            _seen.clear()
            with open(os.environ["MUTANTS_CURRENT"], encoding="utf-8") as file:
                current = file.read()
        _process = os.getpid()
    if (number, current) not in _seen:
        _seen.add((number, current))
        with open(os.environ["MUTANTS_HITS"], "a", encoding="utf-8") as file:
            file.write(f"{number}\\t{current}\\n")
    return True
'''

PLUGIN = """
import os
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    name = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ["MUTANTS_CURRENT"] = os.path.join(os.environ["MUTANTS_FOLDER"], name)
    open(os.environ["MUTANTS_CURRENT"], "w").close()

def begin(name):
    from cadenza import mutants_probe
    mutants_probe.current = name
    mutants_probe._process = os.getpid()
    with open(os.environ["MUTANTS_CURRENT"], "w", encoding="utf-8") as file:
        file.write(name)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    begin(item.nodeid.partition("::")[0])  # a fixture may be that of all tests of the file

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    begin(item.nodeid)

def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    with open(os.environ["MUTANTS_TIMES"], "a", encoding="utf-8") as file:
        file.write(f"{report.nodeid}\\t{report.outcome}\\t{report.duration}\\n")
"""


@dataclass(frozen=True)
class Place:
    """A piece of source that can be changed, by its first and last line (from 1) and column (from 0, in bytes)."""

    file: str
    kind: str
    function: str
    span: tuple[int, int, int, int]
    before: str
    after: str

    def replaced(self, source: str, text: str) -> str:
        """Return the source with another text in this place. Lines keep their numbers."""
        first, start, last, end = self.span
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        head, tail = lines[first - 1][:start], lines[last - 1][end:]
        text += "\n" * (last - first - text.count("\n")) if text.endswith(")") and last > first else ""
        return b"".join([*lines[: first - 1], head + text.encode() + tail, *lines[last:]]).decode()


@dataclass
class Mutant:
    """A place, the tests that reach it, and what became of it."""

    place: Place
    tests: int = 0
    died: bool = False
    by: str = ""
    seconds: float = 0.0
    chosen: list[str] = field(default_factory=list)


def valid(place: Place, node: ast.AST, source: str) -> bool:
    """Return whether the place holds the node: inside of an f-string, Python 3.11 gives other positions."""
    try:
        held = ast.parse(place.before, mode="eval").body
        ast.parse(place.replaced(source, place.after))
        ast.parse(place.replaced(source, probed(place, 0)))
    except (SyntaxError, ValueError):
        return False
    return ast.dump(held) == ast.dump(node)


def probed(place: Place, number: int) -> str:
    """Return the text of a place that records who reaches it."""
    return f'(__import__("cadenza.mutants_probe").mutants_probe.hit({number}), {place.before})[1]'


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what can be changed at a node, by its kind."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", node
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", node
    elif isinstance(node, ast.If | ast.IfExp):
        yield "branch", node.test


def changeable(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield the function, the kind and the node of all that can be changed in a module, inside of functions."""
    skipped = ("annotation", "returns", "decorator_list", "args")

    def visit(node: ast.AST, function: str, inside: bool) -> Iterator[tuple[str, str, ast.expr]]:
        if inside:
            yield from ((function, kind, changed) for kind, changed in changes(node))
        for name, value in ast.iter_fields(node):
            if name in skipped and isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    yield from visit(child, f"{function}.{child.name}".lstrip("."), isinstance(child, ast.FunctionDef))
                elif isinstance(child, ast.AST):
                    yield from visit(child, function, inside)

    return visit(tree, "", False)


def place_of(file: str, source: str, function: str, kind: str, node: ast.expr) -> Place | None:
    """Return the place of a node, or None if its text cannot be replaced."""

    def text(part: ast.expr) -> str:
        return ast.get_source_segment(source, part) or ""

    if kind == "comparison":
        assert isinstance(node, ast.Compare)
        after = f"({text(node.left)}) {OPPOSITE[type(node.ops[0])]} ({text(node.comparators[0])})"
    elif kind == "constant":
        after = str(node.value + 1) if isinstance(node, ast.Constant) and isinstance(node.value, int) else ""
    else:
        after = "None" if kind == "call" else f"(not ({text(node)}))"
    span = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
    place = Place(file, kind, function, span, text(node), after)
    return place if valid(place, node, source) else None


def drawn(seed: int, core: int, guests: int) -> list[Place]:
    """Return the drawn places, as many of each kind."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src/cadenza").rglob("*.py"))
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    chosen: list[Place] = []
    generator = random.Random(seed)
    for count, adapters in ((core, False), (guests, True)):
        known = defaultdict(list)
        for file in files:
            if file.startswith(GUESTS) == adapters:
                for function, kind, node in changeable(ast.parse(sources[file])):
                    known[kind].append((file, function, node))
        for kind in KINDS:
            generator.shuffle(known[kind])
            found = (place_of(file, sources[file], function, kind, node) for file, function, node in known[kind])
            chosen += islice((place for place in found if place), count // len(KINDS))
    return chosen


def copy_to(folder: Path) -> Path:
    """Return a copy of the checkout with what stands beside it."""
    folder.mkdir()
    known = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in known.splitlines():
        if (ROOT / name).is_file():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    for path, link in ((ROOT.parent / "shared", folder / "shared"), (ROOT / ".venv", folder / "checkout" / ".venv")):
        if path.exists():
            link.symlink_to(path)
    return folder / "checkout"


def pytest(checkout: Path, *arguments: str, environment: Mapping[str, str], timeout_s: float | None = None) -> tuple[int, str]:
    """Run pytest in a copy, whose package comes before the installed one; return its exit code and what it printed."""
    path = f"{checkout / 'src'}{os.pathsep}{checkout}"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def covering(places: list[Place], folder: Path, jobs: int, only: list[str]) -> tuple[dict[int, set[str]], dict[str, float]]:
    """Return which tests reach each place, and how long each test that passed took."""
    checkout = copy_to(folder / "map")
    (checkout / "src/cadenza/mutants_probe.py").write_text(PROBE, encoding="utf-8")
    (checkout / "mutants_plugin.py").write_text(PLUGIN, encoding="utf-8")
    by_file = defaultdict(list)
    for number, place in enumerate(places):
        by_file[place.file].append((place.span, number, place))
    for file, several in by_file.items():
        source = (checkout / file).read_text(encoding="utf-8")
        for _, number, place in sorted(several, reverse=True, key=lambda one: (one[0][0], one[0][1], -one[0][2], -one[0][3])):
            source = place.replaced(source, probed(place, number))  # from the end, so that earlier spans stay right
        (checkout / file).write_text(source, encoding="utf-8")
    files = {"HITS": folder / "hits", "TIMES": folder / "times", "FOLDER": folder / "current"}
    files["FOLDER"].mkdir()
    for name in ("HITS", "TIMES"):
        files[name].touch()
    named = {f"MUTANTS_{name}": str(path) for name, path in files.items()}
    options = ["-q", "-p", "mutants_plugin", "-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder", *UNUSED]
    _, output = pytest(checkout, *options, *only, environment=named)
    (folder / "map.log").write_text(output, encoding="utf-8")
    reached: dict[int, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for line in files["TIMES"].read_text(encoding="utf-8").splitlines():
        test, outcome, duration = line.rsplit("\t", 2)
        seconds[test] += float(duration)
        if outcome != "passed":
            failed.add(test)
    for line in files["HITS"].read_text(encoding="utf-8").splitlines():
        place_number, _, test = line.partition("\t")
        reached[int(place_number)] |= {test} if "::" in test else {one for one in seconds if one.partition("::")[0] == test}
    shutil.rmtree(checkout)
    return reached, {test: took for test, took in seconds.items() if test not in failed}


def chosen_for(place: Place, tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests to run: those of the same room first, those that say the module's name before the others."""
    room, stem = Path(place.file).parts[2:-1], Path(place.file).stem

    def rank(test: str) -> tuple[int, float]:
        file = Path(test.partition("::")[0])
        near = stem in file.stem or stem.rstrip("s") in file.stem
        return (0 if near else 1 if set(room) & set(file.parts) else 2, seconds[test])

    several, total = [], 0.0
    for test in sorted((one for one in tests if one in seconds), key=rank):
        if total + seconds[test] > CHOSEN_S:
            continue
        total += seconds[test]
        several.append(test)
    files = list(dict.fromkeys(one.partition("::")[0] for one in several))
    order = {test: index for index, test in enumerate(seconds)}  # inside of a file, a test may need the one before it
    several.sort(key=lambda one: (files.index(one.partition("::")[0]), order[one]))
    return list(dict.fromkeys(one.partition("::")[0] if ".md::" in one else one for one in several))  # a page runs as a whole


def tried(mutant: Mutant, checkout: Path) -> None:
    """Run the tests of a mutant."""
    if not mutant.chosen:
        return
    path = checkout / mutant.place.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.place.replaced(source, mutant.place.after), encoding="utf-8")
    (checkout / "chosen").write_text("\n".join(mutant.chosen), encoding="utf-8")
    begin = time.monotonic()
    try:
        cached = {"PYTHONDONTWRITEBYTECODE": "1"}  # two changes within a second may have the same size
        code, output = pytest(checkout, "-x", "-q", "--tb=line", "@chosen", environment=cached, timeout_s=LIMIT_S)
        mutant.died = code != 0
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        mutant.by = failed[0] if failed else output[-400:] if mutant.died else ""
    except subprocess.TimeoutExpired:
        mutant.died, mutant.by = True, "60 s"
    finally:
        mutant.seconds = time.monotonic() - begin
        path.write_text(source, encoding="utf-8")


def main() -> None:
    """Draw, map, try, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--map", type=Path, help="where the map is kept: read if it is there, else written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=60)
    parser.add_argument("--guests", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("only", nargs="*", help="tests, instead of the whole suite")
    options = parser.parse_args()
    if options.again:
        known = json.loads(options.again.read_text(encoding="utf-8"))["mutants"]
        chosen = [Place(**{**one["place"], "span": tuple(one["place"]["span"])}) for one in known]
    else:
        chosen = drawn(options.seed, options.core, options.guests)
    for place in chosen:
        print(f"{place.file}:{place.span[0]} {place.function} {place.kind}: {place.before!r} -> {place.after!r}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if options.map and options.map.is_file():
            kept = json.loads(options.map.read_text(encoding="utf-8"))
            reached, seconds = {int(number): set(tests) for number, tests in kept["reached"].items()}, kept["seconds"]
        else:
            reached, seconds = covering(chosen, Path(folder), options.jobs + 1, options.only)
            if options.map:
                shutil.copy(Path(folder) / "map.log", options.map.with_suffix(".log"))
                kept = {"reached": {number: sorted(tests) for number, tests in reached.items()}, "seconds": seconds}
                options.map.write_text(json.dumps(kept), encoding="utf-8")
        mutants = [
            Mutant(place, len(reached.get(number, ())), chosen=chosen_for(place, reached.get(number, ()), seconds))
            for number, place in enumerate(chosen)
        ]
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy_to(Path(folder) / f"copy{number}"))

        def work(mutant: Mutant) -> Mutant:
            checkout = copies.get()
            try:
                tried(mutant, checkout)
            finally:
                copies.put(checkout)
            return mutant

        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant in pool.map(work, mutants):
                place = mutant.place
                fate = f"died: {mutant.by[:120]}" if mutant.died else f"LIVES, reached by {mutant.tests} tests"
                print(f"{place.file}:{place.span[0]} {place.kind}: {fate} ({mutant.seconds:.0f} s)", flush=True)
    write(options.report, mutants)


def write(report: Path, mutants: list[Mutant]) -> None:
    """Write the report and print its sums."""
    sums = {}
    for name, some in (
        ("core", [one for one in mutants if not one.place.file.startswith(GUESTS)]),
        ("guests", [one for one in mutants if one.place.file.startswith(GUESTS)]),
    ):
        sums[name] = {
            "mutants": len(some),
            "died": sum(one.died for one in some),
            "reached": sum(one.tests > 0 for one in some),
        }
    print(json.dumps(sums))
    held = [asdict(one) for one in mutants]
    report.write_text(json.dumps({"sums": sums, "mutants": held}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

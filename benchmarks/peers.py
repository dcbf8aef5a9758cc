"""Cadenza compared with a hand-written loop and with every other installed framework.

    python benchmarks/peers.py --install     # once: an environment for each peer, in .venvs
    python benchmarks/peers.py --docs        # measure, and write docs/tables/performance.md and docs/performance.json

A quarter of an hour on an idle machine. ``--quick`` shows in a minute or two that all of it works; ``--only Cadenza Ignite``
and ``--workloads sgd log`` choose rows and columns; ``--resume`` goes on where a run was interrupted. ``docs/performance.md``
describes the method.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import tables
from peers.job import WORKLOADS
from peers.rows import HAND, HAND_FUSED, ROWS

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".venvs"
REQUIREMENTS = HERE / "peers" / "requirements"
DOCS = HERE.parent / "docs"
PROCESS = "process"  # the column of one-time costs: import, memory
PROBES = 3

Cell = dict[str, Any]


def main() -> int:
    """Measure, and show tables."""
    arguments = parsed()
    if arguments.install:
        install()
        return 0
    arguments.results.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        for old in arguments.results.glob("*.jsonl"):
            old.unlink()
    begin = time.perf_counter()
    failed = [row for row in arguments.only if not measure(row, arguments)]
    results = collected(arguments.results)
    print(f"\n{(time.perf_counter() - begin) / 60:.0f} min\n\n{tables.all_of(results)}")
    text = json.dumps(results, indent=1) + "\n"
    (arguments.results / "performance.json").write_text(text, encoding="utf-8")
    if arguments.docs:
        (DOCS / "performance.json").write_text(text, encoding="utf-8")
        tables.put_into(DOCS / "tables" / "performance.md", results)
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environments, and measure nothing")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    columns = [*WORKLOADS, PROCESS]
    parser.add_argument("--workloads", nargs="+", choices=columns, default=columns, metavar="NAME", help=", ".join(columns))
    parser.add_argument("--rounds", type=int, default=15, help="runs of each, of which the median counts")
    parser.add_argument("--steps", type=int, default=300, help="in each run; fewer where a step takes long")
    parser.add_argument("--quick", action="store_true", help="a few steps: the figures say nothing")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run measured")
    parser.add_argument("--docs", action="store_true", help="write docs/tables/performance.md and docs/performance.json")
    parser.add_argument("--results", type=Path, default=HERE / ".results", help="a folder for what was measured")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 20
    return arguments


def install() -> None:
    """Create an environment for each peer unless it already meets the requirements."""
    for file in sorted(REQUIREMENTS.glob("*.txt")):
        place, wanted = ENVIRONMENTS / file.stem, file.read_text(encoding="utf-8")
        done = place / "installed.txt"
        if done.exists() and done.read_text(encoding="utf-8") == wanted:
            continue
        print(f"installing {file.stem}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        # torch first: together with others, pip could choose a newer build of several gigabytes
        torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
        for packages in ([torch], ["-r", file]):
            subprocess.run([python_of(file.stem), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text(wanted, encoding="utf-8")


def python_of(environment: str | None) -> Path:
    """Return the interpreter of an environment."""
    return Path(sys.executable) if environment is None else ENVIRONMENTS / environment / "bin" / "python"


def measure(row: str, arguments: argparse.Namespace) -> bool:
    """Measure the missing cells of a row; return False if that failed."""
    environment, alike = ROWS[row].environment, [row_name for row_name in ROWS if ROWS[row_name].module == ROWS[row].module]
    if not python_of(environment).exists():
        print(f"{row}: left out, as it is not installed; see --install", flush=True)
        return True
    file = arguments.results / f"{row.replace(',', '').replace(' ', '-')}.jsonl"
    have = {cell["workload"] for cell in lines(file)}
    wanted = [name for name in arguments.workloads if name not in have]
    print(f"{row}: {', '.join(wanted) or 'all is there'}", flush=True)
    runs = [name for name in wanted if name != PROCESS]
    try:
        if runs:
            work(environment, {"row": row, "rounds": arguments.rounds, "steps": arguments.steps, "workloads": runs}, file)
        if PROCESS in wanted and row == alike[0] and ROWS[row].module != ROWS[HAND_FUSED].module:
            probed = {"row": row, "workload": PROCESS, **process(row, 1 if arguments.quick else PROBES)}
            with file.open("a", encoding="utf-8") as answers:
                answers.write(json.dumps(probed) + "\n")
    except subprocess.CalledProcessError as error:
        print(f"{row}: FAILED\n{error.output}", flush=True)
        return False
    return True


def process(row: str, probes: int) -> Cell:
    """Return time and memory of fresh processes, interleaved with processes that do not import the framework."""
    with tempfile.TemporaryDirectory() as place:
        with_it, without = Path(place, "with"), Path(place, "without")
        for _ in range(probes):
            for name, answers in ((row, with_it), (HAND, without)):
                work(ROWS[row].environment, {"row": name}, answers)
        ours, bare = lines(with_it), lines(without)
    return {
        "torch_ms": statistics.median(answer["torch_ms"] for answer in [*ours, *bare]),
        "import_ms": statistics.median(answer["import_ms"] for answer in ours),
        "import_mib": statistics.median(answer["import_mib"] for answer in ours),
        "run_mib": statistics.median(answer["run_mib"] - other["run_mib"] for answer, other in zip(ours, bare, strict=True)),
        "hand_run_mib": statistics.median(answer["run_mib"] for answer in bare),
    }


def work(environment: str | None, order: Cell, answers: Path) -> None:
    """Run a request in a process of an environment.

    It believes to be in a terminal, so that what is shown by default is shown; nobody reads it.

    Raises:
        CalledProcessError: It failed; the error holds the end of its output.
    """
    paths = [str(HERE), *(filter(None, [os.environ.get("PYTHONPATH")]) if environment is None else [])]
    quiet = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths)}
    command = [python_of(environment), "-m", "peers.worker", json.dumps(order | {"answers": str(answers)})]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | quiet
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=place, env=environ)
        os.close(theirs)
        shown = drained(ours)
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command[:3], shown)


def drained(terminal: int) -> str:
    """Read a terminal until its other end is closed; return the last of it."""
    last = b""
    with open(terminal, "rb", buffering=0) as end:
        while True:
            try:
                more = end.read(65536)
            except OSError:  # how Linux reports that the other end is closed
                more = b""
            if not more:
                return last.decode(errors="replace")
            last = (last + more)[-3000:]


def collected(results: Path) -> dict[str, Any]:
    """Return all that was measured, by row and workload."""
    rows: dict[str, dict[str, Cell]] = {}
    for file in results.glob("*.jsonl"):
        for cell in lines(file):
            rows.setdefault(cell["row"], {})[cell["workload"]] = cell
    return {"machine": tables.machine(), "rows": {row: rows[row] for row in ROWS if row in rows}}


def lines(file: Path) -> list[Cell]:
    """Return the objects in a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())

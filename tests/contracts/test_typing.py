"""Type checkers see what would be wrong at run time: misspelled hooks, wrong overrides, functions and calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "typing"
ROOT = FOLDER.parents[1]

pytestmark = pytest.mark.timeout(1800)  # mypy without a cache, on a loaded machine


def marked(path: Path) -> dict[int, str]:
    """Return by line number the code that stands behind ``# error:``."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return {number: found[1] for number, line in lines if (found := re.search(r"# error: ([a-z-]+)$", line))}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What mypy finds in the project and in the files that are wrong on purpose; without a cache it takes two minutes."""
    command = [sys.executable, "-m", "mypy", "--output=json", "src", "tests", *map(str, FOLDER.glob("wrong_*.py"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    return [error for line in done.stdout.splitlines() if (error := json.loads(line))["severity"] == "error"]


@pytest.fixture(scope="module")
def mypy_errors(found: list[dict[str, Any]]) -> dict[str, dict[int, str]]:
    """The errors in the folder, by file and line."""
    errors: dict[str, dict[int, str]] = {path.name: {} for path in FOLDER.glob("*.py")}
    for error in found:
        if (ROOT / error["file"]).parent == FOLDER:
            errors[Path(error["file"]).name][error["line"]] = error["code"]
    return errors


def test_mypy_passes_the_package_and_the_tests(found: list[dict[str, Any]]) -> None:
    told = [f"{error['file']}:{error['line']}: {error['message']}  [{error['code']}]" for error in found]
    assert [line for line in told if not line.startswith("tests/typing/")] == []


def test_mypy_refuses_every_wrong_line_and_no_other(mypy_errors: dict[str, dict[int, str]]) -> None:
    wrong = marked(FOLDER / "wrong_hooks.py")
    assert {*wrong.values()} == {"arg-type", "attr-defined", "call-arg", "list-item", "misc", "override"}, "all kinds"
    assert mypy_errors["wrong_hooks.py"] == wrong
    assert mypy_errors["right_hooks.py"] == {}


def test_mypy_passes_callbacks_of_other_systems(mypy_errors: dict[str, dict[int, str]]) -> None:
    for name in ("lightning", "pytorch_lightning", "transformers", "keras"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed, and the checked callbacks are derived from its class")
    assert mypy_errors["foreign_callbacks.py"] == {}


def test_pyright_knows_the_type_of_every_public_name() -> None:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "cadenza", "--ignoreexternal", "--outputjson"]
    # This mode of pyright takes the packages of the first Python on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    errors = {
        symbol["name"]: found["message"]
        for symbol in report["symbols"]
        for found in symbol["diagnostics"]
        if found["severity"] == "error"
    }
    assert errors == {}
    assert report["completenessScore"] == 1
    assert len(report["symbols"]) > 5000

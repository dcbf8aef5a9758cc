"""The table of ten everyday tasks: each number is a count of lines on the pages, and no task takes more lines than it says."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tables" / "everyday-tasks.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TABLE, *SCRIPTS = re.split(r"^## .*\n", PAGE, flags=re.MULTILINE)


def counted(script: str) -> dict[str, int]:
    """Return the lines of each task: without imports, blank lines and those that stand in an earlier task."""
    found = {}
    for section in re.split(r"^### ", script, flags=re.MULTILINE)[1:]:
        lines = "\n".join(BLOCK.findall(section)).splitlines()
        new = [line for line in lines if line and not re.match(r"import |from ", line) and not line.endswith("# as before")]
        found[section.partition("\n")[0]] = len(new)
    return found


CADENZA, LIGHTNING, TRANSFORMERS = map(counted, SCRIPTS)


def test_the_table_has_the_lines_of_the_scripts() -> None:
    rows = [f"| {task} | {lines} | {LIGHTNING[task]} | {TRANSFORMERS.get(task, '')} |" for task, lines in CADENZA.items()]
    rows += [f"| Sum | {sum(CADENZA.values())} | {sum(LIGHTNING.values())} | |"]
    assert [row.replace("|  |", "| |") for row in rows] == [row for row in TABLE.splitlines() if row.startswith("| ")][1:]


def test_cadenza_takes_fewer_lines_than_lightning_and_at_most_one_more_for_any_task() -> None:
    assert len(CADENZA) == 10
    assert sum(CADENZA.values()) < sum(LIGHTNING.values())
    assert [task for column in (LIGHTNING, TRANSFORMERS) for task in column if CADENZA[task] > column[task] + 1] == []


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS[1:], ids=["lightning", "transformers"])
def test_the_scripts_of_others_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in re.findall(r"^```py\n(.*?)^```$", script, re.DOTALL | re.MULTILINE):
            exec(block.replace("bf16=True", "bf16=torch.cuda.is_available()"), names)
    assert os.listdir(tmp_path)

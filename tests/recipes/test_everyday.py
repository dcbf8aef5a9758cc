"""The table of ten everyday tasks: each number is a count of lines on the pages, and no task takes more lines than it says."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "everyday-tasks.md").read_text(encoding="utf-8")
_, LIGHTNING, TRANSFORMERS = re.split(
    r"^## .*\n", (ROOT / "docs" / "tables" / "everyday-tasks.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def counted(page: str, mark: str) -> dict[str, int]:
    """Return the lines of each section: without imports, blank lines and those that stand in an earlier script."""
    found = {}
    for section in re.split(rf"^{mark} ", page, flags=re.MULTILINE)[1:]:
        lines = "\n".join(BLOCK.findall(section)).splitlines()
        found[section.partition("\n")[0]] = sum(
            bool(line) and not re.match(r"import |from ", line) and not line.endswith("# as before") for line in lines
        )
    return found


CADENZA = counted(PAGE, "##")
COLUMNS = {"Lightning": counted(LIGHTNING, "###"), "Hugging Face `Trainer`": counted(TRANSFORMERS, "###")}


def test_the_table_has_the_lines_of_the_scripts() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.splitlines() if row.startswith("| [")]
    shown = [[titled[1:].partition("]")[0].casefold(), *cells] for titled, *cells in rows]
    expected = [[task, str(own), *(str(column.get(task, "")) for column in COLUMNS.values())] for task, own in CADENZA.items()]
    assert shown == [[row[0].casefold(), *row[1:]] for row in expected]
    sums = [str(sum(column.values())) for column in (CADENZA, COLUMNS["Lightning"])]
    assert f"| sum | {' | '.join(sums)} | |" in PAGE


def test_cadenza_takes_fewer_lines_than_lightning_and_at_most_one_more_for_any_task() -> None:
    assert len(CADENZA) == 10
    assert sum(CADENZA.values()) < sum(COLUMNS["Lightning"].values())
    for column in COLUMNS.values():
        assert [task for task, lines in column.items() if CADENZA[task] > lines + 1] == []


@pytest.mark.long
@pytest.mark.parametrize("page", [LIGHTNING, TRANSFORMERS], ids=["lightning", "transformers"])
def test_the_scripts_of_others_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
            exec(block.replace("bf16=True", "bf16=torch.cuda.is_available()"), names)
    assert os.listdir(tmp_path)

"""The pages: their generated parts are up to date, and their links lead somewhere. Their examples run as tests themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza import callbacks, sinks

ROOT = Path(__file__).resolve().parents[1]
ABOUT_RUNS = {
    f"{name}.md"
    for name in (
        "callbacks", "checkpoints", "evaluation", "logging", "moments", "profile", "reliability", "sinks", "start",
        "writing-a-callback",
    )
}  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_what_is_generated_from_the_code_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name in ABOUT_RUNS or page.parent.name == "guides"], ids=lambda page: page.stem
)
def test_each_page_about_runs_says_what_every_rank_must_call(page: Path) -> None:
    assert re.search(r"[Ee]very\s+rank\s+must|every\s+method\s+of\s+a\s+driver", page.read_text(encoding="utf-8"))


def test_of_each_callback_the_reference_says_what_it_does_on_several_ranks() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    sections = {section.partition("\n")[0]: section for section in page.split("\n### ")[1:]}
    assert sections.keys() == {*callbacks.__all__, *sinks.__all__}
    assert [name for name, section in sections.items() if "\nOn several ranks: " not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing

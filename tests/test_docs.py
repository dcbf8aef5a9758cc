"""The pages: their generated parts are up to date, and their links lead somewhere. Their examples run as tests themselves."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza import Trainer, callbacks, sinks

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
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, heading) for file, heading in links]
    missing = [(target, heading) for target, heading in targets if not target.exists()]
    missing += [(target, heading) for target, heading in targets if heading and heading not in headings(target)]
    assert not missing


def test_each_argument_that_coming_from_names_exists() -> None:
    rows = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").split("## ")[0].splitlines()
    column = " ".join(row.split("|")[2] for row in rows if row.startswith("| "))
    calls = [node for code in re.findall(r"`([A-Z]\w+\(.*?\))`", column) for node in ast.walk(ast.parse(code))]
    named = {
        one.func.id: [word.arg for word in one.keywords]
        for one in calls
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
    }
    assert len(named) > 10
    for name, words in named.items():
        known = inspect.signature(getattr(callbacks, name, None) or getattr(sinks, name)).parameters
        assert [word for word in words if word not in known] == [], name
    for word in re.findall(r"`(\w+)=[^`]*`", column):
        assert word in inspect.signature(Trainer).parameters


def headings(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in lower case, without punctuation, with hyphens for spaces."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}

"""Each list that a new callback or sink must be in: `make test-quick` names all that are missing at once."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import cadenza
from cadenza import Callback
from tests.callbacks.shipped import CALLBACKS, SINKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
SHIPPED = CALLBACKS | SINKS


def class_of(name: str) -> type[Callback]:
    found: type[Callback] = getattr(cadenza.callbacks if name in CALLBACKS else cadenza.sinks, name)
    return found


def test_each_public_callback_and_sink_has_a_row_for_the_tests_of_all() -> None:
    public = {name: getattr(cadenza.callbacks, name) for name in cadenza.callbacks.__all__}
    classes = [name for name, one in public.items() if isinstance(one, type) and issubclass(one, Callback)]
    assert [*CALLBACKS] == classes, "tests/callbacks/shipped.py and callbacks/__init__.py, in the order of the alphabet"
    assert [*SINKS] == cadenza.sinks.__all__, "tests/callbacks/shipped.py and sinks/__init__.py, in the order of the alphabet"


def test_the_page_of_callbacks_has_each_once() -> None:
    listed = [name for names in re.findall(r"<!-- generated: classes ([\w ]+) -->", PAGE) for name in names.split()]
    assert sorted(listed) == sorted(SHIPPED), "add it to a line `generated: classes` in docs/callbacks.md"


@pytest.mark.parametrize("name", SHIPPED)
def test_its_docstring_says_what_it_does_on_multiple_ranks_and_two_processes_show_it(name: str) -> None:
    assert "\nWith multiple ranks: " in inspect.cleandoc(class_of(name).__doc__ or "")
    file = ROOT / SHIPPED[name].ranks
    text = file.read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", text), f"add a test with two processes, or name its file in the row; looked in {file}"
    assert file.suffix == ".md" or re.search(r"\b(launch|on_ranks)\(", text), file

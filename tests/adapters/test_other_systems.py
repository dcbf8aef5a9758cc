"""The table of events of other systems names each moment of the table once."""

from __future__ import annotations

import re
from pathlib import Path

from cadenza import Callback, Run
from cadenza.hooks.moments import moments_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-systems.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `on_")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_first_column_has_each_moment_once() -> None:
    named = [row[0].strip("`") for row in rows()]
    assert sorted(named) == sorted(moments_of(Callback))


def test_each_row_has_five_systems_and_no_event_has_two_places() -> None:
    by_system = list(zip(*(row[1:] for row in rows()), strict=True))
    assert len(by_system) == 5
    for cells in by_system:
        events = [event for cell in cells for event in re.findall(r"`(\w+)`", cell) if "evaluator" not in cell]
        assert len(events) > 9
        assert [one for one in events if events.count(one) > 1] in ([], ["before_batch", "after_batch"] * 2)
        assert all("`" in cell or cell == "-" for cell in cells)


def test_the_verbs_in_the_text_are_those_of_a_run() -> None:
    verbs = set(re.findall(r"`run\.(\w+)", PAGE.read_text()))
    assert {"stop", "end_epoch", "skip_batch", "replace_model"} <= verbs
    assert all(hasattr(Run, verb) for verb in verbs)

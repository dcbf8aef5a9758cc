"""What a notebook shows: a few kilobytes that need no script."""

from __future__ import annotations

import math
from pathlib import Path

from cadenza import Callback, Run
from cadenza.callbacks import LogTraining
from cadenza.report import small
from cadenza.testing import tiny_run

from .pages import Parsed, logging


def test_it_shows_the_outcome_and_a_curve_for_each_value(tmp_path: Path) -> None:
    run = tiny_run(epochs=200, directory=tmp_path / "first", callbacks=[LogTraining("1 step")])
    seen = Parsed(f"<body>{small(run)}</body>")
    assert seen.words.startswith("first · finished: the limit is reached · 200 epochs, 1,000 steps, 2,000 samples")
    assert seen.all("th", scope="row") == run.history.names
    assert len(seen.all("svg")) == 4
    assert len(seen.text) < 12_000
    assert not {"script", "style", "link"} & {tag for tag, _, _ in seen.elements}


def test_a_run_shows_itself() -> None:
    run = tiny_run(callbacks=[LogTraining("1 step")])
    assert run._repr_html_() == small(run)


def test_a_run_under_way_a_fault_and_odd_values_are_shown_too() -> None:
    shown: list[str] = []

    class Fragile(Callback):
        on_fault = "disable"

        def on_step_start(self, run: Run) -> None:
            raise ConnectionError("<down>")

    class Show(Callback):
        def on_fit_start(self, run: Run) -> None:
            shown.append(small(run))

        def on_epoch_end(self, run: Run) -> None:
            shown.append(small(run))

    tiny_run(callbacks=[Fragile(), logging([1.0, math.nan, math.inf, 2.0, 3.0]), Show()])
    assert "in progress · 0 epochs, 0 steps" in shown[0]
    assert "ConnectionError(&#x27;&lt;down&gt;&#x27;)" in shown[1]
    assert "train/odd" in shown[1]

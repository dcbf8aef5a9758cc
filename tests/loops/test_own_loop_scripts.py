"""The scripts of "From your own loop": each one runs, and needs few changed lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from own_loop import EXAMPLES, SCRIPTS, STAGES, changed  # noqa: E402


def run_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, *, shuffle: bool = True) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    text = (EXAMPLES / f"{script}.py").read_text(encoding="utf-8")
    copy = folder / "script.py"
    copy.write_text(text if shuffle else text.replace("shuffle=True", "shuffle=False"), encoding="utf-8")
    return runpy.run_path(str(copy), run_name="__main__")


@pytest.mark.parametrize("stage", [f"{folder}/{stage}" for folder, stages in STAGES.items() for stage in stages])
def test_each_stage_runs(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_in(tmp_path, stage, monkeypatch)
    if not stage.endswith("by_hand"):
        run = (names.get("trainer") or names["loop"]).run
        assert run.outcome.kind in ("finished", "stopped")
        assert ("eval" in {name.partition("/")[0] for name in run.history.latest}) == any(
            feature in stage for feature in ("evaluation", "stopping", "sinks", "resume", "ranks")
        )


def test_the_first_stages_train_the_weights_of_the_loops_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, model, stage in (("steps", "model", "trainer"), ("attach", "policy", "attached")):
        before, after = (
            run_in(tmp_path, f"{folder}/{one}", monkeypatch, shuffle=False)[model].state_dict() for one in ("by_hand", stage)
        )
        assert all(map(torch.equal, before.values(), after.values())), folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_most_twelve_lines_are_changed(script: str) -> None:
    written, _ = changed(f"{script}_by_hand", script)
    assert written <= 12

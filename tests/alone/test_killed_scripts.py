"""The scripts of "From your own loop" survive ``kill -9``."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("kill_own_loops")
    module.warm_up()
    return module


@pytest.mark.skipif(sys.platform == "win32", reason="kills forked processes")
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("gpt", 1),
        pytest.param("gan", 1, marks=pytest.mark.long),
        ("policy", 1),
        pytest.param("policy", 2, marks=pytest.mark.long),
    ],
)
def test_a_script_that_is_killed_ends_in_the_same_bits(script: str, ranks: int, tmp_path: Path, kills: Any) -> None:
    whole = tmp_path / "whole"
    seconds = kills.left_alone(script, whole, ranks)
    found = kills.killed(script, whole, tmp_path / "killed", seconds, 2, random.Random(ranks), ranks)
    assert found.difference is None
    run = whole / "runs" / script
    assert {"console.log", "metrics.csv", "tensorboard", "checkpoints"} <= {path.name for path in run.iterdir()}
    saved = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert saved["outcome"]["kind"] in ("finished", "stopped")
    assert any('"eval/' in line for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())

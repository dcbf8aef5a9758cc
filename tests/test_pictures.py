"""The pictures of README: real runs, and what the program prints today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("show", ["plan", "terminal"])
def test_a_picture_shows_what_the_program_prints_today(script: Any, show: str, tmp_path: Path) -> None:
    kept = script.lines_of((PICTURES / f"{show}.svg").read_text(encoding="utf-8"))
    today = script.lines_of(script.drawn(kept[0], script.printed(tmp_path / "run", show)))
    assert kept == today, "run: python docs/pictures.py"


def test_the_pictures_are_small_and_readme_shows_each_with_a_text() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for picture in sorted(PICTURES.iterdir()):
        assert picture.stat().st_size < 100_000
        assert f"](docs/pictures/{picture.name})" in readme
        assert f"![](docs/pictures/{picture.name})" not in readme

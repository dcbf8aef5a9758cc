"""The width of the output is what a test says: pytest-xdist sets the variable ``COLUMNS`` in its workers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)

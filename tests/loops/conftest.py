"""Runs in the background, which end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cadenza import Handle, Trainer
from cadenza.testing import tiny_trainer


@pytest.fixture
def started() -> Iterator[Any]:
    """Start runs of many steps, and stop those that the test leaves."""
    handles: list[Handle] = []

    def start(trainer: Trainer | None = None, **arguments: Any) -> Handle:
        handles.append((trainer or tiny_trainer(**{"steps": 1_000_000, **arguments})).start())
        return handles[-1]

    yield start
    for handle in handles:
        if not handle.done:
            handle.stop("the test is over")
            handle.join(60)

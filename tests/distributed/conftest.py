"""Ranks that stand end with the file that started them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.standing import end_ranks


@pytest.fixture(scope="module", autouse=True)
def standing_ranks() -> Iterator[None]:
    yield
    end_ranks()

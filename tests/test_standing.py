"""The ranks that stand for the tests of several processes."""

from __future__ import annotations

import pytest

from tests.distributed.standing import on_ranks


def test_ranks_that_no_fixture_would_end_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"needs the fixture that ends the ranks.*standing_ranks as standing_ranks"):
        on_ranks(int)

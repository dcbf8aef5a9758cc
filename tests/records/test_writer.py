"""The deadline of the last records: they have this time and no more."""

from __future__ import annotations

import threading
import time

import pytest

from cadenza.records.writer import Writer


def test_a_close_within_its_time_is_waited_for() -> None:
    channel = Writer().channel(lambda records: None)
    channel.ask_close(lambda: time.sleep(0.05))
    channel.finish(60.0)
    assert channel.over


def test_a_close_that_takes_too_long_is_an_error_when_its_time_is_over() -> None:
    go, begin = threading.Event(), time.monotonic()
    channel = Writer().channel(lambda records: None)
    channel.ask_close(lambda: go.wait(120))
    with pytest.raises(TimeoutError, match=r"not written within 0\.1 s"):
        channel.finish(0.1)
    assert 0.1 <= time.monotonic() - begin < 60.0
    go.set()

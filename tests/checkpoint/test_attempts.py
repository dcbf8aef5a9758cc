"""How a checkpoint is written: in a thread or at once, again after a failure, and in time before a kill."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint import attempts
from cadenza.checkpoint.attempts import Attempts, Save
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.drivers.agreeing import Meeting
from cadenza.status.progress import Counters
from tests.checkpoint.store.contents import content
from tests.waiting import until


class Failing(Store):
    """A store that fails at its first writes."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(folder, "r1")
        self.failures, self.threads = failures, list[str]()
        self.go = threading.Event()
        self.go.set()

    def write(self, content: Content) -> Saved:
        self.threads.append(threading.current_thread().name)
        self.go.wait()
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(f"{self.failures} left")
        return super().write(content)


def attempted(store: Store, **options: Any) -> Attempts:
    return Attempts(store, lambda: None, lambda saved: [f"before {saved.step}"], lambda: None, **options)


def save(step: int, **facts: Any) -> Save:
    return Save(content(step, weights_only=False), Counters(step=step), **facts)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES_S", (0.002, 0.004))
    monkeypatch.setattr(attempts, "LAST_PAUSES_S", (0.002, 0.004))


@pytest.mark.parametrize(("background", "thread"), [(True, "cadenza-checkpoint"), (False, "MainThread")])
def test_a_write_is_reported_with_what_was_deleted_after_it(tmp_path: Path, background: bool, thread: str) -> None:
    store = Failing(tmp_path, 0)
    writing = attempted(store, background=background)
    writing.start(save(3))
    writing.stop()
    [result] = writing.results
    assert (result.saved, result.pruned, result.save.attempts) == (Saved(3, 1, "step-00000003"), ["before 3"], 1)
    assert (store.threads, writing.busy, writing.failed) == ([thread], False, None)


def test_an_error_of_the_deletion_does_not_undo_the_write(tmp_path: Path) -> None:
    def fail(saved: Saved) -> list[str]:
        raise OSError("in use")

    writing = Attempts(Failing(tmp_path, 0), lambda: None, fail, lambda: None, background=False)
    writing.start(save(3))
    assert isinstance(writing.results[0].pruned, OSError)
    assert (len(writing.results), writing.failed) == (1, None)


@pytest.mark.parametrize("background", [True, False])
def test_a_failure_is_reported_once_and_repeated_until_it_is_written(tmp_path: Path, background: bool) -> None:
    writing = attempted(Failing(tmp_path, 3), background=background)
    writing.start(save(3))
    until(lambda: len(writing.results) == 2)
    writing.stop()
    lost, written = writing.results
    assert str(lost.saved) == "2 left"
    assert (written.saved, written.save.attempts) == (Saved(3, 1, "step-00000003"), 4)
    assert writing.failed is None


@pytest.mark.parametrize("background", [True, False])
def test_without_repeats_there_is_one_attempt(tmp_path: Path, background: bool) -> None:
    store = Failing(tmp_path, 1)
    writing = attempted(store, background=background, repeats=False)
    writing.start(save(3))
    time.sleep(0.02)
    writing.stop()
    writing.finish()
    assert len(store.threads) == len(writing.results) == 1
    assert writing.failed is not None


def test_stop_waits_for_the_first_attempt_and_allows_no_other(tmp_path: Path) -> None:
    store = Failing(tmp_path, 9)
    store.go.clear()
    writing = attempted(store)
    writing.start(save(3))
    assert writing.busy
    stopping = threading.Thread(target=writing.stop)
    stopping.start()
    until(writing._stopped.is_set)
    store.go.set()
    stopping.join()
    assert (len(store.threads), len(writing.results), writing.busy) == (1, 1, False)
    assert writing.failed is not None


def test_a_first_attempt_is_made_even_if_it_is_stopped_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = attempted(Failing(tmp_path, 0))
    writing.stop()
    monkeypatch.setattr(writing._stopped, "clear", lambda: None)
    writing.start(save(3))
    writing.stop()
    assert [result.saved for result in writing.results] == [Saved(3, 1, "step-00000003")]


def test_the_last_attempts_are_made_at_once_and_come_to_an_end(tmp_path: Path) -> None:
    store = Failing(tmp_path, 2)
    writing = attempted(store, background=False)
    writing.start(save(3))
    writing.stop()
    store.failures = 1
    writing.finish()
    assert (writing.failed, writing.results[-1].saved) == (None, Saved(3, 1, "step-00000003"))
    store.failures = 99
    writing.start(save(4))
    writing.stop()
    count = len(store.threads)
    writing.finish()
    assert len(store.threads) == count + len(attempts.LAST_PAUSES_S)
    assert writing.failed is not None


@pytest.mark.parametrize("stopped", ["this", "other"])
def test_if_ranks_write_together_all_of_them_stop_when_one_stops(tmp_path: Path, stopped: str) -> None:
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, (stopped == "other", True)]

    writing = attempted(Store(tmp_path, "r1"), meeting=Meeting(0, 2, gather, lambda value: value))
    if stopped == "this":
        writing._stopped.set()
    assert writing._stopped_within(0.5, together=True) is True
    assert told == [(stopped == "this", False)]


def test_ranks_that_write_together_wait_until_the_pause_of_all_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_SLICE_S", 0.01)
    others, begin = iter([False] * 9 + [True] * 99), time.monotonic()
    meeting = Meeting(0, 2, lambda value: [value, (False, next(others))], lambda value: value)
    writing = attempted(Store(tmp_path, "r1"), meeting=meeting)
    assert writing._stopped_within(0.03, together=True) is False
    assert time.monotonic() - begin >= 0.03
    assert next(others) is True

    def gone(value: Any) -> list[Any]:
        raise RuntimeError("a rank is gone")

    assert attempted(Store(tmp_path, "r1"), meeting=Meeting(0, 2, gone, gone))._stopped_within(0.0, together=True) is True


# content(step).nbytes is 36: the assumed rate below makes a write take 36 s
@pytest.mark.parametrize(
    ("grace_s", "signalled_s_ago", "weights_first"),
    [(None, 0.0, False), (60.0, None, False), (60.0, 0.0, False), (60.0, 50.0, True), (30.0, 0.0, True), (30.0, None, False)],
)
def test_if_the_time_may_be_too_short_the_weights_are_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float | None, signalled_s_ago: float | None, weights_first: bool
) -> None:
    monkeypatch.setattr(attempts, "_BYTES_PER_S", 1.0)
    store = Store(tmp_path, "r1")
    writing = attempted(store, background=False, grace_s=grace_s)
    at = None if signalled_s_ago is None else time.monotonic() - signalled_s_ago
    writing.start(save(3, signalled_at=at))
    written = [store.manifest(saved) for saved in store.saved()]
    assert [(one["weights_only"], one["reason"]) for one in written] == [(True, "a test, weights first")] * weights_first + [
        (False, "a test")
    ]
    assert content(3).nbytes == 36
    assert writing._bytes_per_s > 1.0  # measured now

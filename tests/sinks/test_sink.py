"""All sinks: the writer thread, and targets that are slow, hang or fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import matplotlib.figure
import pytest
import torch

from cadenza import Callback, Figure, Image, Record, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.errors import DirectoryError
from cadenza.hooks.subscription import Subscription
from cadenza.records import writer
from cadenza.records.writer import Channel, Writer
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.status.progress import Counters
from cadenza.status.run_info import RunInfo
from cadenza.testing import check_callback, check_sink, tiny_run
from tests.sinks.samples import failing

log_step = on(Callback.on_step_end)(lambda run: run.log("number", run.progress.step))


class Kept(Sink):
    """Keep each call and its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.steps: list[int] = []
        self.outcomes: list[Outcome | None] = []
        self.threads: set[threading.Thread] = set()
        self.facts, self.came = RunInfo(), Event()

    def open(self, facts: RunInfo) -> None:
        self.calls.append("open")
        self.facts = facts

    def write(self, records: Sequence[Record]) -> None:
        self.calls.append("write")
        self.threads.add(threading.current_thread())
        self.steps += [record.step for record in records]
        self.came.set()

    def close(self, outcome: Outcome | None) -> None:
        self.calls.append("close")
        self.threads.add(threading.current_thread())
        self.outcomes.append(outcome)


class Blocked(Kept):
    """Does not come back from its first record before it is let go."""

    def __init__(self, patience_s: float = 0.05) -> None:
        super().__init__()
        self.go, self.patience_s = Event(), patience_s

    def write(self, records: Sequence[Record]) -> None:
        assert self.go.wait(200)
        super().write(records)

    def letting_go(self) -> Subscription:
        """Return a callback that lets it go at the end of the run, for which it has time."""
        self.patience_s = 200
        return on(Callback.on_fit_end)(lambda run: self.go.set())


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    sink = Blocked()
    yield sink
    sink.go.set()


def lines_in(directory: Path) -> int:
    return len((directory / "metrics.jsonl").read_text().splitlines())


def test_it_is_opened_gets_every_record_in_order_and_is_closed_with_the_outcome() -> None:
    sink = Kept()
    run = tiny_run(callbacks=[log_step, sink], steps=300)
    assert sink.steps == [*range(1, 301)]
    assert (sink.calls[0], sink.calls[-1], sink.calls.count("close")) == ("open", "close", 1)
    assert sink.outcomes == [run.outcome]
    tiny_run(callbacks=[sink])
    assert sink.calls[-2:] == ["open", "close"], "without a record there is only the end"
    tiny_run(callbacks=[log_step, sink], steps=3)
    assert sink.steps[300:] == [1, 2, 3], "one instance serves one run after another"
    assert sink.calls.count("close") == 3


def test_each_sink_has_a_writer_thread_that_ends_with_the_run() -> None:
    one, two = Kept(), Kept()
    tiny_run(callbacks=[log_step, one, two], steps=20)
    [first], [second] = one.threads, two.threads
    assert len({first, second, threading.current_thread()}) == 3
    for thread in (first, second):
        assert thread.daemon
        thread.join(200)
        assert not thread.is_alive()


def test_it_knows_the_run_that_it_serves(tmp_path: Path) -> None:
    sink = Kept()
    run = tiny_run(callbacks=[sink], directory=tmp_path / "first", seed=3)
    assert (sink.facts.id, sink.facts.directory, sink.facts.name, sink.facts.step) == (
        run.info.id,
        tmp_path / "first",
        "first",
        0,
    )
    assert sink.facts.arguments["seed"] == 3
    assert sink.facts.arguments["optimizer"][0]["lr"] == 0.1
    again = tiny_run(callbacks=[sink])
    assert (sink.facts.name, again.info.id) == ("", "")
    assert len(sink.facts.id) == len(run.info.id)  # a tracker needs one to continue after an outage


def test_the_steps_do_not_wait_for_a_slow_one(blocked: Blocked) -> None:
    seen: list[int] = []
    look = on(Callback.on_fit_end)(lambda run: seen.extend(blocked.steps))
    tiny_run(callbacks=[log_step, blocked, look, blocked.letting_go()], steps=50)
    assert seen == []
    assert blocked.steps == [*range(1, 51)]


def test_without_a_directory_the_queue_is_bounded_and_records_left_out_are_reported(
    blocked: Blocked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CAPACITY", 10)
    run = tiny_run(callbacks=[log_step, blocked, blocked.letting_go()], steps=30)
    assert blocked.steps == [*range(1, 11)]
    assert [record.getMessage() for record in caplog.records] == [
        "Blocked: the sink is too slow and its queue is full: records are left out, the first at step 11",
        "Blocked: 20 records did not reach it",
    ]
    assert run.why("not sent").endswith("20 records did not reach it")


def test_with_a_directory_records_that_the_queue_cannot_hold_are_read_back_from_it(
    blocked: Blocked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CAPACITY", 10)
    run = tiny_run(callbacks=[log_step, blocked, blocked.letting_go()], steps=30, directory=tmp_path)
    assert blocked.steps == [*range(1, 31)]
    assert run.decisions == []


def test_pictures_take_room_by_their_size(blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CAPACITY", 1000)
    channel = Channel(Writer(), lambda records: blocked.go.wait(200))
    picture = Record(Counters(), 0.0, {}, {"a": Image(torch.zeros(3, 512, 512))})  # 3 MB: as much as 314 records of numbers
    assert [channel.put(picture) for _ in range(6)] == [True, True, True, True, False, False]
    assert channel.missed == 2


def test_one_that_hangs_is_given_up_at_the_end_and_is_not_used_in_the_next_run(blocked: Blocked, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[log_step, blocked], steps=5, directory=tmp_path)
    assert (run.outcome and run.outcome.kind) == "finished"
    [fault] = run.faults
    assert (fault.callback, str(fault.error)) == ("Blocked", "the last records were not written within 0.05 s")
    assert lines_in(tmp_path) == 5
    [fault] = tiny_run(callbacks=[log_step, blocked], steps=5).faults
    assert str(fault.error) == "the sink is still closing its last run. Make a new sink for this run."
    assert blocked.calls == ["open"]


def test_one_that_hangs_keeps_no_other_one_waiting(blocked: Blocked) -> None:
    before, after = Kept(), Kept()
    run = tiny_run(callbacks=[log_step, before, blocked, after], steps=5)
    assert [fault.callback for fault in run.faults] == ["Blocked"]
    assert before.steps == after.steps == [1, 2, 3, 4, 5]


def test_one_that_hung_for_a_while_gets_all_in_order(blocked: Blocked) -> None:
    blocked.patience_s = 200
    other, ends = Kept(), list[int]()

    @on(Callback.on_step_end)
    def let_go(run: Run) -> None:
        if not other.came.is_set():
            time.sleep(0.001)  # and log again
        elif not blocked.go.is_set():
            blocked.go.set()
            assert blocked.came.wait(200)  # so the first one has come to its end
            ends.append(run.progress.step + 50)
        elif run.progress.step == ends[0]:
            run.stop("enough")

    run = tiny_run(callbacks=[log_step, blocked, other, let_go], steps=100_000)
    assert run.faults == []
    assert blocked.steps == other.steps == [*range(1, ends[0] + 1)]
    for thread in blocked.threads | other.threads:
        thread.join(200)
        assert not thread.is_alive()


class Broken(Kept):
    on_fault = "disable"

    def __init__(self, error: BaseException, at: str = "write") -> None:
        super().__init__()
        self.error, self.at = error, at

    def open(self, facts: RunInfo) -> None:
        super().open(facts)
        self._fail("open")

    def write(self, records: Sequence[Record]) -> None:
        super().write(records)
        self._fail("write")

    def close(self, outcome: Outcome | None) -> None:
        super().close(outcome)
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self.at:
            raise self.error


def test_an_error_in_the_thread_disables_it_with_one_report_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Broken(ConnectionError("tracker down")), Kept()
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        run = tiny_run(callbacks=[log_step, broken, sound], steps=500, directory=tmp_path)
    assert [(fault.callback, fault.error) for fault in run.faults] == [("Broken", broken.error)]
    assert len(caplog.records) == 1
    assert "in _fail\n    raise self.error\nConnectionError: tracker down" in caplog.text
    assert broken.calls == ["open", "write", "close"]
    assert len(sound.steps) == lines_in(tmp_path) == 500
    assert [json.loads(line)["what"] for line in (tmp_path / "decisions.jsonl").read_text().splitlines()] == ["disabled"]


@pytest.mark.parametrize(
    ("error", "at", "moments", "told"),
    [
        (OSError("server down"), "open", {"on_fit_start"}, "server down"),
        (SystemExit(1), "write", {"on_log", "at_end"}, "it asked for an end by SystemExit(1)"),
        (OSError("disk full"), "close", {"at_end"}, "disk full"),
    ],
    ids=["start", "exit", "end"],
)
def test_an_error_at_the_start_at_the_end_or_an_exit_only_disables_the_sink(
    error: BaseException, at: str, moments: set[str], told: str
) -> None:
    run = tiny_run(callbacks=[log_step, Broken(error, at)])
    [fault] = run.faults
    assert fault.moment in moments
    assert str(fault.error) == told
    assert (run.outcome and run.outcome.kind) == "finished"


def test_a_wrong_argument_is_an_error_before_the_run_starts_and_the_error_of_a_run_stays_the_first_one() -> None:
    with pytest.raises(DirectoryError, match="no such folder"):
        tiny_run(callbacks=[log_step, Broken(DirectoryError("no such folder"), at="open")])
    broken = Broken(OSError("disk full"), at="close")
    with pytest.raises(ValueError, match="mine") as caught:
        tiny_run(callbacks=[log_step, broken, failing(2, ValueError("mine"))])
    assert "then Broken.at_end failed as well: OSError('disk full')" in caught.value.__notes__
    assert broken.outcomes == [Outcome("failed", "ValueError('mine')")]


def test_a_sink_with_a_wrong_argument_is_not_closed_and_the_others_are() -> None:
    class Wrong(Kept):
        def open(self, facts: RunInfo) -> None:
            super().open(facts)
            raise DirectoryError("no such folder")

    sound, wrong = Kept(), Wrong()
    with pytest.raises(DirectoryError, match="no such folder"):
        tiny_run(callbacks=[log_step, sound, wrong])
    for thread in sound.threads:
        thread.join(200)
    assert (sound.calls, wrong.calls) == (["open", "close"], ["open"])


def test_remarks_of_the_writer_thread_are_warnings_of_the_training() -> None:
    class Talking(Kept):
        def write(self, records: Sequence[Record]) -> None:
            self.remarks.append(f"{len(records)} came")

    remarks: list[tuple[str, threading.Thread]] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            remarks.append((record.getMessage(), threading.current_thread()))

    handler = Listening()
    logging.getLogger("cadenza").addHandler(handler)
    try:
        tiny_run(callbacks=[log_step, Talking()], steps=3)
    finally:
        logging.getLogger("cadenza").removeHandler(handler)
    assert sum(int(text.split()[1]) for text, _ in remarks) == 3
    assert {thread for _, thread in remarks} == {threading.current_thread()}


def test_a_figure_comes_as_it_was_when_it_was_logged(blocked: Blocked) -> None:
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=10)
    came: list[Any] = []

    class Seeing(Kept):
        def write(self, records: Sequence[Record]) -> None:
            assert blocked.go.wait(200)
            came.extend(record.media["plot"] for record in records)

    @on(Callback.on_step_end)
    def draw(run: Run) -> None:
        figure.set_facecolor("red" if run.progress.step == 1 else "blue")
        run.log("plot", Figure(figure))

    tiny_run(callbacks=[draw, Seeing(), blocked.letting_go()], steps=2)
    assert [tuple(one.pixels.shape) for one in came] == [(3, 10, 20)] * 2
    assert [one.pixels[:, 0, 0].tolist() for one in came] == [[255, 0, 0], [0, 0, 255]]


class Batched(Kept):
    """Holds records over calls of `write`, and loses them when the target fails."""

    targets: ClassVar[dict[str, list[Record]]] = {}

    def open(self, facts: RunInfo) -> None:
        self.target = self.targets.setdefault(facts.id, [])
        self.target[:] = [one for one in self.target if one.step <= facts.step]
        self.held: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.held += records

    def close(self, outcome: Outcome | None) -> None:
        self.target += self.held
        self.held = []

    @classmethod
    def values(cls, info: RunInfo) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for one in cls.targets[info.id]:
            for name, value in one.values.items():
                found.setdefault(name, []).append((one.step, value))
        return found


class Sending(Batched):
    """Sends the records of each call."""

    def write(self, records: Sequence[Record]) -> None:
        self.target += records


def test_an_outage_finds_a_sink_that_loses_what_earlier_calls_of_write_held() -> None:
    check_sink(Sending, Sending.values)
    with pytest.raises(AssertionError, match=r"after an outage \(a return of write means that"):
        check_sink(Batched, Batched.values)


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(Kept)


class Slow(Sink):
    """Writes the numbers of its steps into files, half a second after it got them."""

    def open(self, info: RunInfo) -> None:
        self.folder = info.base

    def write(self, records: Sequence[Record]) -> None:
        time.sleep(0.5)
        for record in records:
            (self.folder / f"written-{record.step}").touch()

    def close(self, outcome: Outcome | None) -> None: ...


def test_a_save_for_a_signal_does_not_wait_for_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may be killed soon: the weights come first."""
    waited: list[int] = []
    monkeypatch.setattr(Writer, "flush", lambda self: waited.append(1))
    at_two = on(Callback.on_step_end, at=2)(lambda run: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        tiny_run(callbacks=[Kept(), log_step, at_two, Checkpoint("1 step", keep_last=None)], steps=6, directory=tmp_path)
    assert {one.name for one in (tmp_path / "checkpoints").glob("step-*")} == {"step-00000001", "step-00000002"}
    assert waited == [1], "for the save before the signal"


def test_a_checkpoint_is_written_when_sinks_have_the_records_before_it(tmp_path: Path) -> None:
    """So a process that is killed right after it has lost none: the run that continues writes the later ones only."""
    callbacks = [LogTraining("1 step"), Slow(), Checkpoint("3 steps", keep_last=None)]
    tiny_run(callbacks=callbacks, steps=6, directory=tmp_path)
    for step in (3, 6):
        manifest = tmp_path / "checkpoints" / f"step-0000000{step}" / "manifest.json"
        assert (tmp_path / f"written-{step}").stat().st_mtime_ns <= manifest.stat().st_mtime_ns

"""Sinks that fail for a while: they are tried again, and what they missed is sent, each record once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from cadenza import Callback, Image, Record, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import CallbackError
from cadenza.records import writer
from cadenza.records.writer import writer_of
from cadenza.sinks import Csv, Dvclive, Mlflow, TensorBoard
from cadenza.sinks.sink import Sink
from cadenza.status.run_info import RunInfo
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.distributed.parts import trainer as trainer_on_ranks
from tests.sinks.readers import CSV, DVCLIVE, MLFLOW, TENSORBOARD, Reader
from tests.sinks.samples import failing, metrics_of
from tests.waiting import until

STEPS, DOWN, UP = 400, 50, 350
EXPECTED = [(step, float(step)) for step in range(1, STEPS + 1)]


class Ticking(Callback):
    """Log the step, and let the writer count a second in each one for new attempts."""

    now = 0.0

    def on_setup(self, run: Run) -> None:
        writer_of(run).clock = lambda: self.now

    def on_step_end(self, run: Run) -> None:
        self.now += 1
        run.log("number", run.progress.step)


class Failing:
    """Breaks a sink from one step to another: a call writes half of its records, then fails."""

    broken = False
    attempts = 0

    def open(self, info: RunInfo) -> None:
        self.attempts += 1
        if self.broken:
            raise ConnectionError("nobody is there")
        super().open(info)  # type: ignore[misc]

    def write(self, records: Sequence[Record]) -> None:
        if self.broken:
            super().write(records[: (len(records) + 1) // 2])  # type: ignore[misc]
            raise ConnectionError("the line is cut")
        super().write(records)  # type: ignore[misc]


class FailingCsv(Failing, Csv):
    def __init__(self) -> None:
        super().__init__("own.csv")


class FailingMlflow(Failing, Mlflow):
    def __init__(self) -> None:
        super().__init__(MLFLOW.uri, experiment="tests")


class FailingTensorBoard(Failing, TensorBoard): ...


class FailingDvclive(Failing, Dvclive): ...


class Outage(Callback):
    """Break a sink when it has all records before a step, and mend it at another."""

    def __init__(self, sink: Any, start: int = DOWN, end: int = UP) -> None:
        self.sink, self.start, self.end = sink, start, end

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.start:
            until(lambda: self.sink._channel._taken == self.start - 1)
            self.cut()
        if run.progress.step == self.start + 1:
            until(lambda: self.sink._channel is None or self.sink._channel.down)
        if run.progress.step == self.end:
            self.mend()

    def cut(self) -> None:
        self.sink.broken = True

    def mend(self) -> None:
        self.sink.broken = False


class Server:
    """A server on this machine that keeps the rows it is sent, and can go away and come back at the same port."""

    def __init__(self) -> None:
        self.rows: dict[int, float] = {}
        self.requests: list[list[int]] = []
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append([step for step, _ in rows])
                outer.rows.update((step, value) for step, value in rows)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Posting(Sink):
    """Posts rows to a server. It knows nothing of outages."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.opened, self.images = url, [], []  # type: ignore[var-annotated]

    def open(self, info: RunInfo) -> None:
        self.opened.append((info.id, info.step, info.continued))
        self._post([])

    def write(self, records: Sequence[Record]) -> None:
        self._post([(record.step, value) for record in records for value in record.values.values()])
        self.images += [record.step for record in records if record.media]

    def close(self, outcome: object) -> None: ...

    def _post(self, rows: list[tuple[int, float]]) -> None:
        with urlopen(Request(self.url, json.dumps(rows).encode(), method="POST"), timeout=100):
            pass


class ServerOutage(Outage):
    """Stop a server at a step, and start it at another."""

    def __init__(self, server: Server, sink: Sink, end: int = UP) -> None:
        super().__init__(sink, end=end)
        self.cut, self.mend = server.stop, server.start  # type: ignore[method-assign]


# -- tests ---------------------------------------------------------------------------------------------

KINDS = [(FailingCsv, CSV), (FailingTensorBoard, TENSORBOARD), (FailingDvclive, DVCLIVE), (FailingMlflow, MLFLOW)]


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLFLOW, "uri", f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")
        yield


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


def happened(run: Run) -> list[tuple[str, str]]:
    return [(decision.what, decision.who) for decision in run.decisions if decision.what in ("failed", "recovered", "not sent")]


@pytest.mark.parametrize(("make", "reader"), KINDS)
def test_a_sink_that_fails_for_300_steps_ends_with_every_row_once(
    make: Callable[[], Sink], reader: Reader, tmp_path: Path
) -> None:
    sink = make()
    run = tiny_run(callbacks=[Ticking(), Outage(sink), sink], steps=STEPS, directory=tmp_path / "run")
    assert reader.values(run.info)["number"] == EXPECTED
    assert happened(run) == [("failed", type(sink).__name__), ("recovered", type(sink).__name__)]
    assert len(run.decisions) == 2


@pytest.mark.parametrize(("make", "reader"), KINDS[:3])
def test_a_run_that_is_continued_sends_what_its_sink_missed_before(
    make: Callable[[], Sink], reader: Reader, tmp_path: Path
) -> None:
    def fit(sink: Sink, *more: Callback) -> Run:
        callbacks = [Ticking(), *more, sink, Checkpoint(every="100 steps")]
        return tiny_trainer(callbacks=callbacks, steps=STEPS, directory=tmp_path / "run").fit(resume="auto")

    first = make()
    with pytest.raises(KeyError, match="on purpose"):
        fit(first, Outage(first, end=1000), failing(250, KeyError("on purpose")))
    run = fit(make())
    assert reader.values(run.info)["number"] == EXPECTED
    [recovered] = [decision.why for decision in run.decisions if decision.what == "recovered"]
    assert re.fullmatch(r"\d+ records after step 49 went to it", recovered)


@pytest.mark.parametrize("in_directory", [True, False])
def test_a_server_that_goes_away_for_300_steps_has_each_row_and_each_image_once(
    server: Server, tmp_path: Path, in_directory: bool
) -> None:
    sink = Posting(server.url)
    draw = on(Callback.on_step_end, every=50)(lambda run: run.log("image", Image(torch.zeros(3, 4, 4))))
    callbacks = [Ticking(), draw, ServerOutage(server, sink), sink]
    run = tiny_run(callbacks=callbacks, steps=STEPS, directory=tmp_path if in_directory else None)
    assert sorted(step for request in server.requests for step in request) == [*range(1, STEPS + 1)]
    assert server.rows == dict(EXPECTED)
    assert sink.images == [*range(50, STEPS + 1, 50)]
    assert len({run_id for run_id, _, _ in sink.opened}) == 1
    assert [what for what, _ in happened(run)] == ["failed", "recovered"]
    [fault] = run.faults
    assert str(fault).startswith("Posting failed in on_log")
    assert "is tried again" in str(fault)


def test_a_server_that_is_away_at_the_start_gets_all_rows_when_it_comes(server: Server, tmp_path: Path) -> None:
    server.stop()
    come = on(Callback.on_step_end, at=100)(lambda run: server.start())
    run = tiny_run(callbacks=[Ticking(), come, Posting(server.url)], steps=STEPS, directory=tmp_path)
    assert server.rows == dict(EXPECTED)
    assert (run.faults[0].moment, run.faults[0].at.step) == ("on_fit_start", 0)
    assert run.why("recovered").split(": ")[1].endswith("after step 0 went to it")


def test_a_run_that_ended_in_the_outage_sends_the_rest_when_it_is_continued(server: Server, tmp_path: Path) -> None:
    def fit(*more: Callback, sink: Posting, steps: int) -> Run:
        callbacks = [Ticking(), sink, *more, Checkpoint(every="100 steps")]
        return tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")

    first = Posting(server.url)
    run = fit(ServerOutage(server, first, end=1000), sink=first, steps=300)
    assert re.search(r": \d+ records did not reach it", run.why("not sent"))
    server.start()
    fit(sink=Posting(server.url), steps=STEPS)
    assert sorted(step for request in server.requests for step in request) == [*range(1, STEPS + 1)]


def test_attempts_get_rarer_up_to_five_minutes(tmp_path: Path) -> None:
    sink, ticking, times = FailingCsv(), Ticking(), list[float]()
    sink.broken = True

    class Watching(Callback):
        def on_step_end(self, run: Run) -> None:
            before = sink.attempts
            if ticking.now in (1, 3, 7, 15, 31, 63, 127, 255, 511, 811, 1111):
                until(lambda: sink.attempts > before)
                times.append(ticking.now)

    run = tiny_run(callbacks=[ticking, sink, Watching()], steps=1200, directory=tmp_path)
    assert len(times) == 11
    assert sink.attempts == 1 + 11 + 1  # at the start, and at the end once more
    assert run.why("not sent").endswith(
        "1,200 records did not reach it. metrics.jsonl has them, and cadenza replay can write them"
    )
    assert [what for what, _ in happened(run)] == ["failed", "not sent"]


def test_one_that_hangs_for_300_steps_gets_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CAPACITY", 20)
    go = Event()

    class Hanging(Csv):
        _writes_now = False

        def write(self, records: Sequence[Record]) -> None:
            if records[-1].step >= DOWN:
                assert go.wait(200)
            super().write(records)

    let_go = on(Callback.on_step_end, at=UP)(lambda run: go.set())
    run = tiny_run(callbacks=[Ticking(), let_go, Hanging("own.csv")], steps=STEPS, directory=tmp_path)
    assert CSV.values(run.info)["number"] == EXPECTED
    assert run.decisions == []


def test_records_of_one_step_are_one_unit(tmp_path: Path) -> None:
    log_epoch = on(Callback.on_epoch_end)(lambda run: run.log("whole", run.progress.epoch))
    table, board = FailingCsv(), FailingTensorBoard()
    callbacks = [Ticking(), Outage(table, 4, 8), Outage(board, 4, 8), log_epoch, table, board]
    run = tiny_run(callbacks=callbacks, epochs=3, batches=4, directory=tmp_path)
    lines = metrics_of(tmp_path)
    assert [step for step, _ in CSV.values(run.info)["step"]] == [line["step"] for line in lines]
    assert TENSORBOARD.values(run.info)["number"] == [(line["step"], line["number"]) for line in lines if "number" in line]


def test_only_a_sink_is_tried_again() -> None:
    with pytest.raises(CallbackError, match=r"'raise' or 'disable'; got 'retry'. Only a Sink is tried again"):

        class Mine(Callback):
            on_fault = "retry"


def test_on_several_ranks_the_sink_of_the_main_process_is_tried_again(tmp_path: Path) -> None:
    def training() -> list[str]:
        sink = FailingCsv()

        class Short(Callback):
            def on_step_end(self, run: Run) -> None:
                sink.broken = run.progress.step in (2, 3)

        run = trainer_on_ranks(max_steps=6, callbacks=[Ticking(), Short(), sink], directory=tmp_path).fit()
        return [what for what, _ in happened(run)]

    assert launch(training) == [["failed", "recovered"], []]
    with (tmp_path / "own.csv").open() as file:
        assert [*dict.fromkeys(line.split(",")[1] for line in file)] == ["step", *"123456"]

"""Sinks that fail for a while, a server that goes away, and readers of what arrived."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

from cadenza import Callback, Record, Run
from cadenza.records.writer import writer_of
from cadenza.sinks import Csv, Dvclive, Mlflow, TensorBoard
from cadenza.sinks.sink import Sink
from cadenza.status.run_info import RunInfo
from tests.waiting import until

STEPS, DOWN, UP = 400, 50, 350
EXPECTED = [(step, float(step)) for step in range(1, STEPS + 1)]


class Clock:
    """Seconds that a test counts: one for each step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def ticking(clock: Clock) -> Callback:
    """Count a second in each step, and use this clock for new attempts."""

    class Ticking(Callback):
        def on_setup(self, run: Run) -> None:
            writer_of(run).clock = clock

        def on_step_end(self, run: Run) -> None:
            clock.now += 1
            run.log("number", run.progress.step)

    return Ticking()


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


def outage(sink: Any, start: int = DOWN, end: int = UP) -> Callback:
    """Break a sink when it has all records before a step, and mend it at another."""

    class Outage(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.progress.step == start:
                until(lambda: sink._channel._taken == start - 1)
                sink.broken = True
            if run.progress.step == start + 1:
                until(lambda: sink._channel is None or sink._channel.down)
            if run.progress.step == end:
                sink.broken = False

    return Outage()


class FailingCsv(Failing, Csv): ...


class FailingTensorBoard(Failing, TensorBoard): ...


class FailingMlflow(Failing, Mlflow): ...


class FailingDvclive(Failing, Dvclive): ...


def rows_of_csv(run: Run) -> list[tuple[int, float]]:
    with (run.info.base / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row["number"])) for row in csv.DictReader(file)]


def rows_of_tensorboard(run: Run) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.info.base / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("number")]


def rows_of_mlflow(run: Run) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.info.directory}/mlflow.db")
    experiment = client.get_experiment_by_name("cadenza")
    assert experiment is not None
    [theirs] = client.search_runs([experiment.experiment_id])
    return [(point.step, point.value) for point in client.get_metric_history(theirs.info.run_id, "number")]


def rows_of_dvclive(run: Run) -> list[tuple[int, float]]:
    with (run.info.base / "dvclive" / "plots" / "metrics" / "number.tsv").open() as file:
        return [(int(row["step"]), float(row["number"])) for row in csv.DictReader(file, delimiter="\t")]


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


def stopping(server: Server, sink: Sink, start: int = DOWN, end: int = UP) -> Callback:
    class Stopping(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.progress.step == start:
                server.stop()
            if run.progress.step == start + 1:
                until(lambda: sink._channel.down)  # type: ignore[union-attr]
            if run.progress.step == end:
                server.start()

    return Stopping()

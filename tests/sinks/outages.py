"""Sinks that fail for a while, and a server that goes away."""

from __future__ import annotations

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
from tests.sinks.readers import MLFLOW
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

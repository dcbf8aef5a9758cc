"""Send records to MLflow."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import DirectoryError
from cadenza.records.record import Image, Media, Text
from cadenza.sinks.media import picture_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from cadenza.records.record import Record
    from cadenza.run import Run
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_METRICS = 1000  # the most in a request
_PARAMS = 100
_NAME = 250  # the most characters
_VALUE = 6000
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}
_STATUS |= dict.fromkeys(("rolled back", "left", "preempted", "interrupted"), "KILLED")  # until it continues
_TAG = "cadenza.run_id"


class Mlflow(Sink):
    """Send numbers, `Image`, `Figure`, `Text` and the run's arguments to an MLflow server, or to a database file.

    Each value has its step and time. The arguments of the trainer become the params, with names such as ``optimizer.0.lr``. A
    resumed run continues its MLflow run and does not write existing values again.

    With `tracking_uri`, ``mlflow.set_tracking_uri(...)`` or ``MLFLOW_TRACKING_URI``, the MLflow run is the active run of the
    thread of the training, so that ``mlflow.log_metric(...)`` in a callback adds to it, unless an MLflow run of the script is
    active, or the script has set another URI: they are not affected. Then the server is opened before the first step.
    Otherwise, the writer thread opens the server or database, so that the training starts at once.

    If it cannot be reached, there is one warning, the training continues, and the sink retries; see `Sink`. MLflow's telemetry
    is off unless ``MLFLOW_DISABLE_TELEMETRY`` is set to another value.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        tracking_uri: The URI of the server or database. None: ``MLFLOW_TRACKING_URI``, which ``mlflow.set_tracking_uri(...)``
            sets, else the database file ``mlflow.db`` in the directory of the run, with the media in the same directory.
        experiment: The name of the experiment, which is created if it does not exist. None takes that of
            ``mlflow.set_experiment(...)`` if the URI is MLflow's own, else ``MLFLOW_EXPERIMENT_NAME``, else ``"cadenza"``.
        run_name: The name of the run in MLflow. None takes the name of the directory of the run.
        tags: The tags of the run.
        config: More params. They replace arguments of the trainer with the same names.

    Raises:
        MissingExtraError: mlflow is not installed.
        DirectoryError: At the start of a run: there is neither a URI nor a directory.
    """

    _package = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tracking_uri: str | None = tracking_uri
        self.experiment: str | None = experiment
        self.run_name: str | None = run_name
        self.tags: dict[str, str] = dict(tags or {})
        self.config: dict[str, Any] = dict(config or {})
        self._link: _Link | None = None
        self._lends_uri = False  # for the duration of the run, because the script has no active run
        self._left_out: set[str] = set()

    def open(self, info: RunInfo) -> None:
        self._link, self._tried, self._left_out = None, False, set()
        self._info, self._uri = info, self._tracking_uri(info)
        if (file := _file(self._uri)) is not None:  # otherwise MLflow would retry for minutes
            own_folder(file.parent, sink="Mlflow")
        _import(self._uri)
        if _is_current(self._uri):
            self._opened()

    def on_fit_start(self, run: Run) -> None:
        self._lends_uri = run.is_main and self.tracking_uri is not None and _lend(self.tracking_uri)
        if self._lends_uri:
            run.at_end(partial(_take_back, self.tracking_uri))
        super().on_fit_start(run)
        if self._link is not None and _is_current(self._uri):
            self._activate(run, self._link.run)

    def write(self, records: Sequence[Record]) -> None:
        link = self._opened()
        rows = [
            (self._name(name), float(value), _milliseconds(record), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        link.log(rows)
        for record in records:
            for name, medium in record.media.items():
                if not link.show(self._name(name), medium, record) and name not in self._left_out:
                    self._left_out.add(name)
                    self.remarks.append(f"{name!r} of step {record.step} is not an Image, Figure or Text, and is left out")

    def close(self, outcome: Outcome | None) -> None:
        if self._link is None and self._tried:  # the server could not be opened
            return
        link, self._link = self._opened(), None
        link.end("KILLED" if outcome is None else _STATUS[outcome.kind])

    def abandon(self) -> None:
        self._link = None  # ending the run on an unresponsive server would take minutes

    def _tracking_uri(self, info: RunInfo) -> str:
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri:
            return uri
        if info.directory is None:
            raise DirectoryError(
                "Mlflow has neither a URI nor a directory to write to. Give Trainer(directory=...) for 'mlflow.db' in it, or "
                "Mlflow(tracking_uri=...)."
            )
        return f"sqlite:///{info.directory.resolve() / 'mlflow.db'}"

    def _activate(self, run: Run, run_id: str) -> None:
        """Make an MLflow run this thread's active run until training ends, unless the script has an active run."""
        import mlflow

        if mlflow.active_run() is not None or "MLFLOW_RUN_ID" in os.environ:
            return
        try:
            mlflow.start_run(run_id, log_system_metrics=False)
        except Exception as error:
            self.remarks.append(f"mlflow.log_metric(...) of other code does not add to the MLflow run of this sink: {error}")
        else:
            run.at_end(partial(_deactivate, run_id))

    def _opened(self) -> _Link:
        if self._link is None:
            self._tried = True
            own = self.experiment is None and not self._lends_uri and _is_current(self._uri)
            selected = _selected() if own else None
            named = self.experiment or selected or os.environ.get("MLFLOW_EXPERIMENT_NAME")
            link = _Link(self._uri, named or "cadenza")
            tags = {**self.tags, _TAG: self._info.id} if self._info.id else self.tags
            link.begin(self.run_name or self._info.name, tags)
            given = {**self._info.arguments, **self.config}
            params = {_allowed(name): str(value)[:_VALUE] for name, value in _flat(given)}
            self.remarks.extend(link.configure(params))
            self._link = link
        return self._link

    def _name(self, name: str) -> str:
        allowed = _allowed(name)
        if allowed != name and name not in self._left_out:
            self._left_out.add(name)
            self.remarks.append(
                f"{name!r} is logged as {allowed!r}, because MLflow does not allow a character of the name, or its length"
            )
        return allowed


class _Link:
    """A connection to a server or database of MLflow, and a run in it."""

    def __init__(self, uri: str, experiment: str) -> None:
        from mlflow import MlflowClient

        if uri.startswith(("http://", "https://")):
            _knock(uri)
        self.client: MlflowClient = MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name(experiment)
        self.experiment: str = (
            known.experiment_id if known else self.client.create_experiment(experiment, artifact_location=_media_directory(uri))
        )
        self.run = ""
        self._continued = False
        self._there: dict[str, set[tuple[int, float | None]]] = {}

    def begin(self, name: str, tags: Mapping[str, str]) -> None:
        """Continue the MLflow run of this run, or create one."""
        wanted = f"tags.`{_TAG}` = '{tags.get(_TAG)}'"
        if _TAG in tags and (found := self.client.search_runs([self.experiment], wanted, max_results=1)):
            self.run, self._continued = found[0].info.run_id, True
            self.client.update_run(self.run, status="RUNNING")
        else:
            self.run = self.client.create_run(self.experiment, run_name=name or None, tags=dict(tags)).info.run_id

    def configure(self, params: Mapping[str, str]) -> Iterator[str]:
        """Write the params that MLflow lacks. Yield a message for each existing param with another value."""
        from mlflow.entities import Param

        there = self.client.get_run(self.run).data.params if self._continued else {}
        new = [Param(name, value) for name, value in params.items() if name not in there]
        for start in range(0, len(new), _PARAMS):
            self.client.log_batch(self.run, params=new[start : start + _PARAMS])
        for name, value in params.items():
            if there.get(name, value) != value:
                yield f"{name} is {value} now, and MLflow keeps the first value, {there[name]}"

    def log(self, rows: Sequence[tuple[str, float, int, int]]) -> None:
        """Write rows of (name, value, time in ms, step) in batches; single requests take a hundred times as long."""
        from mlflow.entities import Metric

        metrics = [Metric(*row) for row in rows if not (self._continued and self._has(row[0], row[3], row[1]))]
        for start in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.run, metrics=metrics[start : start + _METRICS])

    def show(self, name: str, medium: Media, record: Record) -> bool:
        """Write a medium as an artifact. Return False if MLflow does not support its type."""
        match medium:
            case Text(text):
                self.client.log_text(self.run, text, f"text/{name}/step_{record.step}.md")
            case Image():
                when = _milliseconds(record)
                self.client.log_image(self.run, picture_of(medium), key=name, step=record.step, timestamp=when)
            case _:
                return False
        return True

    def end(self, status: str) -> None:
        """Set the final status of the run."""
        self.client.set_terminated(self.run, status)

    def _has(self, name: str, step: int, value: float) -> bool:
        """Return whether MLflow already has a value, since a resumed run repeats the steps after its checkpoint."""
        if name not in self._there:
            history = self.client.get_metric_history(self.run, name)
            self._there[name] = {(metric.step, _comparable(metric.value)) for metric in history}
        return (step, _comparable(value)) in self._there[name]


def _import(uri: str) -> None:
    """Import MLflow's modules in the training thread, where their warnings can be filtered."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # mlflow reads it on import and on each call
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
        import_module("mlflow.entities")
        if uri.startswith(("sqlite", "postgresql", "mysql", "mssql")):
            import_module("mlflow.store.tracking.sqlalchemy_store")


def _is_current(uri: str) -> bool:
    """Return whether the functions of MLflow, such as ``mlflow.log_metric``, write to a URI."""
    import mlflow

    return bool(mlflow.get_tracking_uri() == uri)


def _lend(uri: str) -> bool:
    """Point MLflow's functions to a URI if the script has set none. Return whether it was set here."""
    _import(uri)
    import mlflow

    if mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
        return False
    mlflow.set_tracking_uri(uri)
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # MLflow sets it, and other sinks read it
    return True


def _take_back(uri: str | None) -> None:
    import mlflow

    if mlflow.get_tracking_uri() == uri:  # otherwise the script has set one since
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # it removes the URI


def _selected() -> str | None:
    """Return the name of the experiment of ``mlflow.set_experiment``, which sets ``MLFLOW_EXPERIMENT_ID``."""
    import mlflow

    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    return mlflow.get_experiment(experiment_id).name if experiment_id else None


def _deactivate(run_id: str) -> None:
    """Remove an MLflow run from the active ones. ``mlflow.end_run`` would wait minutes for an unresponsive server."""
    from mlflow.tracking.fluent import _active_run_stack

    active = _active_run_stack.get()  # type: ignore[no-untyped-call]
    active[:] = [run for run in active if run.info.run_id != run_id]


def _knock(uri: str) -> None:
    """Raise `OSError` if the server does not answer, because MLflow would retry for minutes."""
    import requests

    with suppress(requests.exceptions.SSLError):  # the server answers; the settings of MLflow decide whether to trust it
        requests.get(uri, timeout=10)


def _media_directory(uri: str) -> str | None:
    """Return the media directory: the one next to a database file, or None for the server's default."""
    file = _file(uri)
    return None if file is None else str(file.parent / "mlartifacts")


def _file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _milliseconds(record: Record) -> int:
    return round(round(record.time, 3) * 1000)  # rounded as in metrics.jsonl, so that a replay writes the same time


def _comparable(value: float) -> float | None:
    """Return a value that is not NaN and fits the range of MLflow's databases."""
    return None if math.isnan(value) else min(max(value, -sys.float_info.max), sys.float_info.max)


def _allowed(name: str) -> str:
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_NAME].rstrip("/") or "_"


def _flat(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names such as ``optimizer.0.lr`` with their values; a list of plain values stays a single value."""
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _flat({f"{key}.{index}": item for index, item in enumerate(value)}, prefix)
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else value

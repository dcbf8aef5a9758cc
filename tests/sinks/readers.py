"""Each sink that keeps numbers, made so that it writes on this machine alone, and a reader of what it wrote."""

from __future__ import annotations

import csv
import json
import math
import os
import sqlite3
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and comes with swanlab and dvclive
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cadenza.records import read_records
from cadenza.sinks import Comet, Csv, Dvclive, JsonLines, Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from cadenza.status.run_info import RunInfo
from tests.sinks.wandb_file import WandbFile

Values = dict[str, list[tuple[int, float]]]
QUIET = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}


class Reader:
    """A sink and what it left. `info` is that of a run with a directory."""

    lowest = -math.inf
    """What arrives for negative infinity."""
    counts: Any = (-1, 1, 3)
    """What arrives for the histogram of the samples: ends and number."""
    remarks: tuple[str, ...] = (
        "'w' of step 1 has no values to show, and is left out",
        "'tone' of step 1 has no values to show, and is left out",
    )
    """What is said of media without content."""

    def __str__(self) -> str:
        return type(self).__name__

    def make(self, **arguments: Any) -> Any:
        raise NotImplementedError

    def values(self, info: RunInfo) -> Values:
        """Return the (step, value) of each name."""
        raise NotImplementedError

    def times(self, info: RunInfo) -> list[float]:
        """Return the time of each value of ``x``."""
        raise NotImplementedError

    def media(self, info: RunInfo) -> dict[str, Any]:
        """Return what is kept of the samples: of a histogram its counts, of others the content."""
        raise NotImplementedError

    def outcome(self, info: RunInfo) -> str:
        raise NotImplementedError


class OfJsonLines(Reader):
    def make(self, **arguments: Any) -> Any:
        return JsonLines("own.jsonl")

    def values(self, info: RunInfo) -> Values:
        found: Values = {}
        for record in read_records(info.base / "own.jsonl"):
            for name, value in record.values.items():
                found.setdefault(name, []).append((record.step, value))
        return found


class OfCsv(Reader):
    def make(self, **arguments: Any) -> Any:
        return Csv("own.csv")

    def values(self, info: RunInfo) -> Values:
        with (info.base / "own.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in rows[0]}


class OfTensorBoard(Reader):
    def make(self, **arguments: Any) -> Any:
        return TensorBoard(**arguments)

    def events(self, info: RunInfo) -> Any:
        return EventAccumulator(str(info.base / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()

    def values(self, info: RunInfo) -> Values:
        events = self.events(info)
        return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}

    def times(self, info: RunInfo) -> list[float]:
        return [event.wall_time for event in self.events(info).Scalars("x")]

    def media(self, info: RunInfo) -> dict[str, Any]:
        events, found = self.events(info), dict[str, Any]()
        tags = events.Tags()
        found |= {name: events.Images(name)[0].encoded_image_string for name in tags["images"]}
        found |= {name: events.Audio(name)[0].encoded_audio_string for name in tags["audio"]}
        for name in tags["histograms"]:
            counted = events.Histograms(name)[0].histogram_value
            assert (counted.num, counted.sum) == (3, 0)
            found[name] = (counted.min, counted.max, sum(counted.bucket))
        for name in tags["tensors"]:
            found[name.removesuffix("/text_summary")] = make_ndarray(events.Tensors(name)[0].tensor_proto).item()
        return found


class OfWandb(Reader):
    def make(self, **arguments: Any) -> Any:
        return Wandb("tests", mode="offline", settings=QUIET, **arguments)

    def files(self, directory: Path) -> list[WandbFile]:
        return [WandbFile(path) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]

    def file(self, directory: Path) -> WandbFile:
        [file] = self.files(directory)
        return file

    def values(self, info: RunInfo) -> Values:
        return _by_name((row["_step"], row) for file in self.files(info.base) for row in file.rows)

    def times(self, info: RunInfo) -> list[float]:
        return [row["_timestamp"] for row in self.file(info.base).rows]

    def media(self, info: RunInfo) -> dict[str, Any]:
        row, found = self.file(info.base).rows[0], dict[str, Any]()
        for key, path in row.items():
            if key.endswith("/path"):
                [file] = info.base.glob(f"wandb/offline-run-*/files/{path}")
                found[key.removesuffix("/path")] = file.read_bytes()
        return found | {"w": (row["w/bins"][0], row["w/bins"][-1], sum(row["w/values"]))}

    def outcome(self, info: RunInfo) -> str:
        return str(self.file(info.base).exit_code)


class OfSwanlab(Reader):
    remarks = (
        "'w' of step 1 is a Histogram, which SwanLab does not have, and is left out",
        "'tone' of step 1 is Audio, for which SwanLab needs the package 'soundfile', and is left out"
        if find_spec("soundfile") is None
        else Reader.remarks[1],
    )

    def make(self, **arguments: Any) -> Any:
        return Swanlab("tests", mode="offline", **arguments)

    def files(self, directory: Path) -> list[SwanlabFile]:
        return [SwanlabFile(path) for path in sorted(directory.glob("swanlog/run-*/run-*.swanlab"))]

    def file(self, directory: Path) -> SwanlabFile:
        [file] = self.files(directory)
        return file

    def values(self, info: RunInfo) -> Values:
        files = self.files(info.base)
        return _by_name((one.step, {one.key: one.value.number}) for file in files for one in file.all("scalar"))

    def media(self, info: RunInfo) -> dict[str, Any]:
        file, found = self.file(info.base), dict[str, Any]()
        for medium in (one for one in file.all("media") if one.key != "tone"):  # a sound needs another package
            [item] = medium.value.items
            [path] = file.folder.glob(f"media/*/{item.filename}")
            found[medium.key] = path.read_bytes()
        return found

    def outcome(self, info: RunInfo) -> str:
        [finish] = self.file(info.base).all("finish")
        return f"{finish.state} {finish.error}"


class SwanlabFile:
    """What stands in a run's ``run-*.swanlab`` file."""

    def __init__(self, path: Path) -> None:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        self.folder = path.parent
        reader: Any = DataStoreReader()
        reader.open(path)
        with closing(reader):
            self.records = [Record.FromString(entry) for entry in reader]

    def all(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.HasField(kind)]

    @property
    def config(self) -> dict[str, Any]:
        content = yaml.safe_load((self.folder / "files" / "config.yaml").read_text())
        return {name: entry["value"] for name, entry in content.items()}


class OfComet(Reader):
    counts = 3  # the ends are not in the file

    def make(self, **arguments: Any) -> Any:
        return Comet("tests", mode="offline", **arguments)

    def archives(self, directory: Path) -> list[CometArchive]:
        files = sorted((directory / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
        return [CometArchive(file) for file in files]

    def values(self, info: RunInfo) -> Values:
        found: Values = {}
        for archive in self.archives(info.base):
            assert archive.experiment["offline_id"] == info.id
            for metric in (payload["metric"] for payload in archive.all("metric_msg")):
                found.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
        return found

    def media(self, info: RunInfo) -> dict[str, Any]:
        [archive] = self.archives(info.base)
        found: dict[str, Any] = {}
        for payload in archive.all("file_upload"):
            extra = payload["additional_params"]
            name = (payload["metadata"] or {}).get("name") or extra.get("figName") or extra.get("fileName")
            found[name.removesuffix(".wav")] = archive.zip.read(payload["file_path"])
        return found | {"w": sum(count for _, count in json.loads(found["w"])["index_values"])}

    def outcome(self, info: RunInfo) -> str:
        [archive] = self.archives(info.base)
        return f"{archive.others['outcome']}: {archive.others['reason']}"


class CometArchive:
    """One archive of an experiment."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.experiment = json.loads(self.zip.read("experiment.json"))
        self.messages = [json.loads(line) for line in self.zip.read("messages.json").splitlines()]

    def all(self, kind: str) -> list[Any]:
        return [message["payload"] for message in self.messages if message["type"] == kind]

    @property
    def others(self) -> dict[str, Any]:
        return {payload["key"]: payload["value"] for payload in self.all("log_other")}

    @property
    def parameters(self) -> dict[str, Any]:
        params = [payload.get("param") or payload["params"] for payload in self.all("parameter_msg")]
        return {one["paramName"]: one["paramValue"] for one in params if one["source"] == "manual"}


class OfTrackio(Reader):
    """All runs are in one database, under the name of their directory and the begin of their id."""

    def make(self, **arguments: Any) -> Any:
        return Trackio("tests", **arguments)

    @property
    def database(self) -> Path:
        return Path(os.environ["TRACKIO_DIR"], "tests.db")

    def select(self, query: str, *arguments: str) -> list[Any]:
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(query, arguments).fetchall()

    def rows(self, run: str) -> list[tuple[int, dict[str, Any]]]:
        """Return all (step, values) of a run in order."""
        found = self.select("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", run)
        return [(step, json.loads(values)) for step, values in found]

    def name(self, info: RunInfo) -> str:
        return f"{info.name}-{info.id[:8]}"

    def values(self, info: RunInfo) -> Values:
        found: Values = {}
        for step, row in self.rows(self.name(info)):
            for name, value in row.items():
                if not isinstance(value, dict):
                    found.setdefault(name, []).append((step, float(value)))  # NaN is a string
        return found

    def media(self, info: RunInfo) -> dict[str, Any]:
        [(_, row)] = self.rows(self.name(info))
        files = self.database.parent / "media"
        found: dict[str, Any] = {name: (files / row[name]["file_path"]).read_bytes() for name in ("whole", "bright", "tone")}
        found["w"] = (row["w"]["bins"][0], row["w"]["bins"][-1], sum(row["w"]["values"]))
        return found | {"note": row["note"]["_value"].encode()}


class OfMlflow(Reader):
    """All runs are in one database: to make one takes seconds."""

    lowest = -sys.float_info.max  # what a database can hold
    remarks = tuple(f"'{name}' of step 1 is not an Image, Figure or Text, and is left out" for name in ("w", "tone"))
    uri = ""
    """Set by the fixture of a module."""

    def make(self, **arguments: Any) -> Any:
        return Mlflow(self.uri, experiment="tests", **arguments)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def run(self, info: RunInfo, experiment: str = "tests", client: Any = None) -> Any:
        client = client or self.client
        known = client.get_experiment_by_name(experiment)
        [run] = client.search_runs([known.experiment_id], f"tags.`cadenza.run_id` = '{info.id}'")
        return run

    def values(self, info: RunInfo) -> Values:
        run = self.run(info)
        histories = {name: self.client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return {name: [(point.step, point.value) for point in history] for name, history in histories.items()}

    def times(self, info: RunInfo) -> list[float]:
        return [point.timestamp / 1000 for point in self.client.get_metric_history(self.run(info).info.run_id, "x")]

    def media(self, info: RunInfo) -> dict[str, Any]:
        folder = Path(self.run(info).info.artifact_uri)
        found: dict[str, Any] = {path.name.partition("+")[0]: path.read_bytes() for path in folder.glob("images/*.png")}
        [note] = [path for path in folder.glob("text/note/**/*") if path.is_file()]
        return found | {"note": note.read_bytes()}

    def outcome(self, info: RunInfo) -> str:
        return str(self.run(info).info.status)


class OfDvclive(Reader):
    remarks = tuple(
        f"'{name}' of step 1 is {kind}, which DVCLive does not have, and is left out"
        for name, kind in (("w", "Histogram"), ("tone", "Audio"))
    )

    def make(self, **arguments: Any) -> Any:
        return Dvclive(**arguments)

    def values(self, info: RunInfo) -> Values:
        found, folder = {}, info.base / "dvclive" / "plots" / "metrics"
        for file in folder.rglob("*.tsv"):
            with file.open(newline="") as lines:
                _, *rows = csv.reader(lines, delimiter="\t")
            found[file.relative_to(folder).with_suffix("").as_posix()] = [(int(step), float(value)) for step, value in rows]
        return found

    def media(self, info: RunInfo) -> dict[str, Any]:
        pictures = (info.base / "dvclive" / "plots" / "images").glob("*/1.png")
        return {path.parent.name: path.read_bytes() for path in pictures}

    def summary(self, info: RunInfo) -> Any:
        return json.loads((info.base / "dvclive" / "metrics.json").read_text())

    def outcome(self, info: RunInfo) -> str:
        return str(self.summary(info)["outcome"])


@contextmanager
def services(folder: Path) -> Iterator[None]:
    """Give all tests of a module one database for MLflow and one process for wandb, without an account of the user."""
    import wandb

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_ERROR_REPORTING", "false")  # it reports its own errors to its maker
        for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setattr(MLFLOW, "uri", f"sqlite:///{folder}/mlflow.db")
        yield
        wandb.teardown()


def _by_name(rows: Iterator[tuple[int, dict[str, Any]]]) -> Values:
    """Return the values of several files of one run: a server takes the later one of a step."""
    found: dict[str, dict[int, float]] = {}
    for step, row in rows:
        for name, value in row.items():
            found.setdefault(name, {})[step] = value
    return {name: sorted(pairs.items()) for name, pairs in found.items()}


JSON_LINES, CSV, TENSORBOARD = OfJsonLines(), OfCsv(), OfTensorBoard()
WANDB, SWANLAB, COMET, TRACKIO, MLFLOW, DVCLIVE = OfWandb(), OfSwanlab(), OfComet(), OfTrackio(), OfMlflow(), OfDvclive()
TRACKERS = [WANDB, SWANLAB, COMET, TRACKIO, MLFLOW, DVCLIVE]
ALL = [JSON_LINES, CSV, TENSORBOARD, *TRACKERS]

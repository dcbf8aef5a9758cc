"""What ``cadenza replay`` does: take the records of a run from its directory to a sink."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cadenza.commands.output import say
from cadenza.errors import CadenzaError, DirectoryError
from cadenza.files.disk import read_object
from cadenza.files.locking import is_held
from cadenza.records.reading import NewRecords
from cadenza.report.story import outcome_in
from cadenza.sinks import Comet, Csv, Dvclive, Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.status.formats import counted
from cadenza.status.run_info import RunInfo

_BATCH = 1000  # records; so much is in memory, and goes to the sink at once
_POLL_S = 1.0


def _mlflow(output: str | None) -> Mlflow:
    return Mlflow(output if output is None or "://" in output else f"sqlite:///{Path(output).resolve()}")


@dataclass(frozen=True, slots=True)
class Target:
    """A sink that records can be replayed to."""

    make: Callable[[str | None], Sink]
    """Makes the sink for an ``--output``."""

    usual: str = ""
    """The file or folder of this sink in a run directory; empty if it writes elsewhere."""


TARGETS = {
    "comet": Target(lambda output: Comet(directory=output), "comet"),
    "csv": Target(lambda output: Csv(output or "metrics.csv"), "metrics.csv"),
    "dvclive": Target(Dvclive, "dvclive"),
    "mlflow": Target(_mlflow, "mlflow.db"),
    "swanlab": Target(lambda output: Swanlab(directory=output), "swanlog"),
    "tensorboard": Target(TensorBoard, "tensorboard"),
    "trackio": Target(Trackio),
    "wandb": Target(lambda output: Wandb(directory=output), "wandb"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Take the records of a run, which it keeps in metrics.jsonl, to a tracker, or to a table. "
        "The run itself is not changed."
    )
    parser.epilog = "examples:\n  cadenza replay runs/first --to csv\n  cadenza replay runs/first --to tensorboard --follow"
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory; the run may be over, killed or going on")
    parser.add_argument("--to", required=True, choices=TARGETS, help="where to take them")
    parser.add_argument(
        "--output", metavar="TARGET", help="a file, folder, tracking URI or, for trackio, project; inside of RUN if left out"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    parser.set_defaults(command=replay)


def replay(arguments: argparse.Namespace) -> None:
    """Write the records to the sink, and print their number.

    Raises:
        DirectoryError: The directory holds no run, or the target exists.
        CadenzaError: The tracker does not start, for example without a login or a server.
    """
    directory: Path = arguments.run
    info = _info(directory)
    sink = _sink(arguments.to, arguments.output, directory)
    records, count = NewRecords(directory / "metrics.jsonl"), 0
    _open(sink, arguments.to, _run_info(directory, info))
    try:
        count += _feed(sink, records)
        while arguments.follow and is_held(directory):
            time.sleep(_POLL_S)
            count += _feed(sink, records)
        count += _feed(sink, records) if arguments.follow else 0  # what came before its end was noticed
    finally:
        sink.close(_outcome(directory))
        for remark in sink.remarks:
            say(f"{arguments.to}: {remark}")
    written = f"{counted(count, 'record')} of {directory} are in {arguments.to} now"
    say(f"{written}; pictures, sounds and texts are not in metrics.jsonl")
    if records.broken:
        say(f"{records.broken} lines of metrics.jsonl cannot be read, and are left out")


def _open(sink: Sink, name: str, info: RunInfo) -> None:
    try:
        sink.open(info)
    except CadenzaError:
        raise
    except Exception as error:  # of the tracker
        raise CadenzaError(f"{name} does not start: {type(error).__name__}: {error}") from error


def _feed(sink: Sink, records: NewRecords) -> int:
    new, count = records.read(), 0
    while batch := list(islice(new, _BATCH)):
        sink.write(batch)
        count += len(batch)
    return count


def _holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _sink(name: str, output: str | None, directory: Path) -> Sink:
    target = TARGETS[name]
    elsewhere = not target.usual or (name == "mlflow" and "MLFLOW_TRACKING_URI" in os.environ)
    if output is None and not elsewhere and _holds_something(directory / target.usual):
        raise DirectoryError(
            f"{str(directory / target.usual)!r} exists already, perhaps written by the run itself, and replay never adds "
            "to a target. Give another --output."
        )
    if output is None or not target.usual or "://" in output:
        return target.make(output)
    target_path = Path(output).resolve()  # relative to the working directory, not to the run's directory
    if _holds_something(target_path):
        raise DirectoryError(f"{output!r} exists already, and replay never overwrites. Give another --output.")
    return target.make(str(target_path))


def _info(directory: Path) -> dict[str, Any]:
    try:
        if (info := read_object(directory / "run.json")) is not None:
            return info
        problem = "it does not exist"
    except ValueError as error:
        problem = str(error)
    raise DirectoryError(f"{str(directory)!r} is not the directory of a run: its run.json cannot be read ({problem})")


def _run_info(directory: Path, info: dict[str, Any]) -> RunInfo:
    arguments = info.get("arguments")
    return RunInfo(str(info.get("id", "")), directory, arguments if isinstance(arguments, dict) else {})


def _outcome(directory: Path) -> Outcome | None:
    return outcome_in(_info(directory))

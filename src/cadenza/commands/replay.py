"""What ``cadenza replay`` does: take the records of a run from its directory to a sink."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cadenza.errors import DirectoryError
from cadenza.files.disk import read_object
from cadenza.files.locking import is_held
from cadenza.records.reading import NewRecords
from cadenza.sinks import Csv, Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.status.run_info import RunInfo

_BATCH = 1000  # records; so much is in memory, and goes to the sink at once
_POLL_S = 1.0


def _mlflow(output: str | None) -> Mlflow:
    return Mlflow(output if output is None or "://" in output else f"sqlite:///{Path(output).resolve()}")


@dataclass(frozen=True, slots=True)
class Target:
    """Where records may be taken."""

    make: Callable[[str | None], Sink]
    """Makes the sink, for a place as it was typed."""

    usual: str = ""
    """What a run with this sink leaves in its directory; empty if it lies elsewhere."""


TARGETS = {
    "csv": Target(lambda output: Csv(output or "metrics.csv"), "metrics.csv"),
    "mlflow": Target(_mlflow, "mlflow.db"),
    "swanlab": Target(lambda output: Swanlab(directory=output), "swanlog"),
    "tensorboard": Target(TensorBoard, "tensorboard"),
    "trackio": Target(Trackio),
    "wandb": Target(lambda output: Wandb(directory=output), "wandb"),
}


def replay(arguments: argparse.Namespace) -> None:
    """Feed the records to the sink, and say how many there were.

    Raises:
        DirectoryError: There is no run, or the place holds something already.
    """
    directory: Path = arguments.run
    facts = _facts(directory)
    sink = _sink(arguments.to, arguments.output, directory)
    records, count = NewRecords(directory / "metrics.jsonl"), 0
    sink.open(_run_facts(directory, facts))
    try:
        count += _feed(sink, records)
        while arguments.follow and is_held(directory):
            time.sleep(_POLL_S)
            count += _feed(sink, records)
        count += _feed(sink, records) if arguments.follow else 0  # what came before its end was noticed
    finally:
        sink.close(_outcome(directory))
        _tell(f"{arguments.to}: {remark}" for remark in sink.remarks)
    told = [f"{count} records of {directory} are in {arguments.to} now; pictures, sounds and texts are not in metrics.jsonl"]
    told += [f"{records.broken} lines of metrics.jsonl cannot be read, and are left out"] * bool(records.broken)
    _tell(told)


def _feed(sink: Sink, records: NewRecords) -> int:
    new, count = records.read(), 0
    while batch := list(islice(new, _BATCH)):
        sink.write(batch)
        count += len(batch)
    return count


def _sink(name: str, output: str | None, directory: Path) -> Sink:
    target = TARGETS[name]
    elsewhere = not target.usual or (name == "mlflow" and "MLFLOW_TRACKING_URI" in os.environ)
    if output is None and not elsewhere and (directory / target.usual).exists():
        raise DirectoryError(
            f"{str(directory / target.usual)!r} is there already, perhaps written by the run itself, and nothing is added to "
            "it: give another place with --output"
        )
    if output is None or not target.usual or "://" in output:
        return target.make(output)
    place = Path(output).resolve()  # as it was typed: a sink would look for it in the run's directory
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise DirectoryError(f"{output!r} is there already, and nothing is overwritten: give another --output")
    return target.make(str(place))


def _facts(directory: Path) -> dict[str, Any]:
    try:
        if (facts := read_object(directory / "run.json")) is not None:
            return facts
        problem = "it does not exist"
    except ValueError as error:
        problem = str(error)
    raise DirectoryError(f"{str(directory)!r} is not the directory of a run: its run.json cannot be read ({problem})")


def _run_facts(directory: Path, facts: dict[str, Any]) -> RunInfo:
    return RunInfo(str(facts.get("id", "")), directory, facts.get("arguments", {}))


def _outcome(directory: Path) -> Outcome | None:
    told = _facts(directory).get("outcome")
    return Outcome(told["kind"], told["reason"]) if told else None


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")

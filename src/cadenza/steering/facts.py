"""The files of a run directory as a question needs them: the newest records and decisions, and the state of the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cadenza.errors import DirectoryError
from cadenza.files.locking import LOCK, is_held
from cadenza.status import stragglers
from cadenza.steering.tail import Tail, opened

Row = dict[str, Any]
COUNTERS = ("epoch", "step", "batch", "samples", "tokens")
NEWEST = 1 << 15
"""The bytes at the end of the records that show the present: rates and newest values."""
_LARGEST = 1 << 26  # bytes of a run.json
_FILES = ("run.json", "metrics.jsonl")


class Facts:
    """A run directory.

    Args:
        path: The directory.
        whole: Search files to their beginning.

    Raises:
        DirectoryError: It holds no run.
    """

    def __init__(self, path: str, *, whole: bool = False) -> None:
        self.path: str = path
        self._whole = whole
        self.info: Mapping[str, Any] = {}
        """The content of ``run.json``."""
        self.problems: list[str] = []
        """Sentences about files that cannot be read."""
        self.state: str = "unknown"
        """``starting``, ``running``, ``paused``, ``elsewhere``, ``killed``, ``unknown``, or the kind of the outcome."""
        self.read()

    def read(self) -> Facts:
        """Read the state anew, and return these facts.

        Raises:
            DirectoryError: The directory holds no run.
        """
        held = is_held(Path(self.path))  # before run.json: a run that ends in between has its outcome there
        if not held and not any(os.path.isfile(os.path.join(self.path, name)) for name in _FILES):
            raise DirectoryError(
                f"{self.path!r} is not a run directory: expected a run.json or a metrics.jsonl in it. Give the directory= of "
                "a run."
            )
        self.problems = []
        self.info = self._object("run.json")
        self.state = self._state(held)
        return self

    @property
    def goes_on(self) -> bool:
        """Whether a process trains the run now, as far as this machine can see."""
        return self.state in ("starting", "running", "paused", "elsewhere")

    @property
    def ending(self) -> str:
        """A sentence about the state."""
        outcome = self.info.get("outcome")
        if isinstance(outcome, Mapping) and not self.goes_on:
            return f"{outcome.get('kind')}: {outcome.get('reason')}"
        at = self.reached()
        last = f"last record at epoch {at['epoch']}, step {at['step']}"
        if self.state == "killed":
            return f"killed: no process holds the directory and run.json has no outcome; {last}"
        if self.state == "elsewhere":
            return f"elsewhere: {self._holder()} trained it, and whether it still does is not visible from here; {last}"
        return f"{self.state}: {last}"

    def tail(self, name: str) -> Tail:
        """Return the end of a file of lines."""
        path = os.path.join(self.path, name)
        return Tail(path, None) if self._whole else Tail(path)

    def newest(self) -> Iterator[Row]:
        """Yield the newest records, the last one first. A continued run repeats no step: the file is cut."""
        try:
            yield from records(Tail(os.path.join(self.path, "metrics.jsonl"), NEWEST))
        except OSError as error:
            self.problems.append(f"metrics.jsonl cannot be read: {error}")

    def decisions(self, what: str = "") -> Iterator[Row]:
        """Yield the decisions of a kind or of a callback, the last one first; without an argument, all."""
        try:
            for row in _objects(self.tail("decisions.jsonl"), json.dumps(what).encode() if what else b""):
                whole = all(isinstance(row.get(name), str) for name in ("what", "who", "why"))
                if whole and (not what or what in (row["what"], row["who"])):
                    yield row
        except OSError as error:
            self.problems.append(f"decisions.jsonl cannot be read: {error}")

    def reached(self) -> Row:
        """Return the last counters that are known."""
        final = self.info.get("progress")
        if isinstance(final, Mapping) and not self.goes_on:
            return counters(final)
        newest = next(self.newest(), None)
        return counters(newest or next(self.decisions(), {}))

    def values(self, rows: list[Row]) -> dict[str, float]:
        """Return the newest value of each name in records and in the last results of evaluations."""
        newest: dict[str, float] = {}
        for row in rows:
            for name, value in row.items():
                if name not in COUNTERS and name != "time":
                    newest.setdefault(name, number(value))
        for decision in self.decisions("evaluated"):
            results = decision.get("data", {}).get("results") if isinstance(decision.get("data"), Mapping) else None
            if not isinstance(results, Mapping) or all(name in newest for name in results):
                break
            for name, value in results.items():
                newest.setdefault(str(name), number(value))
        return newest

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the directory, oldest first."""
        try:
            names = os.listdir(os.path.join(self.path, "checkpoints"))
        except OSError:
            return []
        return sorted((name for name in names if name.startswith("step-")), key=lambda name: (len(name.split("-")[1]), name))

    def ranks(self) -> Row | None:
        """Return which ranks are slow; None with one rank, or for the first seconds of a run."""
        content = self._object(stragglers.FILE)
        try:
            return stragglers.read(content) if content else None
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            self.problems.append(f"{stragglers.FILE} cannot be read: {error!r}")
            return None

    def steering(self) -> Row:
        """Return whether the run takes acts, and how many wait for its next step boundary."""
        folder = os.path.join(self.path, "steering")
        try:
            waiting = sum(name.endswith(".json") for name in os.listdir(os.path.join(folder, "acts")))
        except OSError:
            waiting = 0
        return {"enabled": self.goes_on and os.path.exists(os.path.join(folder, "listening.json")), "waiting": waiting}

    def _object(self, name: str) -> Mapping[str, Any]:
        try:
            with opened(os.path.join(self.path, name)) as file:
                content = json.loads(file.read(_LARGEST))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return {}
        return content if isinstance(content, dict) else {}

    def _state(self, held: bool) -> str:
        if held:
            last = next(
                (decision["what"] for decision in self.decisions() if decision["what"] in ("paused", "continued", "resumed")),
                "",
            )
            if last == "paused":
                return "paused"
            return "running" if next(self.newest(), None) is not None else "starting"
        outcome = self.info.get("outcome")
        if isinstance(outcome, Mapping) and outcome.get("kind"):
            return str(outcome["kind"])
        if not self.info:
            return "unknown"
        host = self._holder().rpartition(" on ")[2]
        return "killed" if host in ("", import_module("platform").node()) else "elsewhere"

    def _holder(self) -> str:
        """Return which process held the directory last, such as ``process 71 on node-3``."""
        try:
            with opened(os.path.join(self.path, LOCK)) as file:
                return file.read(1000).decode(errors="replace").strip()
        except OSError:
            return ""


def records(tail: Tail, name: str = "") -> Iterator[Row]:
    """Yield the records in a file, the last one first; with a name, those that have a value of it."""
    for row in _objects(tail, json.dumps(name).encode() + b":" if name else b""):
        step, seconds = row.get("step"), row.get("time")
        if type(step) is int and type(seconds) in (int, float) and math.isfinite(number(seconds)) and (not name or name in row):
            yield row


def _objects(tail: Tail, having: bytes) -> Iterator[Row]:
    """Yield the JSON objects in the lines that contain some bytes. Lines that cannot be read are left out."""
    for line in tail.lines(having):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def counters(row: Mapping[str, Any]) -> Row:
    """Return the counters in a record or a decision; 0 for those that it does not have."""
    found = {name: row.get(name, 0) for name in COUNTERS}
    return {name: value if isinstance(value, int) else 0 for name, value in found.items()}


def number(value: Any) -> float:
    """Return a value of a record: text such as ``"NaN"`` is a number that is not finite; anything else is NaN."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")

"""The recorded part of a run that `what_if` plays: its steps, evaluations, records and limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.errors import CadenzaError
from cadenza.loading.data_course import DataCourse, Window
from cadenza.records.directory import RecordedRun, read_info
from cadenza.records.reading import read_decisions, read_records, read_values
from cadenza.records.record import Record


class Evaluated(NamedTuple):
    """One evaluation of the run."""

    name: str
    results: Mapping[str, float]
    at_epoch_end: bool


@dataclass(frozen=True)
class Recording:
    """What a run directory holds of a run."""

    path: Path
    arguments: Mapping[str, Any]
    windows: Sequence[Window]
    """All steps, in order."""
    batches_per_epoch: int | None
    evaluations: Mapping[int, Sequence[Evaluated]]
    """By step."""
    started_s: float
    """When the run began, in seconds since 1970; 0 if that is not known."""

    @staticmethod
    def read(path: Path) -> Recording:
        """Read a run.

        Raises:
            DirectoryError: The directory holds no run.
            CadenzaError: The run did no step, or an earlier version wrote it.
        """
        info, facts = read_info(path), RecordedRun(path).previous or {}
        if not facts.get("data"):
            raise CadenzaError(f"{path}: what_if needs the part 'data' of run.json, which earlier versions did not write.")
        evaluations: dict[int, list[Evaluated]] = {}
        last = info.step
        for one in read_decisions(path / "decisions.jsonl"):
            last = max(last, one.when.step) if not facts.get("progress") else last
            if one.what == "evaluated" and "results" in one.data:
                results = {name: float(value) for name, value in one.data["results"].items()}
                name, at_end = str(one.data["evaluation"]), one.when.batch_in_epoch == 0 and one.when.step > 0
                evaluations.setdefault(one.when.step, []).append(Evaluated(name, results, at_end))
        if not facts.get("progress"):  # it goes on, or was killed
            last = max([last, *(record.step for record in read_records(path / "metrics.jsonl", names=()))])
        course = DataCourse.from_plain(facts["data"])
        windows = list(course.windows(last))
        if not windows:
            raise CadenzaError(f"{path}: the run has recorded no step, so there is nothing to play.")
        batches = course.segments[0].points[0].whole
        started = str(facts.get("started", ""))
        started_s = datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() if started else 0.0
        return Recording(path, info.arguments, windows, batches, evaluations, started_s)

    @property
    def steps(self) -> int:
        """The number of recorded steps."""
        return self.windows[-1].step

    @cached_property
    def records(self) -> Mapping[int, Sequence[Record]]:
        """The records by step."""
        found: dict[int, list[Record]] = {}
        for record in read_records(self.path / "metrics.jsonl"):
            found.setdefault(record.step, []).append(record)
        return found

    @cached_property
    def _times(self) -> tuple[list[int], list[float]]:
        last = {step: time for (_, step, *_), time, _ in read_values(self.path / "metrics.jsonl")}
        rows = sorted(last.items())
        return [step for step, _ in rows], [time for _, time in rows]

    def time_at(self, step: int) -> float:
        """Return when a step was complete, in seconds since 1970, by the last record before or at it."""
        steps, times = self._times
        index = bisect_right(steps, step)
        return times[index - 1] if index else self.started_s

    def epochs(self) -> Iterator[Sequence[Window]]:
        """Yield the steps of each epoch."""
        first = 0
        for index, window in enumerate(self.windows):
            if window.epoch != self.windows[first].epoch:
                yield self.windows[first:index]
                first = index
        yield self.windows[first:]

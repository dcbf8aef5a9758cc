"""A run that is read again and again while it goes on, from its directory alone."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from cadenza.errors import DirectoryError
from cadenza.files.disk import read_object
from cadenza.files.locking import is_held
from cadenza.records.reading import NewRecords, read_decisions
from cadenza.records.record import Record
from cadenza.report.best import best_of
from cadenza.report.commands.directories import FILES, NamedRuns, ending, holder_in, last_of, state_of
from cadenza.report.story import Series, Story, final_counters, name_distinctly, ranks_in
from cadenza.status import stragglers
from cadenza.status.branches import Saved
from cadenza.status.formats import parsed_date
from cadenza.status.masking import masked
from cadenza.status.progress import Counters

GOES_ON = ("starting", "running", "paused", "elsewhere")
"""The states of a run that is not over."""
_QUIET_S, _LONGEST_QUIET_S = 10.0, 600.0  # without growth, a run of another machine is followed so long: by its pace
_WINDOW_S = 60.0  # of the newest records: the throughput is their mean


class Following:
    """A run directory. `update` reads the new rows.

    Args:
        path: The run directory. The run may be starting: then a process holds the directory, and it has no files yet.

    Raises:
        DirectoryError: The directory holds no run.
    """

    def __init__(self, path: Path) -> None:
        if not is_held(path) and not any((path / name).is_file() for name in FILES):
            raise DirectoryError(
                f"{str(path)!r} is not a run directory: expected a run.json or a metrics.jsonl in it. Give the directory= of "
                "a run."
            )
        self.path = path
        self.story: Story = Story(path.resolve().name)
        self.state: str = "starting"
        self.checkpoints: list[str] = []
        """The names of the checkpoints in the directory, oldest first."""
        self._records = NewRecords(path / "metrics.jsonl")
        self._recent: deque[tuple[float, Counters]] = deque()
        self._sizes: dict[str, tuple[int, int]] = {}
        self._grew_s = time.monotonic()

    def update(self, most: int | None = None) -> Sequence[Record]:
        """Read the new rows, and return the new records: at most the `most` newest ones."""
        held = is_held(self.path)  # before run.json: a run that ends in between has its outcome there
        story = self.story
        if self._changed("run.json"):
            with suppress(ValueError):  # keep the content that could be read
                story.info = masked(read_object(self.path / "run.json") or {})
        new: deque[Record] = deque(maxlen=most)
        for record in self._records.read():
            new.append(record)
            self._add(record)
        decided = self._changed("decisions.jsonl")
        if decided:
            story.decisions = list(read_decisions(self.path / "decisions.jsonl"))
        if self._changed(stragglers.FILE):
            story.ranks = ranks_in(self.path, [])
        self.checkpoints = _checkpoints(self.path / "checkpoints")
        if new or decided:
            self._grew_s = time.monotonic()
        self.state = self._state(held)
        if not held:
            story.reached = final_counters(story.info) or story.reached
        return list(new)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or was killed."""
        return self.state not in GOES_ON

    @property
    def is_quiet(self) -> bool:
        """Whether a run of another machine, or its copy, has stopped growing: for three times its longest recent interval."""
        times = [instant for instant, _ in self._recent]
        longest_s = max((after - before for before, after in pairwise(times)), default=0.0)
        quiet_s = min(max(3 * longest_s, _QUIET_S), _LONGEST_QUIET_S)
        return self.state == "elsewhere" and time.monotonic() - self._grew_s > quiet_s

    @property
    def ending(self) -> str:
        """A sentence about the end."""
        return ending(self.path, self.state, self.story)

    @property
    def steps(self) -> int | None:
        """The number of steps of the whole run; None if unknown."""
        planned = self.story.info.get("steps")
        return planned if isinstance(planned, int) and planned > 0 else None

    @property
    def epochs(self) -> int | None:
        """The largest number of epochs; None without a limit."""
        arguments = self.story.info.get("arguments")
        most = arguments.get("max_epochs") if isinstance(arguments, dict) else None
        return most if isinstance(most, int) and most > 0 else None

    @property
    def fraction(self) -> float | None:
        """The fraction of the run that is done, by steps, or by epochs if the number of steps is unknown."""
        done, whole = (self.story.reached.step, self.steps) if self.steps else (self.story.reached.epoch, self.epochs)
        return None if whole is None else min(1.0, done / whole)

    def rates(self) -> tuple[float, float, float] | None:
        """Return steps, samples and tokens per second in the newest records of this attempt; None if there are too few."""
        if len(self._recent) < 2:
            return None
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        passed_s = last - first
        done = end.step - start.step, end.samples - start.samples, end.tokens - start.tokens
        return done[0] / passed_s, done[1] / passed_s, done[2] / passed_s

    def remaining_s(self) -> float | None:
        """Return the seconds to the end at the present rate; None if unknown."""
        rates = self.rates()
        if rates is None or self.steps is None or rates[0] <= 0 or self.story.seen is None or self.is_over:
            return None
        left = (self.steps - self.story.reached.step) / rates[0]
        return max(0.0, left - max(0.0, time.time() - self.story.seen))

    def elapsed_s(self) -> float | None:
        """Return the seconds since the start, until now or the end."""
        started = parsed_date(self.story.info.get("started"))
        if self.is_over or started is None:
            return self.story.duration_s
        return max(0.0, time.time() - started.timestamp())

    def data(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return all that is known as plain data."""
        story, rates = self.story, self.rates()
        bests = {name: best.value for name in story.series if (best := best_of(story, name))}
        return {
            "run": str(self.path),
            "state": self.state,
            **asdict(story.reached),
            "steps": self.steps,
            "epochs": self.epochs,
            "fraction": self.fraction,
            "steps_per_s": rates and rates[0],
            "samples_per_s": rates and rates[1],
            "tokens_per_s": rates and rates[2],
            "remaining_s": self.remaining_s(),
            "elapsed_s": self.elapsed_s(),
            "time": story.seen,
            "values": {name: last_of(series) for name, series in story.series.items()},
            "best": bests,
            "records": len(records),
            "decisions": [decision.to_dict() for decision in story.decisions[-5:]],
            "alerts": [decision.to_dict() for decision in story.decisions if decision.what == "alerted"][-5:],
            "acts": [decision.to_dict() for decision in story.acts[-5:]],
            "checkpoints": self.checkpoints,
            "ranks": story.ranks,
            "outcome": story.info.get("outcome"),
        }

    def _add(self, record: Record) -> None:
        for name, value in record.values.items():
            self.story.series.setdefault(name, Series()).add(record.step, value)
        self.story.reached, self.story.seen = record.at, record.time
        if record.time >= self._attempt():
            self._recent.append((record.time, record.at))
        while len(self._recent) > 2 and self._recent[0][0] < record.time - _WINDOW_S:
            self._recent.popleft()

    def _attempt(self) -> float:
        """Return when the process that writes now began, in seconds since 1970."""
        continued = self.story.info.get("continued")
        began = continued[-1] if isinstance(continued, list) and continued else self.story.info.get("started")
        instant = parsed_date(began)
        return 0.0 if instant is None else instant.timestamp()

    def _state(self, held: bool) -> str:
        if not held:
            return state_of(self.path, held, self.story)
        if _is_suspended(self.path):
            return "paused"
        return "starting" if self.story.seen is None else "running"

    def _changed(self, name: str) -> bool:
        try:
            facts = os.stat(self.path / name)
        except OSError:
            return False
        size, self._sizes[name] = self._sizes.get(name), (facts.st_size, facts.st_mtime_ns)
        return size != self._sizes[name]


class FollowedRuns:
    """Runs that are followed together: those of the paths, and those that come into the folders among them.

    Args:
        paths: Run directories, and folders of them.

    Raises:
        DirectoryError: A path does not exist, or it holds no run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._named = [NamedRuns(path) for path in paths]
        self._runs: dict[Path, Following] = {}
        self.several: bool = len(self.present()) > 1 or paths[0] not in self._runs
        """Whether they are shown as a table: more than one run, or a folder."""

    def present(self) -> list[Following]:
        """Return the runs, with those that came in the last ten seconds; those that go on come first."""
        for named in self._named:
            for path in named.paths().values():
                if path not in self._runs:
                    with suppress(DirectoryError):  # it was removed
                        self._runs[path] = Following(path)
        name_distinctly([run.story for run in self._runs.values()], [*self._runs])
        return sorted(self._runs.values(), key=lambda run: (run.is_over, run.story.name))

    @property
    def is_over(self) -> bool:
        """Whether no run goes on. Whether one of another machine does is visible by its growth alone."""
        return all(run.is_over or run.is_quiet for run in self._runs.values())


def _checkpoints(folder: Path) -> list[str]:
    try:
        names: Iterable[str] = os.listdir(folder)
    except OSError:
        return []
    saved = [checkpoint for name in names if (checkpoint := Saved.named(name)) is not None]
    return [checkpoint.name for checkpoint in sorted(saved)]


def _is_suspended(path: Path) -> bool:
    """Return whether the process that holds a directory is stopped, as by Ctrl-Z; False where the system does not show it."""
    process, machine = holder_in(path)
    if machine != platform.node():
        return False
    try:
        content = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return content.rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False

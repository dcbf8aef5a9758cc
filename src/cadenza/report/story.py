"""The data of a run in plain form, read from its directory or from the live run."""

from __future__ import annotations

import math
import operator
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import CheckpointError, DirectoryError
from cadenza.files.disk import read_object
from cadenza.records.branch_files import MEDIA
from cadenza.records.reading import count_in, read_decisions, read_values
from cadenza.status import stragglers
from cadenza.status.decisions import Decision, Outcome
from cadenza.status.formats import counted, duration, local_date, parsed_date
from cadenza.status.masking import masked
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.checkpoint.store import Store
    from cadenza.run import Run

_FAULTS = ("alerted", "disabled", "failed", "not sent", "not saved", "not pruned", "not kept")
_ACTS = ("steered", "not steered")


def act_text(act: Decision) -> str:
    """Return an act as one would write it after ``cadenza tell RUN``, such as ``set lr=0.01``."""
    arguments = act.data.get("arguments")
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    shown = [str(value) if name in ("text", "callback") else f"{name}={value}" for name, value in given]
    return " ".join([str(act.data.get("verb")), *shown])


@dataclass(slots=True)
class Series:
    """All values of one name, ordered by step."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> Iterator[tuple[int, float]]:
        """Each step with its value."""
        return zip(self.steps, self.values, strict=True)

    @property
    def not_finite(self) -> int:
        """The number of NaN and infinite values."""
        return len(self) - sum(map(math.isfinite, self.values))


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint of the run. If its manifest cannot be read, `manifest` is empty and `problem` says why."""

    name: str
    manifest: Mapping[str, Any]
    problem: str = ""


@dataclass(slots=True)
class Story:
    """The data of one run."""

    name: str
    """The name of the run in the report."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``run.json``."""
    series: dict[str, Series] = field(default_factory=dict)
    reached: Counters = field(default_factory=Counters)
    """The last known counters."""
    seen: float | None = None
    """The time of the last record, in seconds since 1970."""
    decisions: Sequence[Decision] = ()
    """The decisions of the run."""
    checkpoints: Sequence[StoredCheckpoint] = ()
    """The checkpoints of the run directory."""
    profile: Mapping[str, Any] | None = None
    """The content of ``profile.json``."""
    ranks: Mapping[str, Any] | None = None
    """Which ranks are slow, from ``ranks.json``; None with one rank."""
    media: Path | None = None
    """The folder of the logged pictures, sounds, histograms and texts."""
    problems: list[str] = field(default_factory=list)
    """Messages about files that cannot be read."""

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; None while the run is in progress, or after a kill."""
        return outcome_in(self.info)

    @property
    def kind(self) -> str:
        """The kind of its outcome; empty without one."""
        return "" if self.outcome is None else self.outcome.kind

    @property
    def ending(self) -> str:
        """A sentence that describes the end of the run."""
        if self.outcome is not None:
            return f"{self.outcome.kind}: {self.outcome.reason}"
        last = "no record yet" if self.seen is None else f"last record {local_date(self.seen)}"
        return f"in progress or killed: run.json holds no outcome; {last}"

    @property
    def watched(self) -> Iterator[tuple[str, str, str]]:
        """Name, mode and callback of each watched metric, from the start of the run and from decisions."""
        found = [(monitor.get("callback"), monitor) for monitor in _mappings(self.info.get("monitors"))]
        # See `Monitor.best_data`. Monitors of adapters are known from decisions only. Version 0.1 wrote neither.
        found += [(decision.who, best) for decision in self.decisions for best in _mappings(decision.data.get("best"))]
        for who, facts in found:
            if facts.get("mode") in ("max", "min") and isinstance(name := facts.get("monitor"), str):
                yield name, str(facts["mode"]), str(who)

    @property
    def faults(self) -> list[Decision]:
        """Decisions about callbacks disabled by an error, and about checkpoints and records that were not written."""
        return [decision for decision in self.decisions if decision.what in _FAULTS]

    @property
    def acts(self) -> list[Decision]:
        """Decisions about the acts of ``cadenza tell`` on the run: those that it carried out, and those that it refused."""
        return [decision for decision in self.decisions if decision.what in _ACTS and "verb" in decision.data]

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end or the last record, including pauses before a resume."""
        started, ended = parsed_date(self.info.get("started")), parsed_date(self.info.get("ended"))
        if started is None:
            return None
        last = ended.timestamp() if ended else self.seen
        return None if last is None else max(0.0, last - started.timestamp())

    @property
    def took(self) -> str | None:
        """Its duration as text. ``run.json`` has whole seconds."""
        seconds = self.duration_s
        return None if seconds is None else duration(seconds) if seconds >= 1 else "under 1 s"


def story_at(path: Path, *, names: Collection[str] | None = None, checkpoints: bool = True) -> Story:
    """Read a run directory in any state.

    Args:
        path: The run directory.
        names: Read only the series of these names, and those that a callback watched; None reads all.
        checkpoints: Read the manifests of the checkpoints. Without them no torch is imported.

    Raises:
        DirectoryError: The directory holds no run.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tiny_run(callbacks=[LogTraining("1 step", throughput=False)], directory=folder)
    ...     story = story_at(Path(folder))
    >>> list(story.series), story.reached.step, story.ending
    (['train/loss', 'train/lr'], 5, 'finished: the limit is reached')
    """
    if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl")):
        raise DirectoryError(
            f"{str(path)!r} is not a run directory: expected a run.json or a metrics.jsonl in it. Give the directory= of a run."
        )
    story = Story(path.resolve().name)
    story.info = _json_in(path / "run.json", story.problems) or {}
    story.media = path / MEDIA
    story.profile = _json_in(path / "profile.json", story.problems)
    story.ranks = ranks_in(path, story.problems)
    broken: list[int] = []
    try:
        story.decisions = list(read_decisions(path / "decisions.jsonl", broken=broken))
    except OSError as error:
        story.problems.append(f"decisions.jsonl cannot be read: {error}")
    _report_broken("decisions.jsonl", broken, story)
    watched = {name for name, _, _ in story.watched}
    _read_metrics(path / "metrics.jsonl", story, None if names is None else {*names, *watched})
    known = [decision.when for decision in story.decisions[-1:]] + [at for at in [final_counters(story.info)] if at]
    story.reached = max([story.reached, *known], key=lambda at: (at.batch, at.step, at.epoch))
    if checkpoints and (path / "checkpoints").is_dir():
        from cadenza.checkpoint.store import Store  # imported here because it needs torch, which is not needed otherwise

        story.checkpoints = list(_kept(Store(path / "checkpoints")))
    return story


def story_of(run: Run) -> Story:
    """Return the data of a live run, without data that only its directory holds."""
    series = {}
    for name in run.history.names:
        steps, values = zip(*run.history[name], strict=True)
        series[name] = Series(array("q", steps), array("d", values))
    outcome = run.outcome and {"kind": run.outcome.kind, "reason": run.outcome.reason}
    info = {"outcome": outcome, "device": str(run.device), "seed": run.info.arguments.get("seed")}
    name = run.info.name or "run"
    return Story(name, info, series, run.progress.now(), time.time() if series else None, list(run.decisions))


def name_distinctly(stories: Sequence[Story], paths: Sequence[Path]) -> None:
    """Prefix runs of equal names with as many path components as make the names distinct."""
    whole = [path.resolve() for path in paths]
    depth, longest = 1, max(len(path.parts) for path in whole) - 1  # without the root
    while len({story.name for story in stories}) < len({*whole}) and depth < longest:
        depth += 1
        for story, path in zip(stories, whole, strict=True):
            story.name = "/".join(path.parts[-depth:])


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _json_in(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] | None = masked(read_object(path))
        return content  # the files of earlier versions hold the whole command line
    except ValueError as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def ranks_in(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return which ranks of a run are slow; None with one rank."""
    content = _json_in(path / stragglers.FILE, problems)
    try:
        return stragglers.read(content) if content else None
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        problems.append(f"{stragglers.FILE} cannot be read: {error!r}")
        return None


def outcome_in(info: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome in the content of a ``run.json``; None if it holds none."""
    outcome = info.get("outcome")
    if not isinstance(outcome, Mapping) or not outcome.get("kind"):
        return None
    kind: Any = str(outcome["kind"])  # a newer version may use another name
    return Outcome(kind, str(outcome.get("reason", "")))


def final_counters(info: Mapping[str, Any]) -> Counters | None:
    """Return the final counters in the content of a ``run.json``; None if it holds none."""
    try:
        return Counters(**{field.name: count_in({"tokens": 0, **info["progress"]}[field.name]) for field in fields(Counters)})
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def _read_metrics(path: Path, story: Story, names: Collection[str] | None) -> None:
    broken: list[int] = []
    columns: dict[str, tuple[Callable[[int], None], Callable[[float], None]]] = {}
    row = None
    try:
        for row in read_values(path, broken=broken, names=names):
            step = row[0][1]
            for name, value in row[2].items():
                column = columns.get(name)
                if column is None:
                    if names is not None and name not in names:
                        continue
                    series = story.series[name] = Series()
                    column = columns[name] = series.steps.append, series.values.append
                column[0](step)
                column[1](value)
    except OSError as error:
        story.problems.append(f"{path.name} cannot be read: {error}")
    if row is not None:
        (epoch, step, batch, samples, tokens), story.seen, _ = row
        story.reached = Counters(epoch=epoch, step=step, batch=batch, samples=samples, tokens=tokens)
    _report_broken(path.name, broken, story)
    for series in story.series.values():
        _put_in_order(series)


def _put_in_order(series: Series) -> None:
    """Sort by step, for files that were concatenated manually. Values of the same step keep their order."""
    if any(map(operator.gt, series.steps, islice(series.steps, 1, None))):
        pairs = sorted(series.points, key=lambda pair: pair[0])
        series.steps, series.values = array("q", [step for step, _ in pairs]), array("d", [value for _, value in pairs])


def _report_broken(name: str, broken: Sequence[int], story: Story) -> None:
    if broken:
        story.problems.append(f"{counted(len(broken), 'line')} of {name} cannot be read, the first is line {broken[0]}")


def _kept(store: Store) -> Iterator[StoredCheckpoint]:
    for saved in store.saved():
        try:
            yield StoredCheckpoint(saved.name, store.manifest(saved))
        except CheckpointError as error:
            yield StoredCheckpoint(saved.name, {}, str(error).removeprefix(f"{saved.name}: "))

"""Write records in the files of DVCLive."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import DirectoryError
from cadenza.files.paths import local_path
from cadenza.records.record import Image, Media
from cadenza.sinks.media import MediaBox, picture_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_NAME = 200  # characters of a file name
_OWN = ("step", "timestamp")  # columns of DVCLive


class Dvclive(Sink):
    """Write numbers, `Image`, `Figure` and the run's arguments in the files of DVCLive, for DVC and its VS Code extension.

    ``plots/metrics/<name>.tsv`` has each value at its step, ``metrics.json`` the last values and the outcome, ``params.yaml``
    the arguments of the trainer, and ``dvc.yaml`` names these files to DVC. The sink does not use the network, and does not
    change your Git or DVC repository; ``dvc exp save`` does, when you call it. A resumed run replaces the values after its
    checkpoint.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        directory: The directory of the files. A relative path starts at the directory of the run, if it has one. None:
            ``dvclive`` in the directory of the run.
        config: More params. They replace arguments of the trainer with the same names.

    Raises:
        MissingExtraError: dvclive is not installed.
        DirectoryError: At the start of a run: no directory is given, it cannot be written, or it has files of another run.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tiny_run(callbacks=[LogTraining("1 step"), Dvclive()], directory=folder)
    ...     sorted(one.name for one in Path(folder, "dvclive").iterdir())
    ['dvc.yaml', 'metrics.json', 'params.yaml', 'plots']
    """

    _package = "dvclive"

    def __init__(self, directory: str | PathLike[str] | None = None, *, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.directory: Path | None = None if directory is None else local_path(directory)
        self.config: dict[str, Any] = dict(config or {})
        self._live: Any = None
        self._names: dict[str, str] = {}
        self._media = MediaBox(self.remarks.append)

    def open(self, info: RunInfo) -> None:
        folder = _folder(self.directory, info)
        self._media, self._names = MediaBox(self.remarks.append), {}
        continues = info.continued and info.step > 0
        last = _last_after_cut(folder, info.step) if continues else {}
        self._live = _files(folder, keep=continues)
        for name, (step, value) in last.items():
            self._live.step = step
            self._live.log_metric(name, value, plot=False)  # in metrics.json
            self._names[name] = name
        self._live.step = info.step
        self._live.log_params({**info.arguments, **self.config})

    def write(self, records: Sequence[Record]) -> None:
        live = self._live
        assert live is not None, "open comes first"
        known = len(self._names)
        for record in records:
            live.step = record.step
            for name, value in record.values.items():
                live.log_metric(self._name(name), value)
            for name, picture in self._media.of(record, _as_dvclive_has_it).items():
                live.log_image(f"{self._name(name)}/{record.step}.png", picture)
        live.make_summary()
        if len(self._names) > known:
            _describe(live)

    def close(self, outcome: Outcome | None) -> None:
        live, self._live = self._live, None
        if live is not None:  # `Live.end` would start a thread that never ends
            live.summary["outcome"] = "finished" if outcome is None else outcome.kind
            live.make_summary()
            _describe(live)

    def _name(self, name: str) -> str:
        """Return a file name without suffix that collides with no folder and no column of DVCLive."""
        if name not in self._names:
            parts = re.sub(r'[<>:"\\|?*\x00-\x1f]', "_", name).split("/")
            allowed = "/".join(part[:_NAME] for part in parts if part not in ("", ".", "..")) or "_"
            if allowed.rpartition("/")[2] in _OWN or allowed == "outcome":
                allowed += "_"
            if any(f"{allowed}/".startswith(f"{other}/") and allowed != other for other in self._names.values()):
                allowed = allowed.replace("/", "_")
            if any(other.startswith(f"{allowed}/") for other in self._names.values()):
                allowed += "_"
            if allowed != name:
                self.remarks.append(f"{name!r} is logged as {allowed!r}, because DVCLive makes files and folders of the names")
            self._names[name] = allowed
        return self._names[name]


def _describe(live: Any) -> None:
    Path(live.dvc_file).unlink(missing_ok=True)  # DVCLive would add its entries to those of the last call
    live.make_dvcyaml()


def _as_dvclive_has_it(medium: Media) -> Any:
    return picture_of(medium) if isinstance(medium, Image) else f"is {type(medium).__name__}, which DVCLive does not have"


def _folder(own: Path | None, info: RunInfo) -> Path:
    if own is None and info.directory is None:
        raise DirectoryError(
            "Dvclive has no directory to write to. Give Trainer(directory=...) for 'dvclive' in it, or Dvclive(directory)."
        )
    folder = info.base / (own or "dvclive")
    if not info.continued and any((folder / name).exists() for name in ("plots", "metrics.json", "params.yaml")):
        raise DirectoryError(
            f"Dvclive would replace the files of another run in {str(folder)!r}. Give another directory, or move this one away."
        )
    return own_folder(folder, sink="Dvclive")


def _files(folder: Path, *, keep: bool) -> Any:
    """Return a `Live` that only writes files.

    `Live` itself makes the Git repository around the working directory a DVC repository, and may send to DVC Studio.
    """
    with _streams_kept():
        from dvclive.live import Live  # 1.5 s, so only when a run starts

    class Files(Live):
        def _init_dvc(self) -> None:
            self._dvc_file = self._init_dvc_file()

        def _init_studio(self) -> None:
            self._studio_events_to_skip.update(("start", "data", "done"))

    return Files(str(folder), resume=keep, save_dvc_exp=False, dvcyaml=str(folder / "dvc.yaml"))


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Keep stdout and stderr, which an import of DVC wraps."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _last_after_cut(folder: Path, step: int) -> dict[str, tuple[int, float]]:
    """Delete the values after a step, since they will be written again.

    Return the last remaining step and value of each name.
    """
    last = {}
    for file in sorted((folder / "plots" / "metrics").rglob("*.tsv")):
        with file.open(encoding="utf-8", newline="") as lines:
            head, *rows = csv.reader(lines, delimiter="\t")
        rows = [row for row in rows if len(row) == 2 and row[0].isdigit() and int(row[0]) <= step]
        with file.open("w", encoding="utf-8", newline="") as lines:
            csv.writer(lines, delimiter="\t", lineterminator="\n").writerows([head, *rows])
        if rows:
            last[file.relative_to(folder / "plots" / "metrics").with_suffix("").as_posix()] = (
                int(rows[-1][0]),
                float(rows[-1][1]),
            )
    for name in ("metrics.json", "params.yaml"):  # a killed process may have left an incomplete file; both are written again
        (folder / name).unlink(missing_ok=True)
    return last

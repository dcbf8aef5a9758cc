"""Records for Trackio."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from contextvars import Context
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import MissingExtraError
from cadenza.hooks.habits import renamed
from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, counts_of, picture_of, samples_of
from cadenza.sinks.sink import Sink

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo


class Trackio(Sink):
    """Keep numbers, media and the run's arguments in Trackio's database on this machine; ``trackio show`` draws them.

    The database is where Trackio looks for it: in ``TRACKIO_DIR``, else in the cache of Hugging Face. Each record stands at its
    step; its time is that at which Trackio wrote it, up to a second later. A run of your own is not touched. A run that is
    continued goes on under the same name, and what had come after its checkpoint is replaced.

    Args:
        project: None: the name of the working directory.
        run_name: The name of the run there; None: that of its directory, and the first letters of its id.
        group: For comparing it.
        config: Added to the arguments of the trainer; wins where both have a name.

    Raises:
        MissingExtraError: trackio is not installed.
    """

    @renamed(name="run_name")
    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if find_spec("trackio") is None:
            raise MissingExtraError("trackio", needed_by="Trackio", extra="trackio")
        self.project, self.run_name, self.group, self.config = project, run_name, group, dict(config or {})
        self._media = MediaBox(self.remarks.append)
        self._run: Any = None
        self._rows = 0

    def open(self, info: RunInfo) -> None:
        import trackio  # 1.5 s, so only when a run starts

        self._media = MediaBox(self.remarks.append)
        own_name = f"{info.name}-{info.id[:8]}" if info.id else None  # directories of many runs are called "run"
        # It keeps the run under way in a variable of the context, and would end the user's own: so there is none to be seen.
        self._run = Context().run(
            trackio.init,
            self.project or Path.cwd().name or "cadenza",
            name=self.run_name or own_name,
            group=self.group,
            config={**info.arguments, **self.config},
            resume="allow" if info.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._rows = 0
        database = _database_of(self._run)
        if database is not None and info.step:
            self._rows = _rows_after_cut(database, self._run.id, info.step)

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({**record.values, **self._media.of(record, _as_trackio_has_it)}, step=record.step)
            self._rows += 1

    def close(self, outcome: Outcome | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish()
        database = _database_of(run)
        if database is not None:  # what it cannot write it drops, with a warning of its own at most
            there = _rows_in(database, run.id)
            if there < self._rows:
                raise OSError(f"Trackio wrote {there} of {self._rows} records to {str(database)!r}")


def _as_trackio_has_it(medium: Media) -> Any:
    import trackio

    match medium:
        case Text(text):
            return trackio.Markdown(text)
        case Image():
            return trackio.Image(picture_of(medium))
        case Audio(samples, rate) if len(samples):
            return trackio.Audio(samples_of(medium), sample_rate=rate)
        case Histogram():
            counts = counts_of(medium)
            return EMPTY if counts is None else trackio.Histogram(np_histogram=counts)
    return EMPTY


def _database_of(run: Any) -> Path | None:
    """Return the file in which a run's rows will be; None if they go elsewhere first, to a server or a common folder."""
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import get_storage_mode

    if run.url is not None or get_storage_mode() != "sqlite":
        return None
    return Path(SQLiteStorage.get_project_db_path(run.project))


def _rows_in(database: Path, run_id: str) -> int:
    if not database.exists():
        return 0
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM metrics WHERE run_id = ?", (run_id,)).fetchone()[0])


def _rows_after_cut(database: Path, run_id: str, step: int) -> int:
    """Drop a run's rows after a step: they will be written again. Return how many are left."""
    if database.exists():
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (run_id, step))
    return _rows_in(database, run_id)

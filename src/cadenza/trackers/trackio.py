"""Send records to Trackio."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, counts_of, picture_of, samples_of
from cadenza.sinks.sink import Sink
from cadenza.status.formats import counted
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo


class Trackio(Sink):
    """Write numbers, media and the run's arguments to the local database of Trackio, for ``trackio show``.

    The database is in ``TRACKIO_DIR``, otherwise in the Hugging Face cache. Each record has its step. Its timestamp is the time
    at which Trackio wrote it, up to a second later. An active Trackio run of the script is not affected. A resumed run keeps
    its name and replaces the records after its checkpoint.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        project: The name of the project. None takes the name of the working directory.
        run_name: The name of the run in Trackio. None takes the name of its directory and the first characters of its id.
        group: The group of the run.
        config: More entries of the configuration. They replace arguments of the trainer with the same names.

    Raises:
        MissingExtraError: trackio is not installed.
    """

    _package = "trackio"

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
        self.project: str | None = project
        self.run_name: str | None = run_name
        self.group: str | None = group
        self.config: dict[str, Any] = dict(config or {})
        self._media = MediaBox(self.remarks.append)
        self._run: Any = None
        self._rows = 0

    def open(self, info: RunInfo) -> None:
        import trackio  # 1.5 s, so only when a run starts

        self._media = MediaBox(self.remarks.append)
        own_name = f"{info.name}-{info.id[:8]}" if info.directory else None  # many runs have a directory named "run"
        # Trackio keeps the active run in a context variable, and init would end it. An empty context hides the user's run.
        self._run = Context().run(
            trackio.init,
            self.project or Path.cwd().name or "cadenza",
            name=self.run_name or own_name,
            group=self.group,
            config={**info.arguments, **self.config},
            resume="allow" if info.step or info.continued else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._rows = 0
        database = _database_of(self._run)
        if database is not None and (info.step or info.continued):
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
        if database is not None:  # Trackio drops rows that it cannot write
            written = _rows_in(database, run.id)
            if written < self._rows:
                raise OSError(f"Trackio wrote {written} of {counted(self._rows, 'record')} to {str(database)!r}")


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
    """Return the database file of a run; None if its rows are first sent to a server or a shared folder."""
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
    """Delete the rows of a run after a step, since they will be written again. Return the number of remaining rows."""
    if database.exists():
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (run_id, step))
    return _rows_in(database, run_id)

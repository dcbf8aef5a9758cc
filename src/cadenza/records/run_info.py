"""Read the facts about a run from its directory."""

from __future__ import annotations

from os import PathLike

from cadenza.errors import DirectoryError
from cadenza.files.paths import local_path
from cadenza.loading.data_course import DataCourse
from cadenza.records.directory import OVER, RecordedRun
from cadenza.status.run_info import RunInfo


def read_info(run: str | PathLike[str]) -> RunInfo:
    """Return the facts about a run, from its ``run.json`` alone, also of one in progress or killed. See `RunInfo.samples`.

    Args:
        run: The run directory.

    Raises:
        DirectoryError: It holds no run.

    >>> import tempfile
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = tiny_run(epochs=2, directory=folder)
    ...     print(read_info(folder).samples(7))
    step 7, in epoch 2:
      rank 0, batch 2: index in the list 1
    """
    path = local_path(run)
    info = RecordedRun(path).previous
    if info is None:
        raise DirectoryError(f"{str(path)!r} is not the directory of a run: expected a run.json in it.")
    arguments, data, reached = info.get("arguments"), info.get("data"), info.get("progress")
    done = None if reached is None else reached["step"]
    over = (info.get("outcome") or {}).get("kind") in OVER
    last = info.get("steps") if done is None else done + (not over)
    try:
        course = DataCourse.from_plain(data) if data else None
    except (KeyError, TypeError, ValueError) as error:
        raise DirectoryError(f"the part 'data' of {str(path / 'run.json')!r} cannot be read: {error!r}") from None
    return RunInfo(
        str(info.get("id", "")),
        path,
        arguments if isinstance(arguments, dict) else {},
        done or 0,
        name_samples=None if course is None else course.samples,
        last_step=last if isinstance(last, int) else None,
    )

"""The run directory: what a run writes, readable while it goes on and after it was killed."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from cadenza.errors import DirectoryError
from cadenza.files.disk import flush, read_object, replacing
from cadenza.files.locking import HOLDER, LOCK, FolderLock, HeldError, is_held
from cadenza.files.paths import local_path
from cadenza.loading.batch_log import BatchLog
from cadenza.records.branch_files import ROWS, cut
from cadenza.records.logs import GatheredLog, Log
from cadenza.records.reading import count_in
from cadenza.records.record import Record
from cadenza.status.branches import Branch
from cadenza.status.masking import masked, masked_text
from cadenza.status.progress import Counters
from cadenza.status.run_info import RunInfo, working_directory
from cadenza.version import __version__

logger: logging.Logger = logging.getLogger("cadenza")
OVER = ("finished", "stopped")
"""The outcomes after which a run has nothing left to do."""
_LOOKS_S = 30.0  # between two looks at whether the directory is at its path
_KINDS = {"id": str, "branch": dict, "outcome": dict, "progress": dict, "continued": list, "started": str, "ended": str}
_COMMIT = "# branch.oid "  # of git status; "(initial)" follows in a repository without commits


class RecordedRun:
    """What a run directory says of its run so far. Nothing is written or locked.

    Args:
        path: The run directory. It may not be there.

    Raises:
        DirectoryError: Its ``run.json`` cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous: dict[str, Any] | None = _check_free(path, resume=True)
        """The ``run.json`` of the run that is continued; None if there is none."""

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"


class RunDirectory(RecordedRun):
    """``run.json``, ``metrics.jsonl``, ``decisions.jsonl`` and ``console.log`` of one run.

    One run at a time holds it. The kernel releases the lock when the process ends. On file systems without locks, a file that
    names the process replaces the lock; see `FolderLock`.

    Args:
        path: Made if it is not there.
        resume: Go on with the run that it holds, if it holds one.

    Raises:
        DirectoryError: It cannot be written, another run holds it, or it holds a run already and `resume` is false;
            nothing in it is changed then.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        _check_free(path, resume)
        _check_writable(path)
        self._lock = _locked(path)
        try:
            _check_free(path, resume)  # again: another run may have used the directory before the lock was taken
            super().__init__(path)
        except BaseException:
            self._lock.release(unused=True)
            raise
        self.when_gone: Callable[[], object] = _do_nothing
        """Called during the run if the directory is not at its path: it was moved or deleted."""
        self._inode, self._looked_at = _inode(path), time.monotonic()
        self._info: dict[str, Any] = {}
        self._records = GatheredLog(path / "metrics.jsonl")
        self._logs = {name: Log(path / name) for name in (*ROWS, "console.log")} | {"metrics.jsonl": self._records}
        self._completed: dict[str, Any] = {}
        """The earlier outcome and counters of a run that was over, until this attempt has restored a checkpoint."""

    @property
    def run_id(self) -> str:
        """The unique id of the run. A continued run keeps it."""
        return str((self.previous or self._info).get("id", ""))

    @property
    def plans(self) -> tuple[str, str] | None:
        """The plans of the run so far and of this attempt; None if one of them is not known."""
        plans = (self.previous or {}).get("plan"), masked(self._info.get("plan"))
        return (plans[0], plans[1]) if isinstance(plans[0], str) and isinstance(plans[1], str) else None

    def begin(self, info: Mapping[str, Any]) -> None:
        """Write ``run.json``: the run, its machine and its versions."""
        previous = self.previous or {}
        if (previous.get("outcome") or {}).get("kind") in OVER:
            self._completed = {name: previous[name] for name in ("ended", "outcome", "progress") if name in previous}
        self._info = {
            "id": previous.get("id", uuid.uuid4().hex),
            "continued": [*previous.get("continued", []), _now()] if self.previous else [],
            "command": [sys.executable, *sys.argv],
            "started": previous.get("started", _now()),
            "ended": None,
            "outcome": None,
            **info,
            "git_commit": _git_commit(),
            "versions": _versions(),
            **self._completed,  # a kill before the restore leaves a run that is over
        }
        self._write_info()

    def goes_on(self) -> None:
        """Drop the earlier outcome: the run has restored a checkpoint."""
        if self._completed:
            self._completed = {}
            self._info.pop("progress", None)
            self.note({"ended": None, "outcome": None})

    def note(self, info: Mapping[str, Any]) -> None:
        """Add entries to ``run.json``, or replace them."""
        self.look()
        self._info |= info
        self._write_info()

    def end(self, outcome: Mapping[str, Any], at: Counters) -> None:
        """Write the outcome of the run and its final counters, and close the files, even if the disk rejects the outcome.

        If the run was over and this attempt failed before it restored a checkpoint, ``run.json`` keeps the earlier outcome.
        """
        with ExitStack() as closing:
            closing.callback(self.release)
            for log in self._logs.values():
                closing.callback(log.end)
            self.note({"ended": _now(), "outcome": dict(outcome), "progress": asdict(at), **self._completed})

    def release(self) -> None:
        """Release the directory for other processes."""
        self.when_gone = _do_nothing
        try:
            self.flush_records()
        finally:
            self._lock.release(unused=not self._info)  # an error before `begin` leaves the directory as it was

    def offsets(self) -> dict[str, int]:
        """Write the records that wait. Return the length in bytes of the files that records and decisions are appended to."""
        self.look()
        self.flush_records()
        sizes = {name: (self.path / name).stat().st_size for name in ROWS if (self.path / name).exists()}
        return {name: size + len(self._logs[name].waiting) for name, size in sizes.items()}

    def sync(self) -> None:
        """Flush records, decisions and the names of all files to the disk. May be called from any thread.

        Raises:
            OSError: The disk rejects them.
        """
        for path in (*(self.path / name for name in ROWS), self.path):
            with suppress(FileNotFoundError):
                flush(path)

    def cut(self, offsets: Mapping[str, int], step: int) -> None:
        """Drop the rows and media that were written after a checkpoint: the continued run writes them again.

        After a rollback or a new start it does not, so they are copied first; see `branch_files`.
        """
        self.flush_records()
        cut(self.path, offsets, step)

    def add_record(self, record: Record) -> None:
        """Append a line to ``metrics.jsonl``: within a second, see `GatheredLog`."""
        self._records.gather(record.to_json)
        self._look_sometimes()

    def flush_records(self) -> None:
        """Write the records that wait. May be called from any thread."""
        self._records.flush()

    def write_records_at_once(self) -> None:
        """Write each record before the next step, from now on."""
        self._records.at_once = True
        self.flush_records()

    def add_decision(self, decision: Mapping[str, Any]) -> None:
        """Append a line to ``decisions.jsonl``."""
        self._logs["decisions.jsonl"].add(json.dumps(masked(decision)))
        self._look_sometimes()

    def add_fingerprint(self, row: Mapping[str, Any]) -> None:
        """Append a line to ``fingerprints.jsonl``."""
        self._logs["fingerprints.jsonl"].add(json.dumps(row))

    def add_text(self, text: str) -> None:
        """Append a text that the user has seen to ``console.log``."""
        self._logs["console.log"].add(masked_text(text))

    def look(self) -> None:
        """Call `when_gone` if the directory was moved or deleted."""
        self._looked_at = time.monotonic()
        try:
            gone = _inode(self.path) != self._inode and not is_held(self.path)  # some file systems change inodes
        except OSError as error:  # else the disk does not answer now
            gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        if gone:
            self.when_gone()

    def _look_sometimes(self) -> None:
        if time.monotonic() - self._looked_at > _LOOKS_S:
            self.look()

    def recreate(self) -> None:
        """Make the directory at its path again, and write ``run.json`` and later lines there.

        Raises:
            OSError: The directory cannot be made, or another run holds it.
        """
        self.flush_records()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.release()
        self._lock, self._inode = _locked(self.path), _inode(self.path)
        for log in self._logs.values():
            log.reopen()
            log.flush()  # lines for which there was no file
        self._records.reopen()  # the file may be replaced, with rows from memory
        self._write_info()

    def _write_info(self) -> None:
        with replacing(self.path / "run.json") as beside:  # a reader sees a whole file at any time
            beside.write_text(json.dumps(masked(self._info), indent=2) + "\n", encoding="utf-8")


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
        course = BatchLog.from_plain(data) if data else None
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


def _do_nothing() -> None: ...


def check_new(path: Path) -> None:
    """Check that a new run can begin in a directory, which is made if it is not there.

    Raises:
        DirectoryError: It cannot be written, or holds a run already.
    """
    _check_free(path, resume=False)
    _check_writable(path)


def _inode(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino


def _check_free(path: Path, resume: bool) -> dict[str, Any] | None:
    info = _info_in(path)
    if info is not None and not resume:
        raise DirectoryError(_taken(path, info))
    return info


def _info_in(path: Path) -> dict[str, Any] | None:
    try:
        info = read_object(path / "run.json")
        _check_fields(info or {})
        return info
    except (ValueError, TypeError, OverflowError) as error:
        raise DirectoryError(
            f"directory {str(path)!r} holds a run.json that Cadenza cannot read ({error}). Give another directory=, or "
            "move this one away."
        ) from None


def _check_fields(info: Mapping[str, Any]) -> None:
    """Raise `ValueError` or `TypeError` for a field that a run which continues reads, and that Cadenza did not write."""
    for name, kind in _KINDS.items():
        if not isinstance(info.get(name), kind | None):
            raise TypeError(f"{name} must be a {kind.__name__}; got {info[name]!r}")
    branch, outcome, progress = info.get("branch") or {}, info.get("outcome"), info.get("progress") or {}
    Branch.of(branch, info.get("id") or "")
    if not isinstance(branch.get("resumed_at"), str | None):
        raise TypeError(f"resumed_at must be a str; got {branch['resumed_at']!r}")
    if outcome is not None and not all(isinstance(outcome.get(name), str) for name in ("kind", "reason")):
        raise ValueError(f"outcome must have a kind and a reason; got {outcome!r}")
    known = {field.name for field in fields(Counters)}
    if strange := progress.keys() - known:
        raise ValueError(f"progress has no {sorted(strange)[0]!r}")
    for count in progress.values():
        count_in(count)


def _taken(path: Path, info: Mapping[str, Any]) -> str:
    outcome = info.get("outcome")
    state = f"a run that {outcome['kind']} at {info['ended']}" if outcome else f"a run started at {info['started']}"
    saved = (path / "checkpoints").exists() or info.get("checkpoints")
    again = "Continue it with" if saved else "It has no checkpoint to continue from: start it anew with"
    return (
        f"directory {str(path)!r} already holds {state}, and nothing is overwritten. {again} fit(resume='auto'), give another "
        "directory=, or move this one away."
    )


def _locked(path: Path) -> FolderLock:
    """Return the directory's lock.

    Raises:
        DirectoryError: Another run holds the lock, or the lock file cannot be opened.
    """
    try:
        return FolderLock(path)
    except HeldError as error:
        raise DirectoryError(f"directory {str(path)!r} is in use by {error}, or give another directory=.") from None
    except OSError as error:
        raise _unwritable(path, error) from error


def _check_writable(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_no_link(path)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise _unwritable(path, error) from error


def _check_no_link(path: Path) -> None:
    """Raise `DirectoryError` if a run would write through a link: a directory may come from another person."""
    for name in (*ROWS, "console.log", LOCK, HOLDER):
        if (path / name).is_symlink():
            raise DirectoryError(
                f"directory {str(path)!r} holds {name} as a symbolic link, and a run would change its target. Remove it, or "
                "give another directory=."
            )


def _unwritable(path: Path, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"directory {str(path)!r} cannot be written: {error.strerror or error}. Give a directory= in which files can be "
        "made, or none to write nothing."
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _versions() -> dict[str, str]:
    return {
        "cadenza": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _git_commit() -> str | None:
    """Return the commit of the working directory, with a ``+`` if files differ from it; None outside of git."""
    here = working_directory()
    if "GIT_DIR" not in os.environ and not any((folder / ".git").exists() for folder in (here, *here.parents)):
        return None  # asking git takes longer than the rest of the start
    try:
        command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), "(initial)")
    changed = any(not line.startswith("#") for line in lines)
    return None if commit == "(initial)" else commit + ("+" if changed else "")

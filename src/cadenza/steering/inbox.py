"""The side of the run: its folder for acts, of which it takes each one once, and the log that survives a kill."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cadenza.files.disk import flush, replacing
from cadenza.steering.acts import FOLDER, KEY, LARGEST, LISTENING, LOG, VERBS, WAITING, Act, act_in, is_name, log_of

_MOST = 1000  # files that one look reads
_HAS_DIR_FD = os.open in os.supports_dir_fd and os.unlink in os.supports_dir_fd and os.listdir in os.supports_fd


class Inbox:
    """The folder ``steering`` in the directory of a run, for the process that trains it.

    Both folders are opened once: who renames one or puts a link in its place changes nothing. A file is removed
    only after its signature was checked and its line in the log is on the disk, so an act is neither lost nor taken twice.

    Args:
        directory: The run directory.
        run: The id of the run.

    Raises:
        OSError: The folder cannot be made, belongs to another user, or can be written by others.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._folder, self._run = directory / FOLDER, run
        self._waiting = self._folder / WAITING
        self._folder_fd = _own_folder(self._folder, 0o755)
        self._fd = _own_folder(self._waiting, 0o700)
        self._key = _key_in(self._folder / KEY)
        self.taken: set[str] = {row["id"] for row in log_of(str(directory))}
        """The ids of all acts that were taken or refused, also by earlier processes of this run."""
        self.refused: list[tuple[str, str]] = []
        """The names of files that are no acts of this run, with the reason. The run reports them."""
        self.problem: str = ""
        """Why the log could not be written; empty if it could."""
        self._seen = set[str]()
        with replacing(self._folder / LISTENING) as beside:
            beside.write_text(json.dumps({"run": run, "pid": os.getpid(), "since": time.time()}) + "\n", encoding="utf-8")

    def is_empty(self) -> bool:
        """Return whether no new file waits. May be called from any thread."""
        return all(name in self._seen for name in self._names())

    def take(self, at: Mapping[str, int]) -> list[Act]:
        """Return the acts that wait, in order, and log that they are taken at these counters. Others wait longer."""
        acts = []
        for name in sorted(self._names()):
            act = None if name in self._seen else self._read(name)
            if act is None:
                continue
            if act.id not in self.taken:
                if not self.note_taken(act, at):
                    break
                acts.append(act)
            with suppress(OSError):
                os.unlink(self._at(name), dir_fd=self._fd)
        return acts

    def note_taken(self, act: Act, at: Mapping[str, int]) -> bool:
        """Write to the log that an act is taken, before it has any effect. Return whether it is on the disk."""
        logged = self._log({**act.plain(), "run": self._run, **at, "taken": round(time.time(), 3)})  # also one of another run
        if logged:
            self.taken.add(act.id)
        return logged

    def note_result(self, act: Act, at: Mapping[str, int], **result: str | bool) -> None:
        """Write the result of an act to the log, or why it was refused."""
        self._log({"id": act.id, **at, **result})

    def close(self) -> None:
        """Take no more acts."""
        with suppress(OSError):
            (self._folder / LISTENING).unlink()
        for descriptor in (self._fd, self._folder_fd):
            if descriptor is not None:
                os.close(descriptor)
        self._fd = self._folder_fd = None

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._waiting if self._fd is None else self._fd) as entries:
                return [entry.name for entry, _ in zip(entries, range(_MOST), strict=False) if is_name(entry.name)]
        except (OSError, TypeError):  # it is closed, or was deleted
            return []

    def _read(self, name: str) -> Act | None:
        """Return the act in a file; None, once, for one that is none. Such a file stays where it is."""
        try:
            act = act_in(self._content(name), self._key)
            if act.id != name.removesuffix(".json"):
                raise ValueError("its name is not its id")
            if act.run != self._run:
                raise ValueError("it is for another run")
            if act.verb not in VERBS:
                raise ValueError(f"its verb must be one of {', '.join(VERBS)}; got {act.verb[:40]!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._seen.add(name)
            self.refused.append((name, str(error)))
            return None
        return act

    def _content(self, name: str) -> bytes:
        with os.fdopen(_regular(self._at(name), os.O_RDONLY, self._fd), "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        return content

    def _at(self, name: str) -> str:
        return name if self._fd is not None else str(self._waiting / name)

    def _log(self, row: Mapping[str, Any]) -> bool:
        """Append a row to the log, and return whether it is on the disk. A full disk does not end the training."""
        path = LOG if self._folder_fd is not None else str(self._folder / LOG)
        try:
            with os.fdopen(_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, self._folder_fd), "r+b", buffering=0) as file:
                whole = file.seek(0, os.SEEK_END) == 0 or (file.seek(-1, os.SEEK_END), file.read(1))[1] == b"\n"
                line = json.dumps(row).encode() + b"\n"
                line = line if whole else b"\n" + line  # after a kill in the middle of a line
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
        except OSError as error:
            self.problem = str(error)
            return False
        return True


def _regular(path: str, flags: int, folder: int | None) -> int:
    """Open a regular file, without following a link or waiting for the other end of a pipe; return its descriptor."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o644, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def _own_folder(path: Path, mode: int) -> int | None:
    """Make a folder, or check that the present one is that of this user alone. Return its descriptor, where there are any.

    Raises:
        OSError: It is a link or no folder, belongs to another user, or can be written by others.
    """
    made = False
    with suppress(FileExistsError):
        path.mkdir(mode=mode)
        made = True
        flush(path.parent)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or (hasattr(os, "geteuid") and facts.st_uid != os.geteuid()):
        raise OSError(f"{str(path)!r} must be a folder of the user of this process. Remove it.")
    if not _HAS_DIR_FD:
        return None
    if facts.st_mode & 0o022:
        raise OSError(f"{str(path)!r} can be written by other users. Change it with: chmod {mode:o} {path}")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if made:
        os.fchmod(descriptor, mode)  # without the umask
    return descriptor


def _key_in(path: Path) -> bytes:
    """Return the key of the run; a new one if there is none that only this user can read."""
    with suppress(OSError):
        facts = path.lstat()
        own = not hasattr(os, "geteuid") or (facts.st_uid == os.geteuid() and not facts.st_mode & 0o077)
        if stat.S_ISREG(facts.st_mode) and own and facts.st_size == 64:
            return path.read_bytes()
        path.unlink()
    key = os.urandom(32).hex().encode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key

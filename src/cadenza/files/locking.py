"""Exclusive use of a folder by one process: a kernel lock or, without locks, a file that names the holder."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TextIO

LOCK = "run.lock"
HOLDER = "run.holder"
"""The name of the file that names the process, on file systems without locks."""
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_LOCKED_BYTE = 1 << 30
_UNREADABLE_S = 60.0  # an older holder file without content is left from a killed writer


class HeldError(Exception):
    """The folder is in use. The message names the holder and the remedy."""


def is_held(folder: Path) -> bool:
    """Return whether a process holds a folder. The question takes no lock that could refuse a run that starts now."""
    try:
        with os.fdopen(os.open(folder / LOCK, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # may be a FIFO
            if _locks().is_locked(file):
                return True
    except OSError:  # no run was here, or the lock file cannot be read
        return False
    content = _content_of(folder / HOLDER)  # on a file system without locks
    return content is not None and _why_held(content, folder / HOLDER) is not None


class FolderLock:
    """Holds a folder until `release`, or until this process ends in any way.

    The lock belongs to the open file, so other code of this process may open and close the lock file. A forked child, such as a
    loader worker, closes its copy at once, since it may outlive its parent.

    Args:
        folder: An existing folder that can be written.

    Raises:
        HeldError: Another process, or another lock of this one, holds the folder.
        OSError: The lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._owner = os.getpid()
        self._file: TextIO | None = None
        self._holder: Path | None = None
        self._path, self._keys = folder / LOCK, _keys_of(folder)
        _free_in_children()
        with _GUARD:
            if not _HELD.isdisjoint(self._keys):
                raise HeldError(f"{_this_process()}, by a run that has not ended. Wait for it")
            self._is_new = not self._path.exists()
            self._file = self._locked(folder)
            _HELD.update(self._keys)
            _LOCKS.add(self)

    def release(self, *, unused: bool = False) -> None:
        """Release the folder. May be called again. A copy in a forked child releases nothing.

        With `unused`, the lock file is removed if this lock has made it.
        """
        if self._file is None or os.getpid() != self._owner:
            return
        with _GUARD:
            file, self._file = self._file, None
            if unused and self._is_new:
                with suppress(OSError):  # an open file cannot be removed on Windows
                    self._path.unlink()
            if self._holder is not None:
                self._holder.unlink(missing_ok=True)
            else:  # not by closing alone: a child that did not go through Python's fork may hold a copy
                _locks().unlock(file)
            file.close()
            _HELD.difference_update(self._keys)
            _LOCKS.discard(self)

    def __del__(self) -> None:
        self.release()

    def _locked(self, folder: Path) -> TextIO:
        """Return the lock file, locked."""
        for _ in range(3):
            file = _opened(self._path)
            try:
                self._take(folder, file)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):  # else it was removed in the meantime
                        return file
            except BaseException:
                file.close()
                raise
            file.close()
        raise HeldError("another process, which started at the same moment. Wait for it, stop it")

    def _take(self, folder: Path, file: TextIO) -> None:
        try:
            locks = _locks().lock(file)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise HeldError(f"{holder}. Wait for it, stop it") from None
        if locks:
            file.truncate(0)
            file.write(_this_process())
            file.flush()
        else:
            self._holder = _held_by_file(folder / HOLDER)

    def _forget(self) -> None:
        """Close this copy in a forked child; the lock stays with the parent."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


_GUARD = threading.RLock()  # a finalizer may take it again
_HELD: set[Any] = set()
_LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()
_frees_in_children = False


def _keys_of(folder: Path) -> set[Any]:
    """Return the keys of a folder in this process: its inode, and its path, since some file systems change inodes."""
    facts = folder.stat()
    return {(facts.st_dev, facts.st_ino), folder.resolve()}


def _free_in_children() -> None:
    """Make forked children close their copies of the locks, from the first lock on."""
    global _frees_in_children
    if not _frees_in_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)
        _frees_in_children = True


def _forget_all() -> None:
    global _GUARD
    _GUARD = threading.RLock()  # another thread of the parent may have held it
    for lock in [*_LOCKS]:
        lock._forget()
    _LOCKS.clear()
    _HELD.clear()


# -- locks of the operating system ---------------------------------------------------------------------------------


def _opened(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0), 0o666)
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")


class _Locks:
    """The locks of a system that has none."""

    def lock(self, file: TextIO) -> bool:
        """Lock an open file. Return false if the file system or the operating system has no locks.

        Raises:
            BlockingIOError, PermissionError: Another open file holds the lock.
        """
        return False

    def unlock(self, file: TextIO) -> None:
        """Unlock a file that `lock` has locked."""

    def is_locked(self, file: BinaryIO) -> bool:
        """Return whether another open file holds the lock."""
        return False


class _PosixLocks(_Locks):
    def __init__(self) -> None:
        import fcntl

        self._fcntl = fcntl

    def lock(self, file: TextIO) -> bool:
        fcntl = self._fcntl
        if sys.platform == "linux":
            try:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
                return True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                if error.errno != errno.EINVAL:  # EINVAL: the kernel does not support this kind
                    return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False

    def unlock(self, file: TextIO) -> None:
        with suppress(OSError):
            if sys.platform == "linux":
                self._fcntl.fcntl(file, self._fcntl.F_OFD_SETLK, _whole_file(self._fcntl.F_UNLCK))
            self._fcntl.flock(file, self._fcntl.LOCK_UN)

    def is_locked(self, file: BinaryIO) -> bool:
        if sys.platform == "linux":
            with suppress(OSError):  # EINVAL: the kernel does not support this kind
                found: bytes = self._fcntl.fcntl(file, self._fcntl.F_OFD_GETLK, _whole_file(self._fcntl.F_WRLCK))
                return bool(struct.unpack("hhqqi0q", found)[0] != self._fcntl.F_UNLCK)
        try:
            self._fcntl.lockf(file, self._fcntl.LOCK_SH | self._fcntl.LOCK_NB)
        except OSError:
            return True
        return False


class _WindowsLocks(_Locks):
    """Locks one byte far behind the content, since Windows does not let others read a locked byte."""

    def __init__(self) -> None:
        self._msvcrt: Any = import_module("msvcrt")

    def lock(self, file: TextIO | BinaryIO) -> bool:
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        self._msvcrt.locking(file.fileno(), self._msvcrt.LK_NBLCK, 1)
        return True

    def unlock(self, file: TextIO | BinaryIO) -> None:
        with suppress(OSError):
            os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
            self._msvcrt.locking(file.fileno(), self._msvcrt.LK_UNLCK, 1)

    def is_locked(self, file: BinaryIO) -> bool:
        try:
            self.lock(file)
        except OSError:
            return True
        self.unlock(file)
        return False


def _locks() -> _Locks:
    """Return the locks of this operating system."""
    for kind in (_PosixLocks, _WindowsLocks):
        with suppress(ImportError):
            return kind()
    return _Locks()


def _whole_file(kind: int) -> bytes:
    """Return a ``struct flock`` for the whole file: kind, SEEK_SET, start, length, and no process, as these locks demand."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


# -- without locks: a file that names the holder -------------------------------------------------------


def _held_by_file(path: Path) -> Path:
    """Create the holder file of this process. Replace the file of a process that has ended.

    Raises:
        HeldError: The process that the file names is alive, or it is not visible from here.
    """
    identity = json.dumps(_identity(os.getpid()))
    for _ in range(3):  # other processes may create and replace it at the same time
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(identity)
                file.flush()
                os.fsync(file.fileno())
            return path
        except FileExistsError:
            _remove_if_left(path)
    raise HeldError("another process, which started at the same moment. Wait for it, stop it")


def _remove_if_left(path: Path) -> None:
    """Remove the holder file of a killed process."""
    content = _content_of(path)
    if content is None:
        return
    refusal = _why_held(content, path)
    if refusal is not None:
        raise HeldError(refusal)
    import uuid  # imported here, as the next two: `cadenza ask` needs none of them, and they take a third of its time

    aside = path.with_name(f"{HOLDER}.{uuid.uuid4().hex[:8]}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _content_of(aside) != content:  # another process has replaced it, and holds the folder
        aside.rename(path)
        raise HeldError("another process, which started at the same moment. Wait for it, stop it")
    aside.unlink()


def _content_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _why_held(content: str, path: Path) -> str | None:
    """Return the holder of the folder and the remedy; None if that process has ended."""
    remedy = f"This file system has no locks: if that process has ended, remove {str(path)!r}"
    try:
        told = json.loads(content)
        pid, host, namespace, start = int(told["pid"]), told["host"], told["namespace"], told["start"]
    except (LookupError, TypeError, ValueError, RecursionError):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime < _UNREADABLE_S:
                return f"a process that {path.name!r} does not name. {remedy}"
        return None
    here = _identity(pid)
    who = f"process {pid} on {host}"
    if (host, namespace) != (here["host"], here["namespace"]):
        return f"{who}, which is not visible from here. {remedy}"
    if here["start"] is None:
        return None
    if not start or not here["start"] or here["start"] == start:
        return f"{who}. {remedy}. Else wait for it, stop it"
    return None  # another process has this PID now


def _identity(pid: int) -> dict[str, Any]:
    """Return the identity of a process: host, PID namespace, PID and start time.

    The start is None if the process does not exist, and empty if the system does not report it.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return {"pid": pid, "host": _host(), "namespace": namespace, "start": _start_of(pid)}


def _start_of(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        try:
            # The name, in parentheses, may hold anything; the start, in ticks since the boot, is the 22nd field.
            after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id")
        return None if after_name[0] in "ZX" else f"{boot.read_text().strip() if boot.exists() else ''} {after_name[19]}"
    import subprocess

    try:
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() or None


def _this_process() -> str:
    return f"process {os.getpid()} on {_host()}"


def _host() -> str:
    import platform

    return platform.node()

"""The package works without the modules, signals and flags that Windows does not have, in a process that loses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import fcntl, importlib, os, pkgutil, shutil, signal, sys, types
import numpy, safetensors.torch, torch, torch.distributed, torch.utils.tensorboard
from pathlib import Path

LK_UNLCK, LK_NBLCK, flock, kinds = 0, 2, fcntl.flock, {0: fcntl.LOCK_UN, 2: fcntl.LOCK_EX | fcntl.LOCK_NB}

def locking(descriptor, mode, count):
    assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20, "another process could not read who holds the lock"
    try:
        flock(descriptor, kinds[mode])
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None

msvcrt = types.ModuleType("msvcrt")
msvcrt.locking, msvcrt.LK_UNLCK, msvcrt.LK_NBLCK = locking, LK_UNLCK, LK_NBLCK
sys.modules["msvcrt"] = msvcrt
for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix"):
    sys.modules[name] = None
for module, names in (
    (signal, "SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGCHLD SIGALRM SIGCONT SIGSTOP SIGQUIT SIGPIPE"),
    (os, "O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_SYNC fork forkpty register_at_fork geteuid getuid getgid killpg setsid uname "
         "nice sched_getaffinity statvfs getloadavg chown wait waitid"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
opened = os.open

def refusing(path, flags, *more, **named):
    if "dir_fd" not in named and sys._getframe(1).f_code.co_filename.startswith(package) and os.path.isdir(path):
        raise PermissionError(13, "Windows opens no folders", path)
    return opened(path, flags, *more, **named)

import cadenza
package = os.path.dirname(cadenza.__file__)
os.open = refusing

for module in pkgutil.walk_packages(cadenza.__path__, "cadenza."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from cadenza.callbacks import Checkpoint
from cadenza.files.locking import FolderLock, HeldError, is_held
from cadenza.testing import tiny_trainer

directory = Path(sys.argv[1])
for steps in (2, 4):
    trainer = tiny_trainer(directory=directory, steps=steps, callbacks=[Checkpoint("1 step")])
    assert trainer.fit(resume="auto").progress.origin.step == steps - 2
assert not is_held(directory)
lock = FolderLock(directory)
assert is_held(directory)
from cadenza.files.locking import _locks, _opened, LOCK
try:
    _locks().lock(_opened(directory / LOCK))
    raise AssertionError("two locks on one folder")
except PermissionError:
    lock.release()
print(sorted(path.name for path in (directory / "checkpoints").iterdir() if not path.name.startswith(".")))
"""


def test_a_run_with_checkpoints_needs_nothing_that_windows_does_not_have(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['last', 'step-00000003', 'step-00000004']\n"

"""The package in a process of its own: it needs nothing that Windows does not have, and each name is where the docs say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import fcntl, importlib, os, pkgutil, shutil, signal, sys, types
import numpy, safetensors.torch, torch, torch.distributed.checkpoint, torch.utils.tensorboard
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


# -- names in the docs -------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
IMPORT = re.compile(r"^(?:>>> )?from (cadenza[\w.]*) import (?:\(([^)]*)\)|([^\n#(]+))", re.MULTILINE)
DOTTED = re.compile(r"`(cadenza(?:\.\w+)+)\b[^`]*`")

CHECK = """
import importlib, pkgutil, sys, types, warnings
import cadenza.callbacks, cadenza.sinks, cadenza.loading, cadenza.hooks, cadenza.drivers, cadenza.testing
for package in (cadenza.callbacks, cadenza.sinks, cadenza.loading, cadenza.hooks, cadenza.drivers, cadenza.testing):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)  # which sets an attribute of its package
warnings.simplefilter("ignore")  # of names that go in the next release
for line in sys.stdin.read().split():
    home, _, name = line.partition(":")
    value = importlib.import_module(home)
    for part in name.split("."):
        if hasattr(value, "__path__") and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")  # a module of an adapter
        value = getattr(value, part)
    if isinstance(value, types.ModuleType) and hasattr(value, part):
        print(line, "is a module that hides its own function or class of this name")
"""


def documented() -> set[str]:
    """Return the names that the pages import or mention, as ``module:name``."""
    names = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for home, listed, plain in IMPORT.findall(text):
            found = [one.partition(" as ")[0].strip() for one in (listed or plain).split(",")]
            names |= {f"{home}:{one}" for one in found if one.isidentifier()}
        for dotted in DOTTED.findall(text):
            names.add(f"cadenza:{dotted.removeprefix('cadenza.')}")
    return names


def test_every_name_in_the_docs_can_be_imported_from_there() -> None:
    names = documented() - {"cadenza:run_id", "cadenza:reading"}  # a key in a tracker; a name that goes in 0.3
    assert {"cadenza.callbacks:Evaluate", "cadenza:callbacks.freeze"} <= names
    done = subprocess.run([sys.executable, "-c", CHECK], input="\n".join(names), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")

"""Run a quick part of the tests with other versions of Python and torch: ``make test-matrix``.

CPU builds of torch for x86-64 are in torch's own index only. Two other sources are open to everyone: the package index has CPU
builds of torch 2.7 to 2.10 for arm64, and Debian builds torch for its newest Python. So each row of the matrix is a small
Debian tree in ``.matrix/`` with the Python of one Debian release, entered with ``chroot``. An arm64 tree runs under qemu. The
script needs Linux, root and apt.

A test that fails in a row is an error, except with Debian's torch if that is newer than the versions that Cadenza supports.
A row that cannot be set up is reported as not run, and a row that reaches a time limit as not finished: neither is an error.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TREES = ROOT / ".matrix"
NATIVE = (
    "tests/hooks",
    "tests/status",
    "tests/optim",
    "tests/checkpoint/store",
    "tests/checkpoint/test_resume.py",
    "tests/test_trainer.py",
    "tests/test_run.py",
)
# Emulated, everything takes about ten times as long, and each worker process of a loader half a minute to import torch.
EMULATED = (
    "tests/hooks/test_hooks.py",
    "tests/hooks/test_moments.py",
    "tests/status",
    "tests/optim/test_optimizers.py",
    "tests/checkpoint/store/test_store.py",
    "tests/checkpoint/test_resume.py::test_exact_at_start_middle_and_end_of_an_epoch",
    "tests/test_trainer.py",
    "tests/test_run.py",
    "-k=not workers",
)
LONGEST_S = 900  # of the tests of one row
DEADLINE = time.monotonic() + 2100  # of all rows with their set up: no command runs longer
# A row ends at its first failure, so a row that reaches its limit had none. pytest-timeout prints where a test was stuck.
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-o", "filterwarnings=error", "--timeout=600", "--durations=3")
PURE = ("pytest", "pytest-timeout", "sybil", "pluggy", "iniconfig", "packaging", "pygments", "rich", "markdown-it-py", "mdurl")
WHEELS = (
    "numpy",
    "safetensors",
    "fsspec",
    "filelock",
    "sympy",
    "networkx",
    "jinja2",
    "typing_extensions",
    "setuptools",
    "matplotlib",
)
FAILED = "FAILED"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
QEMU_ARM64 = (  # the header of an arm64 program, as docs of qemu and of the kernel's binfmt_misc give it
    r":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:/usr/bin/qemu-aarch64-static:F"
)


class CannotRunError(Exception):
    """This machine lacks something that a row needs."""


class Row(NamedTuple):
    """One combination of versions."""

    python: str
    torch: str  # empty: Debian's own build, for this machine's processor
    release: str  # of Debian

    @property
    def arch(self) -> str:
        return "arm64" if self.torch else {machine: arch for arch, machine in MACHINES.items()}[platform.machine()]

    @property
    def tree(self) -> Path:
        return TREES / f"python{self.python}-torch{self.torch or '-debian'}"

    @property
    def tests(self) -> tuple[str, ...]:
        return EMULATED if self.torch else NATIVE

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch or 'of Debian'}, {self.arch}"


# With the path as its first argument, Python knows sys.executable, which starts the workers of a loader.
START = "import os, sys; os.chdir('/cadenza'); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
MATRIX = (
    Row("3.11", "2.7.0", "bookworm"),
    Row("3.14", "", "forky"),
    Row("3.13", "2.8.0", "trixie"),
    Row("3.14", "2.10.0", "forky"),
)


def main() -> int:
    """Run each row whose name has the words of the command line, one for each core; return 1 if a row failed."""
    rows = [row for row in MATRIX if all(word in str(row) for word in sys.argv[1:])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(result_of, rows))
    sys.stdout.write("\n".join(["", *(f"{row}: {result}" for row, result in zip(rows, results, strict=True)), ""]))
    return int(any(result.startswith(FAILED) for result in results))


def result_of(row: Row) -> str:
    """Run the tests of a row, and print how they ended; return that in a few words."""
    begin = time.monotonic()
    try:
        if not (row.tree / "complete").exists():
            set_up(row)
        status, printed = run(row, "-c", "pass")
        if status != 0:  # a container can forbid mounts and namespaces
            raise CannotRunError(f"its Python does not start: {printed.strip()[-300:]}")
        ready = time.monotonic()
        status, printed = run(row, "-m", "pytest", *OPTIONS, *row.tests)
    except (CannotRunError, OSError) as error:
        result, shown = f"NOT RUN: {error}", []
    else:
        result = f"{verdict(row, status, printed)}; set up in {ready - begin:.0f} s, tests in {time.monotonic() - ready:.0f} s"
        lines = printed.strip().splitlines()
        shown = lines[-1:] if status == 0 else lines[-60:]
    sys.stdout.write("\n".join([*shown, f"{row}: {result}\n"]))
    sys.stdout.flush()
    return result


def verdict(row: Row, status: int | None, printed: str) -> str:
    """Return in words what an exit status means; None: the row was ended at its time limit."""
    if status == 0:
        return "passed"
    if status is None or "from pytest-timeout" in printed:  # emulated on a busy machine, each test takes far longer
        return "NOT FINISHED, no test had failed before the time limit"
    newest = pinned_torch()
    if numbers(installed := row.torch or torch_of_debian(row)) > numbers(newest):
        return f"failed with torch {installed}, which is newer than the supported {newest}: for information only"
    return FAILED


def pinned_torch() -> str:
    """Return the newest version that Cadenza supports, with which it is developed."""
    found = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def torch_of_debian(row: Row) -> str:
    """Return the version of Debian's torch in a tree."""
    (folder,) = (row.tree / "usr/lib/python3/dist-packages").glob("torch-*.dist-info")
    return folder.name.removeprefix("torch-").removesuffix(".dist-info")


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version.

    >>> numbers("2.10.0") > numbers("2.9.1+debian"), numbers("2.13.1") > numbers("2.13.0")
    (True, False)
    """
    return tuple(map(int, version.split(".")[:2]))


# -- one tree -----------------------------------------------------------------------------------------


def set_up(row: Row) -> None:
    """Unpack Python and its libraries, then install torch and the packages of the tests."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRunError("it needs Debian's apt, and root")
    if MACHINES[row.arch] != platform.machine():
        emulate()
    shutil.rmtree(row.tree, ignore_errors=True)
    packages = ["python3", "libc-bin", "dash", "coreutils", "git", "libgomp1", "libstdc++6"]
    if not row.torch:
        packages += ["python3-torch", "python3-numpy", "python3-safetensors", "python3-fsspec"]
    unpack(row, packages)
    (row.tree / "site").mkdir()
    if row.torch:
        install(row, "--no-deps", f"torch=={row.torch}", "torchmetrics", "lightning-utilities")
        install(row, *WHEELS, *PURE)
    else:
        install(row, "--no-deps", *PURE, "torchmetrics", "lightning-utilities")
    (row.tree / "complete").touch()


def unpack(row: Row, packages: list[str]) -> None:
    """Unpack Debian packages and all that they need into the tree. Their scripts do not run."""
    for folder in ("bin", "lib", "sbin", "lib64"):
        (row.tree / "usr" / folder).mkdir(parents=True, exist_ok=True)
        (row.tree / folder).symlink_to(f"usr/{folder}")
    apt = row.tree / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources").write_text(f"deb [signed-by={KEYS}] {mirror()} {row.release} main\n")
    options = {
        "Dir::State": apt, "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "status", "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives", "Dir::Etc::sourcelist": apt / "sources", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null", "APT::Architecture": row.arch, "APT::Architectures::": row.arch,
    }  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    quietly([*command, "update"])
    quietly([*command, "--yes", "--no-install-recommends", "--download-only", "install", *packages])
    for archive in sorted((apt / "archives").glob("*.deb")):
        # tar would replace the links above with folders: an older package has files in /bin and /lib
        unpacked = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
        quietly(["tar", "-x", "--keep-directory-symlink", "-C", str(row.tree)], stdin=unpacked.stdout)
    shutil.rmtree(apt)


def mirror() -> str:
    """Return the address from which this machine gets Debian's packages."""
    known = quietly(["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"])
    found = re.search(r"^Debian (\S+)$", known, re.MULTILINE)
    if found is None:
        raise CannotRunError("apt knows no mirror of Debian. Run: apt-get update")
    return found[1]


def emulate() -> None:
    """Let the kernel start arm64 programs with qemu."""
    if not Path("/usr/bin/qemu-aarch64-static").exists():
        quietly(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", "qemu-user-static"])
    handlers = Path("/proc/sys/fs/binfmt_misc")
    if not (handlers / "register").exists():
        quietly(["mount", "-t", "binfmt_misc", "none", str(handlers)])
    if not (handlers / "qemu-aarch64").exists():
        (handlers / "register").write_text(QEMU_ARM64)


def install(row: Row, *packages: str) -> None:
    """Install wheels for the tree's Python and processor, with the pinned versions; torch's version is the row's."""
    pins = row.tree / "pins.txt"
    pins.write_text("\n".join(re.findall(r"^(?!torch==|#).+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)))
    machine = MACHINES[row.arch]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in (28, 27, 26, 17)] + [f"manylinux2014_{machine}", "any"]
    tag = f"cp{row.python.replace('.', '')}"
    chosen = [f"--abi={abi}" for abi in (tag, "abi3", "none")] + [f"--platform={name}" for name in platforms]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--disable-pip-version-check"]
    command += [f"--constraint={pins}", f"--target={row.tree / 'site'}", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={row.python}"]
    quietly([*command, *chosen, *packages])


# -- commands -----------------------------------------------------------------------------------------


def run(row: Row, *arguments: str) -> tuple[int | None, str]:
    """Run the tree's Python with a copy of this checkout in ``/cadenza``; return exit status, None at the limit, and output."""
    copy = row.tree / "cadenza"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in ("src", "tests", "docs", "conftest.py", "pyproject.toml", "README.md"):
        source = ROOT / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
    libraries = f"/usr/lib/{MACHINES[row.arch]}-linux-gnu"
    variables = {
        "PATH": "/usr/bin:/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": f"{libraries}/blas:{libraries}/lapack", "PYTHONPATH": "/cadenza/src:/cadenza/docs:/site",
    }  # fmt: skip
    inside = ["/usr/bin/python3", "-c", START, *arguments]
    folders = "mkdir -p proc dev sys tmp && mount -t proc proc proc && mount --rbind /dev dev && mount --rbind /sys sys"
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    # A shell stays as the first process: the kernel does not deliver unhandled signals to it, and tests send such signals.
    script = f'{folders} && "$(command -v env)" -i {settings} "$(command -v chroot)" . "$@"; exit $?'
    # The row has its own mounts and processes. All of them end with `unshare`, which ends with this thread.
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    given: Any = {"cwd": row.tree, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
    try:
        done = subprocess.run([*command, "sh", "-c", script, "sh", *inside], timeout=min(LONGEST_S, time_left_s()), **given)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, str(done.stdout)


def quietly(command: list[str], stdin: object = None) -> str:
    """Run a command and return what it printed; its messages are part of the error if it fails."""
    given: Any = {"stdin": stdin, "capture_output": True, "text": True, "check": False, "timeout": time_left_s()}
    try:
        done = subprocess.run(command, **given)
    except subprocess.TimeoutExpired as error:
        raise CannotRunError(f"{' '.join(command[:3])} ... did not end before the time limit of all rows") from error
    if done.returncode != 0:
        raise CannotRunError(f"{' '.join(command[:3])} ...: {done.stderr.strip()[-300:]}")
    return str(done.stdout)


def time_left_s() -> float:
    """Return the seconds until the time limit of all rows."""
    left = DEADLINE - time.monotonic()
    if left <= 0:
        raise CannotRunError("the time limit of all rows was reached")
    return left


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests as ``make test`` does: most of them side by side, then those in ``tests/alone``, then what failed once more.

    python tests/suite.py [--long] [arguments of pytest]

A test that fails is run again when nothing else runs. If it fails again, the suite fails. If it passes, it is named at the end
under "passed alone", and so is the first line of its error; of more than three such tests the suite fails, where those of a
file that failed with one error count as one. It fails, too, if a test leaves a file in the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = "tests/alone"
BESIDE = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", f"--ignore={ALONE}"]
MOST = 3
IN_MEMORY = Path("/dev/shm")  # thousands of checkpoints are flushed: on a disk that others use, each waits
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that it could not run

Failures = dict[str, str]


def run(failures: Path, *arguments: str) -> int:
    """Run pytest, which writes what fails to a file, and all else to the folder of this file; return its exit code."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", f"--failures={failures}", *arguments]
    code = subprocess.call(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(failures.parent)})
    print(f"-- {time.monotonic() - begin:.0f} s", flush=True)
    return code


def failed_in(failures: Path) -> Failures:
    """Return the first line of the error of each test that failed."""
    lines = failures.read_text(encoding="utf-8").splitlines() if failures.exists() else []
    return dict(json.loads(line) for line in lines)


def selected(failed: Failures) -> list[str]:
    """Return what runs the failed tests again. A block of a page needs the blocks before it: the whole page runs."""
    names = [name.partition("::")[0] if ".md::" in name else name for name in failed]
    return list(dict.fromkeys(names))


def again(failed: Failures, folder: Path) -> int:
    """Run what failed once more, alone; return the exit code of the suite."""
    print(f"\n{len(failed)} failed. They are run again, when nothing else runs.", flush=True)
    names, twice = folder / "names", folder / "twice"
    names.write_text("\n".join(selected(failed)), encoding="utf-8")
    code = run(twice, f"@{names}")
    if code not in (PASSED, FAILED):
        return code
    failed_twice = failed_in(twice)
    passed = [name for name in failed if name not in failed_twice]
    print(f"\n{len(passed)} passed alone" + ":" * bool(passed))
    for name in passed:
        print(f"  {name}: {failed[name]}")
    many = len(causes(passed, failed))
    if failed_twice:
        print(f"\n{len(failed_twice)} failed twice:")
        for name, error in failed_twice.items():
            print(f"  {name}: {error}")
    elif many > MOST:
        print(f"More than {MOST} tests passed only alone, with {many} errors. Find what each of them waits for.")
    return FAILED if failed_twice or many > MOST else PASSED


def causes(names: list[str], failed: Failures) -> set[tuple[str, str]]:
    """Return the files with the errors in them: a fixture that failed once for all tests of a file is one cause."""
    return {(name.partition("::")[0], failed[name]) for name in names}


def new_files() -> set[str]:
    """Return the files of the checkout that git neither has nor ignores."""
    listing = ["git", "ls-files", "--others", "--exclude-standard", "--directory"]
    return set(subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.split("\n"))


def main() -> int:
    """Run all tests."""
    before = new_files()
    code = run_all()
    if left := sorted(new_files() - before):
        print(f"Tests left files in the checkout: {', '.join(left)}. They belong in tmp_path.")
    return code or (FAILED if left else PASSED)


def run_all() -> int:
    """Run all tests, and what failed again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also tests that take minutes, and all seeds of property tests")
    options, more = parser.parse_known_args()
    if options.long:
        os.environ["CADENZA_LONG"] = "1"
    with tempfile.TemporaryDirectory(prefix="suite-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        failures = Path(folder, "failures")
        codes = [run(failures, *BESIDE, *more), run(failures, ALONE, *more)]
        if broken := [code for code in codes if code not in (PASSED, FAILED)]:
            return broken[0]
        failed = failed_in(failures)
        if failed:
            return again(failed, Path(folder))
        print("0 passed alone")
        return FAILED if FAILED in codes else PASSED


if __name__ == "__main__":
    sys.exit(main())

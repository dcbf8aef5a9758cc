"""The run directory: what a run writes, readable while it goes on and after it was killed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from cadenza.errors import DirectoryError
from cadenza.records import Record
from cadenza.version import __version__


class RunDirectory:
    """``run.json``, ``metrics.jsonl``, ``decisions.jsonl`` and ``console.log`` of one run.

    Raises:
        DirectoryError: The directory cannot be written, or holds a run already; nothing in it is changed then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_free(path)
        _check_writable(path)
        self._facts: dict[str, Any] = {}
        self._files: dict[str, TextIO] = {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write ``run.json``: what is run, where and with which versions."""
        self._facts = {
            "command": [sys.executable, *sys.argv],
            "started": _now(),
            "ended": None,
            "outcome": None,
            **facts,
            "git_commit": _git_commit(),
            "versions": _versions(),
        }
        self._write_facts()

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Write how the run ended, and close the files."""
        self._facts |= {"ended": _now(), "outcome": dict(outcome)}
        self._write_facts()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def add_record(self, record: Record) -> None:
        """Append a line to ``metrics.jsonl``."""
        self._append("metrics.jsonl", record.to_json())

    def add_decision(self, decision: Mapping[str, Any]) -> None:
        """Append a line to ``decisions.jsonl``."""
        self._append("decisions.jsonl", json.dumps(decision))

    def add_text(self, text: str) -> None:
        """Append to ``console.log`` what was shown to the user."""
        self._append("console.log", text)

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            self._files[name] = (self.path / name).open("a", encoding="utf-8", buffering=1)
        self._files[name].write(line + "\n")

    def _write_facts(self) -> None:
        # Beside, then renamed: whoever reads it while the run goes on sees a whole file.
        beside = self.path / "run.json.new"
        beside.write_text(json.dumps(self._facts, indent=2) + "\n", encoding="utf-8")
        beside.replace(self.path / "run.json")


def _check_free(path: Path) -> None:
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    outcome = facts.get("outcome")
    state = f"a run that {outcome['kind']} at {facts['ended']}" if outcome else f"a run started at {facts['started']}"
    raise DirectoryError(
        f"directory {str(path)!r} already holds {state}, and nothing is overwritten. Give another directory=, or move this "
        "one away."
    )


def _check_writable(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise DirectoryError(
            f"directory {str(path)!r} cannot be written: {error.strerror or error}. Give a directory= in which files can be "
            "made, or none to write nothing."
        ) from error


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
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()

"""Every Python block of README and docs is run, page by page, top to bottom, in a folder of its own."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.sybil import SybilCollection

# Where trackers write that are not told: neither among the user's own runs nor into the checkout. Trackio chooses its folder
# when it is first imported, and wandb when it is first used. Comet, once imported, records each run of MLflow that follows in
# the process.
for name in ("TRACKIO_DIR", "COMET_OFFLINE_DIRECTORY", "WANDB_DIR"):
    os.environ[name] = tempfile.mkdtemp(prefix="tracker-")
    atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)


def _import_parts_of_timm() -> None:
    """Make ``timm.scheduler`` importable where torchvision, which ``timm/__init__.py`` imports, is not installed."""
    spec = find_spec("timm")
    if spec is not None and find_spec("torchvision") is None:
        sys.modules.setdefault("timm", module_from_spec(spec))  # the package without its ``__init__.py``


_import_parts_of_timm()


def _enter_folder(namespace: dict[str, Any]) -> None:
    namespace["_folder"] = tempfile.TemporaryDirectory()
    namespace["_before"] = os.getcwd()
    os.chdir(namespace["_folder"].name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("default")  # a page may choose another one
    os.chdir(namespace["_before"])
    namespace["_folder"].cleanup()


def _enter_streaming(namespace: dict[str, Any]) -> None:
    from tests.recipes.streaming_without_torchvision import import_streaming

    import_streaming()
    _enter_folder(namespace)


def _pages(setup: Callable[[dict[str, Any]], None], **which: Any) -> Sybil:
    return Sybil(parsers=[PythonCodeBlockParser()], setup=setup, teardown=_leave_folder, **which)


STREAMING = "docs/recipes/mosaicml-streaming.md"
ABSENT = [] if find_spec("torchft") else ["docs/recipes/replica-groups.md"]  # on systems for which torchft has no wheel
PAGES = ["README.md", "docs/*.md", "docs/guides/*.md", "docs/recipes/*.md", "docs/tables/*.md"]
pytest_collect_file = SybilCollection(
    [_pages(_enter_folder, patterns=PAGES, excludes=[STREAMING, *ABSENT]), _pages(_enter_streaming, patterns=[STREAMING])]
).pytest()


def pytest_addoption(parser: Any) -> None:
    """Add the option with which tests/suite.py learns what failed."""
    parser.addoption("--failures", metavar="FILE", help="append the name and the first line of the error of each failure")


class _FailuresAsTheyCome:
    """Prints a failure when it happens, not only at the end of all tests, and adds it to a file."""

    def __init__(self, terminal: Any, file: str | None) -> None:
        self._terminal, self._file = terminal, file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_sep("_", f"{report.nodeid} ({report.when})", red=True)
            self._terminal.write_line(report.longreprtext)
            self._add(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._add(report)

    def _add(self, report: Any) -> None:
        if self._file is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message if crash is not None else report.longreprtext.strip()
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, next(iter(error.splitlines()), "")]) + "\n")


def pytest_sessionstart(session: Any) -> None:
    """Show failures as they come, in the process that has the terminal."""
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_FailuresAsTheyCome(terminal, session.config.getoption("failures")))

"""What all tests rely on: one thread, quick workers, long files first, a Ctrl-C that arrives, and a browser."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.long import LONG

if TYPE_CHECKING:
    from playwright.sync_api import Browser

torch.set_num_threads(1)  # the machines that run these tests have few cores, and sums must not depend on their number

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it when it is imported

# torch asks the name server for the name of each address that it connects to, and waits 5 s if the request is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # read by glibc, see resolv.conf(5)

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers: a test that needs a width says so

os.environ["GIT_DIR"] = os.devnull  # each run with a directory asks git: without a repository in a millisecond, not six

# For tests/forked.py; and with Python 3.14, workers of a loader are forks of this server. It imports these once, not each fork.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "cadenza.trainer", "cadenza.callbacks", "cadenza.testing"])

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts its background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until a device is initialized, torch keeps the stack of each seed for it; pytest's stacks are sixty frames deep.
_traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})
for _module in (torch.cuda, torch.mtia, torch.xpu):
    vars(_module)["traceback"] = _traceback

LONG_FILES = (
    "tests/contracts/test_typing.py",
    "tests/test_site.py",
    "tests/test_examples.py",
    "tests/distributed/test_other_ranks.py",
    "tests/commands/test_demo.py",
    "tests/contracts/test_budgets.py",
    "tests/test_suite.py",
    "tests/sinks/test_every_sink.py",
    "tests/report/test_browser.py",
    "tests/sinks/test_trackers.py",
)
"""The files that take longest. Started last, one of them would run alone, and the other cores would wait.

`pytest -n` needs ``--no-loadscope-reorder`` for it: xdist would start the files with most tests first.
"""

FORKING = ("tests/distributed/", "tests/scale/", "tests/timetravel/", "tests/loops/", "tests/loading/")
"""Tests that fork this process often. They come early: what others import makes it, and each fork, several times as large."""

IMPORTING = ("tests/compat/", "tests/recipes/", "tests/sinks/", "docs/", "README.md")
"""Tests that import such packages."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")  # its end hangs after tests that use asyncio in other files
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # imported here: few tests need it

    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed, so no page is looked at in one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--headless"], timeout=300_000)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put back what a test leaves in the process: environment variables, where MLflow writes, and which hints were given."""
    before = dict(os.environ)
    if (checks := sys.modules.get("cadenza.engine.start_checks")) is not None:
        checks._WARNED_OF.clear()
    yield
    if (fluent := sys.modules.get("mlflow.tracking.fluent")) is not None:
        fluent._active_experiment_id = None  # type: ignore[attr-defined]
        sys.modules["mlflow"].set_tracking_uri(None)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests; start the longest files first, then tests that fork, and those that import large packages last."""
    if not LONG and (long := [item for item in items if item.get_closest_marker("long")]):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    if gone := [name for name in LONG_FILES if not (config.rootpath / name).is_file()]:
        raise pytest.UsageError(
            f"LONG_FILES in tests/conftest.py names files that are not there: {gone}. Rename or remove them."
        )
    turns = {name: turn for turn, name in enumerate(LONG_FILES)}

    def turn(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return turns.get(file, len(turns) + (0 if file.startswith(FORKING) else 2 if file.startswith(IMPORTING) else 1))

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of later garbage collections, which would take half a second each."""
    import_module("torch._dynamo")  # the first optimizer imports it, and some ten thousand functions with it
    gc.collect()
    gc.freeze()

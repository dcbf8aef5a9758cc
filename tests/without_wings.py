"""A plugin of pytest for a copy of the package without the folders of the wings: tests that use a wing are skipped.

Names of a wing that the files of tests import, or read from ``cadenza.callbacks``, ``cadenza.loading`` and
``cadenza.sinks``, are stand-ins. The package itself gets none: what the core imports must be there.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import cadenza

SOURCE = Path(cadenza.__file__).parent
WING = re.compile(r"(?:cadenza|tests)\.(?:compat|compiled|parallel|report|sources|steering|timetravel|trackers)\b")
SIGNS = [r"\b[Aa]bsent\b", "is in a wing", rf"(?:package|No module named) '{WING.pattern}"]
"""What the report of a failed test says if the test needs a wing. The stand-ins add their names."""


class Absent:
    """A name of a wing. A test that uses it is skipped; a file of tests may call it, for a list of cases."""

    in_a_test: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.__dict__["__name__"] = name

    def __repr__(self) -> str:
        return f"<absent: {self.__name__}>"

    def _use(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"{self.__name__} is in a wing", allow_module_level=True)

    __enter__ = __getitem__ = __iter__ = __len__ = _use

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._use() if self.in_a_test else Absent(f"{self.__name__}(...)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._use()

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (Derived,)

    def __instancecheck__(self, instance: object) -> bool:
        return False


class Derived:
    """The base of classes that are derived from a class of a wing."""

    def __new__(cls, *arguments: Any, **named: Any) -> Derived:
        pytest.skip(f"{cls.__name__} is derived from a class of a wing", allow_module_level=True)


class AbsentModule(ModuleType):
    """A module of a wing, for files of tests."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


USUAL_IMPORT = builtins.__import__


def pytest_configure() -> None:
    """Put the stand-ins where files of tests find them."""
    for package in (cadenza.callbacks, cadenza.loading, cadenza.sinks):
        tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and WING.match(node.module or ""):
                for alias in node.names:
                    setattr(package, alias.name, Absent(f"{package.__name__}.{alias.name}"))
                    SIGNS.append(rf"\b{alias.name}\b")

    def import_for_tests(name: str, globals: Mapping[str, Any] | None = None, *more: Any, **named: Any) -> Any:
        by_test = str((globals or {}).get("__name__", "")).startswith("tests.")
        return AbsentModule(name) if by_test and WING.match(name) else USUAL_IMPORT(name, globals, *more, **named)

    builtins.__import__ = import_for_tests


def pytest_collection_finish() -> None:
    """All files are imported. From now on, an import is that of Python, and a call is a use."""
    builtins.__import__ = USUAL_IMPORT
    Absent.in_a_test = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that needs a wing in another process, a command of a wing, or all shipped callbacks, as skipped."""
    report = yield
    said = f"{report.longreprtext}\n{report.capstdout}\n{report.capstderr}" if report.failed else ""
    if said and (found := re.search("|".join(SIGNS), said)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"needs a wing: {found[0]}")
    return report

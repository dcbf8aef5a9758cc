"""Names of an original package that its adapter lacks. Importing one raises an error that names the replacement.

Each adapter has a file ``absent.toml``:

* ``original``: the name of the original package.
* ``guide``: the path of the guide.
* ``more``: another such file, with more names.
* ``texts``: fragments of advice, inserted where an advice, or a later fragment, has their name in braces; ``{here}`` is the
  adapter.
* ``absent``: module path inside the original ("" for the package itself) -> public names, separated by spaces -> advice. The
  name ``*`` stands for the module itself and everything below it: such a module does not exist in the adapter.

A name that is listed for a module counts as listed for the packages above it, because the originals export it there too.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

__all__ = ["Entry", "advise", "entries", "entries_in", "facts_of"]

ADAPTERS = "cadenza.compat."


class Entry(NamedTuple):
    """One name that an adapter does not provide."""

    module: str
    """Path inside the original; "" is the package itself."""
    name: str
    """``*`` is the module itself."""
    advice: str


def advise(package: str) -> None:
    """Make the imported modules of an adapter name the replacement of each name that they lack.

    Each gets a ``__getattr__`` (PEP 562). Type checkers do not see it, so they keep reporting unknown names. A listed
    name is an ``ImportError``, because ``from module import name`` replaces the message of an ``AttributeError``.
    Any other name raises an ``AttributeError``, as in every module.

    Args:
        package: The ``__name__`` of the calling module. Its submodules are included.
    """
    finder = next((hook for hook in sys.meta_path if isinstance(hook, _AbsentModules)), None)
    if finder is None:
        finder = _AbsentModules()
        sys.meta_path.append(finder)  # last, so that it only handles modules that do not exist
    finder.adapters.add(_split(package)[0])
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}."):
            vars(module)["__getattr__"] = partial(_refuse, name)


def _refuse(module: str, name: str) -> NoReturn:
    if not name.startswith("__") and (entry := _listed(module, name)):
        raise _error(module, name, entry)
    close = get_close_matches(name, [known for known in vars(sys.modules[module]) if not known.startswith("_")], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}.{hint}", name=name)


@cache
def entries(adapter: str) -> tuple[Entry, ...]:
    """Return all names that an adapter, such as ``nemo``, does not provide."""
    files = ["absent.toml", *filter(None, [facts_of(adapter).get("more")])]
    return tuple(entry for file in files for entry in entries_in(adapter, file))


@cache
def facts_of(adapter: str, file: str = "absent.toml") -> Mapping[str, Any]:
    """Return the content of a file of an adapter."""
    return tomllib.loads((Path(__file__).parent / adapter / file).read_text(encoding="utf-8"))


def entries_in(adapter: str, file: str) -> list[Entry]:
    """Return the names in one file of an adapter."""
    facts, texts = facts_of(adapter, file), {"here": f"{ADAPTERS}{adapter}"}
    for name, text in facts.get("texts", {}).items():
        texts[name] = text.format(**texts)
    return [
        Entry(module, name, advice.format(**texts))
        for module, rows in facts["absent"].items()
        for names, advice in rows.items()
        for name in names.split()
    ]


class _AbsentModules(MetaPathFinder):
    """Finds no module. For one that an adapter lacks it raises an error that names the replacement."""

    def __init__(self) -> None:
        self.adapters = set[str]()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        parent, _, name = fullname.rpartition(".")
        known = parent.startswith(ADAPTERS) and _split(parent)[0] in self.adapters
        if known and (entry := _whole(parent, name)):
            raise _error(parent, name, entry)


def _listed(module: str, name: str) -> Entry | None:
    """Return the entry for a name of a module or of its submodules."""
    adapter, path = _split(module)
    below = f"{path}." if path else ""
    named = [entry for entry in entries(adapter) if entry.name == name]
    inside = [entry for entry in named if entry.module == path or entry.module.startswith(below)]
    return _whole(module, name) or min(inside, key=lambda entry: len(entry.module), default=None)


def _whole(parent: str, name: str) -> Entry | None:
    """Return the entry for a module that does not exist."""
    adapter, path = _split(parent)
    child = f"{path}.{name}" if path else name
    return next((entry for entry in entries(adapter) if (entry.module, entry.name) == (child, "*")), None)


def _error(module: str, name: str, entry: Entry) -> ImportError:
    adapter, _ = _split(module)
    facts = facts_of(adapter)
    names = filter(None, (facts["original"], entry.module, entry.name.strip("*")))
    advice = _advice_for_all(adapter, entry) if entry.name == "*" else entry.advice
    return ImportError(
        f"{module} has no {name} ({'.'.join(names)} of the original). {advice} See {facts['guide']}.", name=module
    )


def _advice_for_all(adapter: str, whole: Entry) -> str:
    """Return the advice for a module and for its names with separate advice."""
    own: dict[str, list[str]] = {}
    for entry in entries(adapter):
        if entry.module == whole.module and entry.advice != whole.advice:
            own.setdefault(entry.advice, []).append(entry.name)
    return " ".join([whole.advice, *(f"{', '.join(names)}: {advice}" for advice, names in own.items())])


def _split(module: str) -> tuple[str, str]:
    """Return the adapter of a module, and the module's path inside it."""
    adapter, _, path = module.removeprefix(ADAPTERS).partition(".")
    return adapter, path

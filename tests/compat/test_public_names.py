"""Every public name of an original is provided, or listed with what to use instead, which an error says where it is used.

``public_names.txt`` in the folder of each adapter has the names: those that a module defines or lists in ``__all__``, and those
that a package exports. Names that a module only imports from elsewhere are not in it, unless scripts import them from there.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cadenza.compat.nemo as nemo
from cadenza.compat.absent import entries, facts_of
from tests import forked

FILES = sorted(Path(__file__).parent.glob("*/public_names*.txt"))
OF_EACH_ADAPTER = pytest.mark.parametrize("adapter", sorted({file.parent.name for file in FILES}))


def public_names(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each module of an original, "" for the package itself, and its names."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            module, _, names = line.partition(":")
            yield module.strip("."), names.split()


def found(line: str) -> str:
    """Return "" if an import works, or else the error."""
    try:
        exec(line, {})
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_each_name_is_provided_or_listed(file: Path) -> None:
    home = f"cadenza.compat.{file.parent.name}"
    checked, bare = 0, []
    for path, names in public_names(file):
        module = ".".join(filter(None, (home, path)))
        try:
            importlib.import_module(module)
        except ImportError as error:
            checked += 1
            bare += [] if "of the original)" in str(error) else [module]
        else:
            checked += len(names)
            bare += [
                f"{module}.{name}"
                for name in names
                if (text := found(f"from {module} import {name}")) and "of the original)" not in text
            ]
    assert checked > 30
    assert not bare, "provide these names, or list them in ABSENT with what to use instead"


@OF_EACH_ADAPTER
def test_a_listed_name_is_one_of_the_original_that_is_not_provided_and_stands_in_the_guide(adapter: str) -> None:
    guide = Path(__file__).parents[2] / facts_of(adapter)["guide"]
    table = guide.parents[1] / "tables" / guide.name.removeprefix("from-")
    assert f"](../tables/{table.name}" in guide.read_text(encoding="utf-8")
    text = table.read_text(encoding="utf-8")
    assert f"<!-- generated: absent_{adapter.removesuffix('10')} -->" in text  # tests/test_docs.py checks that it is up to date
    modules, names = set(), set()
    for file in FILES:
        for path, found_names in public_names(file) if file.parent.name == adapter else ():
            modules |= {path, *(path[: dot.start()] for dot in re.finditer(r"\.", path))}
            names |= {"*", *found_names}
    for entry in entries(adapter):
        assert entry.module in modules, entry
        assert entry.name in names or entry.name.startswith("_"), entry
        assert f"`{entry.name}`" in text or entry.name == "*", entry


@OF_EACH_ADAPTER
def test_no_listed_name_is_provided_and_its_import_says_what_to_use_instead(adapter: str) -> None:
    package = f"cadenza.compat.{adapter}"
    facts = facts_of(adapter)
    listed = entries(adapter)
    missing = {entry.module for entry in listed if entry.name == "*"}
    for path, name, advice in listed:
        module = f"{package}.{path}".rstrip(".")
        lines, original = [f"from {module} import {name}"], f"{path}.{name}".lstrip(".")
        if path in missing:
            parent, _, last = module.rpartition(".")
            lines += [f"import {module} as anything", f"from {parent} import {last}"]
            original = path
        for line in lines:
            error = found(line)
            assert f"({facts['original']}.{original} of the original). " in error, "take this name off the list"
            assert advice in error
            assert error.endswith(f" See {facts['guide']}.")


def resolves(dotted: str) -> bool:
    """Return whether a dotted name can be imported, or read from what can be imported."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            value = getattr(value, part, getattr(value, "__annotations__", {}).get(part))
        return value is not None
    return False


@OF_EACH_ADAPTER
def test_each_advice_names_something_that_exists(adapter: str) -> None:
    advices = {entry.advice for entry in entries(adapter)}
    assert advices
    for advice in advices:
        dotted = re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", advice)
        assert advice.endswith((".", ")")), advice
        assert dotted or re.search(r"`\w*(?:Error|Exception)`|`dict`", advice), advice
        assert all(map(resolves, dotted)), advice


# -- other uses of names ------------------------------------------------------------------------------


def test_other_uses_of_a_missing_name_give_the_same_advice_and_those_of_an_unknown_one_the_closest_name() -> None:
    with pytest.raises(ImportError, match=r"cadenza.compat.nemo.core has no DeploymentFormat \(nemo.core.neural_factory.Dep"):
        _ = nemo.core.DeploymentFormat  # type: ignore[attr-defined]  # type checkers see that it is missing
    with pytest.raises(ImportError, match=r"no asr \(nemo.collections.asr of the original"):
        importlib.import_module("cadenza.compat.nemo.collections.asr.parts.dataset")

    with pytest.raises(
        AttributeError, match=r"compat.nemo.core' has no attribute 'SimpleLoger'. Did you mean 'SimpleLogger'\?"
    ):
        _ = nemo.core.SimpleLoger  # type: ignore[attr-defined]
    assert not hasattr(nemo.core, "anything_else")
    for missing in ("nemo.anything_else", "neural.anything_else", "anything_else"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named 'cadenza.compat.{missing}'$"):
            importlib.import_module(f"cadenza.compat.{missing}")


@OF_EACH_ADAPTER
def test_modules_still_behave_like_modules(adapter: str) -> None:
    package = importlib.import_module(f"cadenza.compat.{adapter}")
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(module_info.name)
        assert not hasattr(module, "__wrapped__")
        assert dict(inspect.getmembers(module))["__name__"] == module.__name__
        for one in vars(module).values():
            if inspect.isclass(one) and one.__module__ == module.__name__ and one.__qualname__ == one.__name__:
                assert pickle.loads(pickle.dumps(one)) is one


FRESH = """
import sys
before = list(sys.meta_path)
import cadenza.compat.nemo as nemo, cadenza.compat.nemo10 as nemo10, cadenza.compat.fastnlp as fastNLP
added = sys.meta_path[len(before):]
assert sys.meta_path[:len(before)] == before and len(added) == 1
assert added[0].find_spec("collections.asr", None) is added[0].find_spec("cadenza.compat", None) is None
for version in (nemo, nemo10):
    version.collections, version.utils.argparse, version.utils.decorators.port_docs, version.backends.pytorch.nm
    try:
        version.collections.nlp
    except ImportError as error:
        assert "nemo.collections.nlp of the original" in str(error)
    else:
        raise AssertionError("nemo.collections.nlp exists")
fastNLP.envs.imports, fastNLP.core.callbacks.callback.Callback
"""


def test_one_import_brings_the_modules_that_the_original_brings_and_leaves_other_packages_alone(tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text(FRESH)
    forked.run(tmp_path / "fresh.py", folder=tmp_path)

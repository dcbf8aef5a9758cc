"""A name of an original that its adapter does not provide is an error that says what to use instead."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import cadenza.compat.accelerated
import cadenza.compat.fastnlp
import cadenza.compat.nemo
import cadenza.compat.nemo10
from cadenza.compat.absent import entries

ADAPTERS = [cadenza.compat.accelerated, cadenza.compat.fastnlp, cadenza.compat.nemo, cadenza.compat.nemo10]


def error_of(line: str) -> str:
    with pytest.raises(ImportError) as caught:
        exec(line, {})
    return str(caught.value)


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda package: package.__name__)
def test_an_import_says_what_to_use_instead(package: ModuleType) -> None:
    absent = importlib.import_module(f"{package.__name__}.absent")
    listed = entries(package.__name__.rpartition(".")[2])
    missing = {entry.module for entry in listed if entry.name == "*"}
    for path, name, advice in listed:
        module = f"{package.__name__}.{path}".rstrip(".")
        if path in missing:
            parent, _, last = module.rpartition(".")
            lines = [f"import {module} as anything", f"from {module} import {name}", f"from {parent} import {last}"]
            original = path
        else:
            lines, original = [f"from {module} import {name}"], f"{path}.{name}".lstrip(".")
        for error in map(error_of, lines):
            assert f"({absent.ORIGINAL}.{original} of the original). " in error
            assert advice in error
            assert error.endswith(f" See {absent.GUIDE}.")


def test_attributes_and_modules_below_a_missing_one_give_the_same_advice() -> None:
    with pytest.raises(ImportError, match=r"cadenza.compat.nemo.core has no DeploymentFormat \(nemo.core.neural_factory.Dep"):
        _ = cadenza.compat.nemo.core.DeploymentFormat  # type: ignore[attr-defined]  # type checkers see that it is missing
    with pytest.raises(ImportError, match=r"no asr \(nemo.collections.asr of the original"):
        importlib.import_module("cadenza.compat.nemo.collections.asr.parts.dataset")


def test_an_unknown_name_is_an_attribute_error_with_the_closest_one() -> None:
    with pytest.raises(
        AttributeError, match=r"compat.nemo.core' has no attribute 'SimpleLoger'. Did you mean 'SimpleLogger'\?"
    ):
        _ = cadenza.compat.nemo.core.SimpleLoger  # type: ignore[attr-defined]
    assert not hasattr(cadenza.compat.nemo.core, "anything_else")
    for missing in ("nemo.anything_else", "neural.anything_else", "anything_else"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named 'cadenza.compat.{missing}'$"):
            importlib.import_module(f"cadenza.compat.{missing}")


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda package: package.__name__)
def test_modules_still_behave_like_modules(package: ModuleType) -> None:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
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


def test_one_import_brings_the_modules_that_the_original_brings_and_leaves_other_packages_alone() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True)

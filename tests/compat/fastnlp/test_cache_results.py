"""`cache_results`: a slow function runs once, and its result is in a file."""

from __future__ import annotations

import hashlib
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.compat.fastnlp import cache_results, logger

RUNS: list[Any] = []
Shown = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_logger: None) -> None:
    monkeypatch.chdir(tmp_path)
    RUNS.clear()
    logger.set_stdout("raw")


@pytest.fixture
def define(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """A function that returns a new module with a source text, in a file of its own, and with given names."""

    def define(source: str, **names: Any) -> types.ModuleType:
        path = tmp_path / f"module_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        module = types.ModuleType(path.stem)
        monkeypatch.setitem(sys.modules, path.stem, module)
        vars(module).update(cache_results=cache_results, RUNS=RUNS, __file__=str(path), **names)
        exec(compile(source, str(path), "exec"), vars(module))
        return module

    return define


def test_a_function_runs_once_for_equal_arguments(capsys: Shown) -> None:
    @cache_results("caches/data.pkl")
    def process(path: str, *rest: int, size: int = 1, **options: int) -> list[int]:
        RUNS.append(path)
        return [size]

    assert process("a") == process("a", size=1) == process(path="a") == [1]
    assert process("b", 2, size=3, x=4, y=5) == process("b", 2, y=5, x=4, size=3) == [3]
    assert RUNS == ["a", "b"]
    assert len(list(Path("caches").iterdir())) == 2
    shown = capsys.readouterr().out
    assert (shown.count("Save cache to"), shown.count("Read cache from")) == (2, 3)


def test_the_file_is_named_and_filled_as_by_fastnlp() -> None:
    @cache_results("data.pkl")
    def process(a: int, b: int = 2) -> int:
        return a

    process(1)
    (file,) = Path().iterdir()
    assert file.name == hashlib.sha1(b"a1b2").hexdigest()[:8] + "_data.pkl"
    assert pickle.loads(file.read_bytes()).keys() == {"results", "hash", "save_time"}


def test_a_call_can_choose_everything_itself(capsys: Shown) -> None:
    @cache_results(None)
    def process(a: int) -> int:
        RUNS.append(a)
        return a

    process(1)
    process(1, _cache_fp="data.pkl", _hash_param=False)
    assert process(2, _cache_fp="data.pkl", _hash_param=False, _verbose=0) == 1, "the arguments are not in the name"
    assert process(2, _cache_fp="data.pkl", _hash_param=False, _refresh=True) == 2
    assert RUNS == [1, 1, 2]
    assert [path.name for path in Path().iterdir()] == ["data.pkl"]
    assert "Read" not in capsys.readouterr().out


def test_another_source_text_is_a_warning(define: Callable[..., Any], tmp_path: Path, capsys: Shown) -> None:
    text = "@cache_results('{path}')\ndef process():\n    RUNS.append(1)\n    return {value}\n"
    path = tmp_path / "data.pkl"
    define(text.format(path=path, value=1)).process()
    changed = define(text.format(path=path, value=2)).process
    assert changed() == 1
    assert "different from that of the cached result" in capsys.readouterr().out
    changed(_check_hash=False)
    same = text.format(path=path, value=1).replace(")\ndef", ", _verbose=0)\ndef")
    define(same).process()
    assert "different" not in capsys.readouterr().out, "the decorator is not part of the source"
    assert RUNS == [1]


@pytest.mark.parametrize("call", ["helper()", "tools.helper()", "worker.run()", "(lambda: helper())()"])
def test_a_change_of_a_function_that_is_called_is_a_warning(
    call: str, define: Callable[..., Any], tmp_path: Path, capsys: Shown
) -> None:
    helper = "def helper():\n    return {value}\nclass Worker:\n    def run(self):\n        return {value}\n"
    for value in (1, 1, 2):
        tools = define(helper.format(value=value))
        names = {"tools": tools, "helper": tools.helper, "worker": tools.Worker()}
        source = f"@cache_results('{tmp_path / 'data.pkl'}')\ndef process():\n    return {call}\n"
        assert define(source, **names).process() == 1
        assert ("different" in capsys.readouterr().out) == (value == 2)


def test_wrong_uses_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has the arguments \['_refresh'\] of cache_results"):

        @cache_results(None)
        def taken(_refresh: bool) -> int:
            return 1

    with pytest.raises(RuntimeError, match="returned None, which cannot be cached"):
        cache_results("data.pkl")(lambda: None)()
    with pytest.raises(RuntimeError, match="is a folder"):
        cache_results(str(tmp_path))(lambda: 1)()
    assert list(tmp_path.iterdir()) == []

"""Functions of fastNLP for user code: masks, collections, arguments, bars, logger, environment; CNNText; cached results."""

from __future__ import annotations

import builtins
import hashlib
import io
import logging
import os
import pickle
import re
import sys
import types
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import auto_param_call, f_rich_progress, f_tqdm_progress, logger, print, seq_len_to_mask
from cadenza.compat.fastnlp.core import utils
from cadenza.compat.fastnlp.core.log.logger import FastNLPLogger, parse_level
from cadenza.compat.fastnlp.core.utils import apply_to_collection, match_and_substitute_params
from cadenza.compat.fastnlp.envs import FASTNLP_GLOBAL_RANK, FASTNLP_LAUNCH_TIME, FASTNLP_LOG_LEVEL, FASTNLP_NO_SYNC
from cadenza.compat.fastnlp.envs.utils import get_global_seed
from cadenza.compat.fastnlp.models.torch import CNNText
from tests import forked

pytestmark = pytest.mark.usefixtures("fresh_logger")
Shown = pytest.CaptureFixture[str]
Pair = namedtuple("Pair", ["first", "second"])  # as users write it


@dataclass(frozen=True)
class Fields:
    words: Any
    rest: Any = None


def test_a_mask_is_true_inside_of_each_sample() -> None:
    wanted = [[True, False, False], [True, True, True]]
    assert seq_len_to_mask(torch.tensor([1, 3])).tolist() == seq_len_to_mask(np.array([1, 3])).tolist() == wanted
    assert seq_len_to_mask(torch.tensor([1, 3]), max_len=4).shape == (2, 4)
    assert seq_len_to_mask(np.array([1, 3]), max_len=2).tolist() == [[True, False], [True, True]]
    assert seq_len_to_mask(torch.tensor([1, 3])).dtype is torch.bool
    with pytest.raises(AssertionError, match=r"one dimension; got the shape \(1, 2\)"):
        seq_len_to_mask(torch.ones(1, 2))
    with pytest.raises(TypeError, match="got a list"):
        seq_len_to_mask([1, 2])


def test_a_function_is_applied_to_everything_of_a_type_and_everything_with_a_method_to_is_moved() -> None:
    data = {"a": [1, "b", (2, None)], "c": Pair(3, "d"), "e": Fields(4)}
    changed = apply_to_collection(data, int, lambda number, by: number + by, 10)
    assert changed == {"a": [11, "b", (12, None)], "c": Pair(13, "d"), "e": Fields(14)}
    assert data["e"] == Fields(4)
    counted = apply_to_collection(defaultdict(list, a=[1]), int, str)
    assert (counted, counted["new"]) == ({"a": ["1"], "new": []}, [])
    assert apply_to_collection([1, 2], int, lambda number: None, include_none=False) == []
    assert apply_to_collection({"a": Fields(1)}, int, lambda number: None, include_none=False) == {"a": Fields(1)}
    assert apply_to_collection([1, True], int, str, wrong_dtype=bool) == ["1", True]

    class Own:
        device = "cpu"

        def to(self, device: object) -> None:
            self.device = str(device)

    own = Own()
    moved = utils.torch_move_data_to_device({"x": [torch.ones(2)], "own": own, "text": "a"}, "meta")
    assert (moved["x"][0].device.type, moved["own"], own.device, moved["text"]) == ("meta", own, "meta", "a")
    batch = [torch.ones(1)]
    assert utils.torch_move_data_to_device(batch) is batch
    assert (utils.is_torch_module(nn.Linear(1, 1)), utils.is_torch_module(own)) == (True, False)


def test_names_of_nested_results_options_dataclasses_and_sequences() -> None:
    nested = {"dev": {None: {"f": 1}, "acc": 2}, "loss": 3}
    assert utils.flat_nest_dict(nested) == {"f#dev": 1, "acc#dev": 2, "loss": 3}
    assert utils.flat_nest_dict(nested, separator=".", top_down=True) == {"dev.f": 1, "dev.acc": 2, "loss": 3}
    option = utils.Option(rate=1)
    option.size = 2
    del option.rate
    assert (option, option.size) == ({"size": 2}, 2)
    for touch in (lambda: option.rate, lambda: option.__delattr__("rate")):
        with pytest.raises(AttributeError, match="rate"):
            touch()
    assert utils.dataclass_to_dict(Fields([1])) == {"words": [1], "rest": None}
    assert match_and_substitute_params({"words": "x"}, Fields(1)) == {"x": 1, "rest": None}
    assert match_and_substitute_params(len, [1, 2]) == 2
    assert match_and_substitute_params(None, 3) == 3
    with pytest.raises(TypeError, match="object of a dataclass; got a type"):
        utils.dataclass_to_dict(Fields)
    with pytest.raises(ValueError, match="mapping must be a function, or a dict"):
        match_and_substitute_params(3, {})  # type: ignore[arg-type]


def test_arguments_are_found_by_name_and_by_mapped_name_and_an_unused_one_is_a_warning(
    capsys: Shown,
) -> None:
    def add(x: int, y: int = 100) -> int:
        return x + y

    assert auto_param_call(add, {"x": 1}, {"y": 2, "z": 3}) == 3
    assert auto_param_call(add, {"x1": 10, "y1": 20}, mapping={"x1": "x", "y1": "y", "unused": "unused"}) == 30
    assert auto_param_call(lambda **given: given, {"x": 1, "y": 2}, signature_fn=add) == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match=r"add needs \['x'\].* It is defined in .*test_utils.py\.$"):
        auto_param_call(add, {"y": 1})
    with pytest.raises(TypeError, match=r"must be given as dicts; got \['list'\]"):
        auto_param_call(add, [1])  # type: ignore[arg-type]
    logger.set_stdout("raw")

    def step(rate: float) -> None: ...

    assert utils.check_user_specific_params({"rate": 1, "size": 2}, step, "step") == {"rate": 1, "size": 2}
    assert capsys.readouterr().out == "step has no argument 'size', so the value is probably not used\n"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("bars", [f_rich_progress, f_tqdm_progress])
def test_without_a_terminal_no_bar_is_shown(bars: Any, capsys: Shown) -> None:
    assert bars.dummy
    task = bars.add_task("train", total=3)
    bars.update(task, advance=1)
    bars.destroy_task(task)
    assert (task, bars.not_empty(), capsys.readouterr().out) == (None, False, "")


def test_bars_count_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    task = f_rich_progress.add_task("train", total=3)
    f_rich_progress.update(task, advance=2, post_desc="loss 1")
    f_rich_progress.reset(task, total=4)
    assert f_rich_progress.not_empty()
    f_rich_progress.print("a line")
    f_rich_progress.destroy_task(task)
    assert not f_rich_progress.not_empty()
    f_rich_progress.set_disable()
    assert f_rich_progress.add_task("hidden") is None
    f_rich_progress.set_disable(False)
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    task = f_tqdm_progress.add_task("train", total=3, file=shown)
    f_tqdm_progress.update(task, 2)
    f_tqdm_progress.set_postfix_str(task, "loss 1")
    f_tqdm_progress.set_description_str(task, "evaluate")
    assert "evaluate" in shown.getvalue()
    f_tqdm_progress.reset(task)
    f_tqdm_progress.destroy_task(task)
    assert not f_tqdm_progress.not_empty()


# -- the environment --------------------------------------------------------------------------------------


def test_the_import_takes_torchruns_rank_and_the_parents_launch_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "FASTNLP" in name]:
        monkeypatch.delenv(name)
    script = tmp_path / "script.py"
    script.write_text("import os, cadenza.compat.fastnlp\nfor item in os.environ.items():\n    print(*item, sep='=')\n")
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    shown = forked.run(script, folder=tmp_path, FASTNLP_LAUNCH_TIME="earlier", **torchrun).splitlines()
    monkeypatch.undo()
    assert dict(line.split("=", 1) for line in shown if line.startswith("FASTNLP")) == {
        "FASTNLP_LAUNCH_TIME": "earlier",
        "FASTNLP_GLOBAL_RANK": "3",
        "FASTNLP_BACKEND_LAUNCH": "1",
        "FASTNLP_LOG_LEVEL": "AUTO",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d_\d\d_\d\d_\d{6}", os.environ[FASTNLP_LAUNCH_TIME])


def test_a_function_of_rank_zero_runs_on_the_main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    @fastnlp.rank_zero_call
    def rank_of(text: str) -> str:
        """Return the rank with a text."""
        return f"{text} {fastnlp.get_global_rank()} {os.environ[FASTNLP_NO_SYNC]}"

    @fastnlp.rank_zero_call
    def failing() -> None:
        raise KeyError("inside")

    assert (fastnlp.get_global_rank(), fastnlp.is_cur_env_distributed()) == (0, False)  # a process alone
    assert (rank_of("rank"), rank_of.__name__, FASTNLP_NO_SYNC in os.environ) == ("rank 0 2", "rank_of", False)
    with pytest.raises(KeyError, match="inside"):
        failing()
    assert FASTNLP_NO_SYNC not in os.environ
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "1")
    assert rank_of("rank") is None
    with fastnlp.all_rank_call_context():
        assert rank_of("rank") == "rank 0 2"
    assert (fastnlp.get_global_rank(), fastnlp.is_cur_env_distributed()) == (1, True)


def test_the_seed_is_chosen_once_and_the_main_process_removes_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTNLP_GLOBAL_SEED", "7")
    assert get_global_seed() == 7
    monkeypatch.delenv("FASTNLP_GLOBAL_SEED")
    assert get_global_seed() == get_global_seed() < 1_000_000
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "1")
    fastnlp.envs.rank_zero_rm(tmp_path / "file")
    assert (tmp_path / "file").exists()
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "0")
    for name in ("file", "folder", "missing"):
        fastnlp.envs.rank_zero_rm(str(tmp_path / name))
    fastnlp.envs.rank_zero_rm(None)
    assert list(tmp_path.iterdir()) == []


# -- the logger -------------------------------------------------------------------------------------------


def test_without_a_choice_rich_shows_the_level_and_the_calling_file(capsys: Shown) -> None:
    logger.warning_once("one")
    logger.rank_zero_warning("two", once=True)
    print("three")
    shown = capsys.readouterr().out
    assert shown.count("WARNING") == 2
    assert shown.count("test_utils.py") == 3


@pytest.mark.parametrize("stdout", ["raw", "naive", "tqdm"])
def test_each_way_prints_the_text_from_its_level_on(stdout: Any, capsys: Shown) -> None:
    assert isinstance(logger.set_stdout(stdout), logging.Handler)
    logger.info("the %s", "message")
    logger.debug("a detail")
    logger.set_stdout(stdout, level="warning")
    logger.warn("seen")
    logger.info("below the level")
    assert capsys.readouterr().out == "the message\nseen\n"


def test_the_last_way_replaces_the_others_and_none_shows_nothing(capsys: Shown) -> None:
    logger.info("by rich")
    own = logging.NullHandler()
    logger.addHandler(own)
    logger.set_stdout("tqdm")
    logger.set_stdout("raw")
    capsys.readouterr()
    logger.info("once")
    assert capsys.readouterr().out == "once\n"
    assert own in logger.handlers
    assert logger.set_stdout("none") is None
    logger.error("silent")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="stdout must be 'rich'"):
        logger.set_stdout("paper")  # type: ignore[arg-type]


def test_a_warning_once_is_shown_once_and_other_processes_show_warnings_with_their_rank_only(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger.set_stdout("raw")
    for text in ("a", "a", "b"):
        logger.warning_once(text)
        logger.rank_zero_warning(text, once=True)
    assert capsys.readouterr().out == "a\nb\n"
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "2")
    other = FastNLPLogger("other")
    other.set_stdout("raw")
    other.info("the main process says this")
    other.rank_zero_warning("this too")
    other.warning("mine")
    assert capsys.readouterr().out == "Rank: 2 - mine\n"


def test_the_environment_and_set_level_choose_the_level_also_of_print(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    logger.set_stdout("raw")
    logger.setLevel("debug")
    logger.debug("now visible")
    print([1, 2], "a", 3.5, sep=", ")
    logger.setLevel("warning")
    print("hidden")
    logger.setLevel(logging.ERROR)
    logger.warning("now hidden")
    builtins.print("plain")  # noqa: T201  # Python's own one still prints
    assert capsys.readouterr().out == "now visible\n[1, 2], a, 3.5\nplain\n"
    assert parse_level() == logging.INFO
    monkeypatch.setenv(FASTNLP_LOG_LEVEL, "ERROR")
    assert FastNLPLogger("other").level == logging.ERROR
    monkeypatch.setenv(FASTNLP_LOG_LEVEL, "loud")
    with pytest.raises(ValueError, match=r"level must be one of .* got 'loud'"):
        FastNLPLogger("other")


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(
    ("where", "file"),
    [("log.txt",) * 2, ("new/log.txt",) * 2, ("new", "new/launch.log"), ("", "launch.log"), (None, "launch.log")],
)
def test_a_file_gets_messages(where: Any, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    monkeypatch.chdir(tmp_path)
    logger.set_stdout("raw")
    path = where if where is None else tmp_path / where
    assert logger.add_file(path) is not None
    assert logger.add_file(path) is None, "it is written already"
    logger.warning("the message")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]
    assert (tmp_path / file).read_text().endswith("- test_utils - [WARNING] - the message\n")
    assert "the message" in capsys.readouterr().out


def test_an_existing_file_is_replaced_with_a_warning_or_continued(tmp_path: Path, capsys: Shown) -> None:
    file = tmp_path / "log.txt"
    file.write_text("before\n")
    logger.set_stdout("raw")
    with pytest.warns(UserWarning, match="exists already"):
        logger.add_file(file, mode="a", remove_other_handlers=True, level="WARNING")
    capsys.readouterr()
    logger.error("after")
    logger.info("below")
    assert (capsys.readouterr().out, file.read_text().count("\n")) == ("", 2)
    with pytest.raises(ValueError, match="mode must be 'w' or 'a'"):
        logger.add_file(file, mode="x")  # type: ignore[arg-type]


# -- the text classifier of the tutorials ------------------------------------------------------------------

WORDS = torch.tensor([[2, 3, 4, 5], [6, 7, 0, 0]])


def model(**options: object) -> CNNText:
    torch.manual_seed(0)
    return CNNText((10, 6), 3, **options)  # type: ignore[arg-type]  # any


def test_the_model_returns_scores_a_loss_and_classes_without_effect_of_padding_of_known_length() -> None:
    cnn, lengths, target = model(dropout=0.0), torch.tensor([4, 2]), torch.tensor([0, 2])
    scores = cnn(WORDS, lengths)["pred"]
    assert scores.shape == (2, 3)
    assert torch.equal(cnn.train_step(WORDS, target, lengths)["loss"], functional.cross_entropy(scores, target))
    assert torch.equal(cnn.evaluate_step(WORDS, lengths)["pred"], scores.argmax(-1))
    cnn = model(kernel_sizes=(1,), kernel_nums=(8,)).eval()
    short, lengths = cnn(WORDS[1:, :2], torch.tensor([2]))["pred"], torch.tensor([4, 2])
    torch.testing.assert_close(cnn(WORDS, lengths)["pred"][1:], short)
    assert not torch.allclose(cnn(WORDS)["pred"][1:], short)


def test_an_embedding_or_its_weights_can_be_given_and_wrong_convolutions_are_errors() -> None:
    given = nn.Embedding(10, 6)
    assert CNNText(given, 2).embed is given
    made = CNNText(given.weight.detach().clone(), 2).embed
    assert torch.equal(made.weight, given.weight)
    assert made.weight.requires_grad
    with pytest.raises(ValueError, match=r"must be odd.*got \[2\]"):
        model(kernel_sizes=(1, 2, 3))
    with pytest.raises(ValueError, match=r"for each of \[1, 3, 5\]; got \[4\]"):
        model(kernel_nums=(4,))


def test_each_convolution_keeps_the_length_and_the_initial_embedding_is_within_the_root_of_3_over_its_dimensions() -> None:
    convs = [conv for conv in model().modules() if isinstance(conv, nn.Conv1d)]
    shapes = [(conv.out_channels, conv.kernel_size, conv.padding, conv.bias) for conv in convs]
    assert shapes == [(30, (1,), (0,), None), (40, (3,), (1,), None), (50, (5,), (2,), None)]
    assert model().fc.in_features == 120
    weight = model().embed.weight
    assert weight.shape == (10, 6)
    assert 0.6 < weight.abs().max() <= 0.5**0.5


# -- cached results ----------------------------------------------------------------------------------------


RUNS: list[Any] = []


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, no runs, and messages as they are."""
    monkeypatch.chdir(tmp_path)
    RUNS.clear()
    logger.set_stdout("raw")


@pytest.fixture
def define(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: None) -> Callable[..., types.ModuleType]:
    """A function that returns a new module with a source text, in a file of its own, and with given names."""

    def define(source: str, **names: Any) -> types.ModuleType:
        path = tmp_path / f"module_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        module = types.ModuleType(path.stem)
        monkeypatch.setitem(sys.modules, path.stem, module)
        vars(module).update(cache_results=fastnlp.cache_results, RUNS=RUNS, __file__=str(path), **names)
        exec(compile(source, str(path), "exec"), vars(module))
        return module

    return define


@pytest.mark.usefixtures("scratch")
def test_a_function_runs_once_for_equal_arguments(capsys: Shown) -> None:
    @fastnlp.cache_results("caches/data.pkl")
    def process(path: str, *rest: int, size: int = 1, **options: int) -> list[int]:
        RUNS.append(path)
        return [size]

    assert process("a") == process("a", size=1) == process(path="a") == [1]
    assert process("b", 2, size=3, x=4, y=5) == process("b", 2, y=5, x=4, size=3) == [3]
    assert RUNS == ["a", "b"]
    assert len(list(Path("caches").iterdir())) == 2
    shown = capsys.readouterr().out
    assert (shown.count("Save cache to"), shown.count("Read cache from")) == (2, 3)


@pytest.mark.usefixtures("scratch")
def test_the_file_is_named_and_filled_as_by_fastnlp() -> None:
    @fastnlp.cache_results("data.pkl")
    def process(a: int, b: int = 2) -> int:
        return a

    process(1)
    (file,) = Path().iterdir()
    assert file.name == hashlib.sha1(b"a1b2").hexdigest()[:8] + "_data.pkl"
    assert pickle.loads(file.read_bytes()).keys() == {"results", "hash", "save_time"}


@pytest.mark.usefixtures("scratch")
def test_a_call_can_choose_everything_itself(capsys: Shown) -> None:
    @fastnlp.cache_results(None)
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


@pytest.mark.usefixtures("scratch")
def test_wrong_uses_of_cache_results_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has the arguments \['_refresh'\] of cache_results"):

        @fastnlp.cache_results(None)
        def taken(_refresh: bool) -> int:
            return 1

    with pytest.raises(RuntimeError, match="returned None, which cannot be cached"):
        fastnlp.cache_results("data.pkl")(lambda: None)()
    with pytest.raises(RuntimeError, match="is a folder"):
        fastnlp.cache_results(str(tmp_path))(lambda: 1)()
    assert list(tmp_path.iterdir()) == []

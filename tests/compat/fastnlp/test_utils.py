"""fastNLP's functions for user code: masks, collections, arguments by name, and bars."""

from __future__ import annotations

import io
import sys
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadenza.compat.fastnlp import auto_param_call, f_rich_progress, f_tqdm_progress, logger, seq_len_to_mask
from cadenza.compat.fastnlp.core.utils import (
    Option,
    apply_to_collection,
    check_user_specific_params,
    dataclass_to_dict,
    flat_nest_dict,
    is_torch_module,
    match_and_substitute_params,
    torch_move_data_to_device,
)

Pair = namedtuple("Pair", ["first", "second"])  # as users write it


@dataclass(frozen=True)
class Fields:
    words: Any
    rest: Any = None


def test_a_mask_is_true_inside_of_each_sample() -> None:
    wanted = [[True, False, False], [True, True, True]]
    assert seq_len_to_mask(torch.tensor([1, 3])).tolist() == wanted
    assert seq_len_to_mask(np.array([1, 3])).tolist() == wanted
    assert seq_len_to_mask(torch.tensor([1, 3]), max_len=4).shape == (2, 4)
    assert seq_len_to_mask(np.array([1, 3]), max_len=2).tolist() == [[True, False], [True, True]]
    assert seq_len_to_mask(torch.tensor([1, 3])).dtype is torch.bool


def test_a_mask_needs_lengths_of_one_dimension() -> None:
    with pytest.raises(AssertionError, match=r"one dimension; got the shape \(1, 2\)"):
        seq_len_to_mask(torch.ones(1, 2))
    with pytest.raises(TypeError, match="got a list"):
        seq_len_to_mask([1, 2])


def test_a_function_is_applied_to_everything_of_a_type() -> None:
    data = {"a": [1, "b", (2, None)], "c": Pair(3, "d"), "e": Fields(4)}
    changed = apply_to_collection(data, int, lambda number, by: number + by, 10)
    assert changed == {"a": [11, "b", (12, None)], "c": Pair(13, "d"), "e": Fields(14)}
    assert data["e"] == Fields(4)
    counted = apply_to_collection(defaultdict(list, a=[1]), int, str)
    assert (counted, counted["new"]) == ({"a": ["1"], "new": []}, [])


def test_results_of_none_can_be_dropped_and_a_type_can_be_excluded() -> None:
    assert apply_to_collection([1, 2], int, lambda number: None, include_none=False) == []
    assert apply_to_collection({"a": Fields(1)}, int, lambda number: None, include_none=False) == {"a": Fields(1)}
    assert apply_to_collection([1, True], int, str, wrong_dtype=bool) == ["1", True]


def test_everything_with_a_method_to_is_moved() -> None:
    class Own:
        device = "cpu"

        def to(self, device: object) -> None:
            self.device = str(device)

    own = Own()
    moved = torch_move_data_to_device({"x": [torch.ones(2)], "own": own, "text": "a"}, "meta")
    assert (moved["x"][0].device.type, moved["own"], own.device, moved["text"]) == ("meta", own, "meta", "a")
    batch = [torch.ones(1)]
    assert torch_move_data_to_device(batch) is batch
    assert (is_torch_module(nn.Linear(1, 1)), is_torch_module(own)) == (True, False)


def test_nested_results_get_flat_names() -> None:
    nested = {"dev": {None: {"f": 1}, "acc": 2}, "loss": 3}
    assert flat_nest_dict(nested) == {"f#dev": 1, "acc#dev": 2, "loss": 3}
    assert flat_nest_dict(nested, separator=".", top_down=True) == {"dev.f": 1, "dev.acc": 2, "loss": 3}


def test_options_are_attributes() -> None:
    option = Option(rate=1)
    option.size = 2
    del option.rate
    assert (option, option.size) == ({"size": 2}, 2)
    for touch in (lambda: option.rate, lambda: option.__delattr__("rate")):
        with pytest.raises(AttributeError, match="rate"):
            touch()


def test_dataclasses_and_sequences_get_names() -> None:
    assert dataclass_to_dict(Fields([1])) == {"words": [1], "rest": None}
    assert match_and_substitute_params({"words": "x"}, Fields(1)) == {"x": 1, "rest": None}
    assert match_and_substitute_params(len, [1, 2]) == 2
    assert match_and_substitute_params(None, 3) == 3
    with pytest.raises(TypeError, match="object of a dataclass; got a type"):
        dataclass_to_dict(Fields)
    with pytest.raises(ValueError, match="mapping must be a function, or a dict"):
        match_and_substitute_params(3, {})  # type: ignore[arg-type]


def test_arguments_are_found_by_name_and_by_mapped_name() -> None:
    def add(x: int, y: int = 100) -> int:
        return x + y

    assert auto_param_call(add, {"x": 1}, {"y": 2, "z": 3}) == 3
    assert auto_param_call(add, {"x1": 10, "y1": 20}, mapping={"x1": "x", "y1": "y", "unused": "unused"}) == 30
    assert auto_param_call(lambda **given: given, {"x": 1, "y": 2}, signature_fn=add) == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match=r"add needs \['x'\].* It is defined in .*test_utils.py\.$"):
        auto_param_call(add, {"y": 1})
    with pytest.raises(TypeError, match=r"must be given as dicts; got \['list'\]"):
        auto_param_call(add, [1])  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh_logger")
def test_an_unused_argument_of_the_user_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    logger.set_stdout("raw")

    def step(rate: float) -> None: ...

    assert check_user_specific_params({"rate": 1, "size": 2}, step, "step") == {"rate": 1, "size": 2}
    assert capsys.readouterr().out == "step has no argument 'size', so the value is probably not used\n"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("bars", [f_rich_progress, f_tqdm_progress])
def test_without_a_terminal_no_bar_is_shown(bars: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bars.dummy
    task = bars.add_task("train", total=3)
    bars.update(task, advance=1)
    bars.destroy_task(task)
    assert (task, bars.not_empty(), capsys.readouterr().out) == (None, False, "")


def test_rich_bars_count_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tqdm_bars_count_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
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

"""A watched value, and which way is better."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from cadenza import Monitor
from cadenza.errors import MonitorError
from cadenza.testing import tiny_run


def test_better_is_what_the_mode_says() -> None:
    run = tiny_run(steps=1)
    most, least = Monitor("eval/acc", "max", owner="Mine"), Monitor("eval/loss", "min", owner="Mine")
    assert [most.update(run, value) for value in (1.0, 0.5, 1.0, 1.5)] == [True, False, False, True]
    assert [least.update(run, value) for value in (1.0, 1.5, 1.0, 0.5)] == [True, False, False, True]


def test_only_a_gain_of_more_than_min_delta_counts() -> None:
    run, monitor = tiny_run(steps=1), Monitor("eval/acc", "max", owner="Mine", min_delta=0.25)
    assert [monitor.update(run, value) for value in (1.0, 1.25, 1.5)] == [True, False, True]


def test_nan_is_never_better_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run, monitor = tiny_run(steps=1), Monitor("eval/acc", "max", owner="Mine")
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        assert [monitor.update(run, value) for value in (math.nan, 1.0, math.nan, 2.0)] == [False, True, False, True]
    assert caplog.messages == ["Mine: 'eval/acc' is NaN, which is never better"]


def test_a_function_of_the_results_can_be_watched() -> None:
    def total(results: Any) -> float:
        return float(results["eval/a"] + results["eval/b"])

    monitor = Monitor(total, "max", owner="Mine")
    assert monitor.name == "total"
    assert monitor.value_in("eval", {"eval/a": 1.0, "eval/b": 2.0}) == 3.0


def test_a_value_of_another_evaluation_is_none_of_its_business() -> None:
    assert Monitor("test/acc", "max", owner="Mine").value_in("eval", {"eval/acc": 1.0}) is None


def test_an_unknown_name_is_an_error_that_lists_what_was_reported() -> None:
    with pytest.raises(
        MonitorError, match=r"Mine watches 'eval/ac', but the evaluation 'eval' reported only \['eval/acc'\]\. Did"
    ):
        Monitor("eval/ac", "max", owner="Mine").value_in("eval", {"eval/acc": 1.0})
    with pytest.raises(MonitorError, match=r"no evaluation will report it: there is 'valid/\.\.\.'\. "):
        Monitor("eval/acc", "max", owner="Mine").check_reported_by(["valid"])


@pytest.mark.parametrize("mode", ["auto", None, "MAX"])
def test_a_mode_is_never_guessed(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"Mine: mode must be 'min' or 'max', the direction that is better; got"):
        Monitor("eval/acc", mode, owner="Mine")


def test_what_is_no_name_and_no_function_is_an_error() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match="Mine: a monitor is a name such as 'eval/acc' or a function of the results; got 3"):
        Monitor(wrong, "max", owner="Mine")


def test_the_best_goes_round_a_save_and_a_load_and_is_forgotten_on_request() -> None:
    first, second = Monitor("eval/acc", "max", owner="Mine"), Monitor("eval/acc", "max", owner="Mine")
    first.update(tiny_run(steps=1), 0.5)
    second.load_state_dict(first.state_dict())
    assert second.best == 0.5
    second.reset()
    assert second.best == -math.inf


@pytest.mark.parametrize(
    ("watched", "known", "meant"),
    [
        ("evl/acc", ["eval", "far"], "Did you mean 'eval/acc'?"),
        ("evaluation/f1", ["eval"], "Did you mean 'eval/f1'?"),
        ("acc", ["eval"], "Did you mean 'eval/acc'?"),
        ("train/grad_norm", ["eval"], "watch a name of one that is there."),
    ],
)
def test_a_misspelled_evaluation_is_answered_with_the_nearest_name(watched: str, known: list[str], meant: str) -> None:
    with pytest.raises(MonitorError) as caught:
        Monitor(watched, "max", owner="Mine").check_reported_by(known)
    assert str(caught.value).endswith(meant)

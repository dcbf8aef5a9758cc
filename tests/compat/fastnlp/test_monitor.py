"""Watching a result: case 22."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from cadenza.callbacks import Evaluate
from cadenza.compat.fastnlp import ExecuteOnceBetterMonitor, HasMonitorCallback, ResultsMonitor
from cadenza.testing import tiny_loader, tiny_run
from tests.compat.fastnlp.toy import Scripted, toy_trainer


def results(*names: str) -> dict[str, Any]:
    """Return results with their names as values."""
    return {name: name for name in names}


@pytest.mark.parametrize(
    ("watched", "reported", "taken"),
    [
        ("acc", ("acc#acc",), "acc#acc"),
        ("f1", ("acc#acc", "f#f1", "pre#f1"), "f#f1"),
        ("acc#dev", ("acc#acc#test", "acc#acc#dev"), "acc#acc#dev"),
        ("-loss", ("acc#acc", "loss#loss"), "loss#loss"),
        ("acc#acc", ("loss#loss", "acc#acc"), "acc#acc"),
    ],
)
def test_case_22_the_name_with_the_longest_common_substring_is_used(
    watched: str, reported: tuple[str, ...], taken: str
) -> None:
    assert ResultsMonitor(watched).get_monitor_value(results(*reported)) == taken


def test_case_22_without_a_common_substring_there_is_no_value(caplog: pytest.LogCaptureFixture) -> None:
    """Deviation: fastNLP takes the first result."""
    assert ResultsMonitor("loss").get_monitor_value(results("x", "y")) is None
    assert "no result is similar to 'loss'" in caplog.text
    monitor = ResultsMonitor("ACC")
    assert monitor.get_monitor_value(results("b#b", "acc#acc")) is None


def test_case_22_the_last_used_name_is_used_again() -> None:
    monitor = ResultsMonitor("abc")
    assert monitor.get_monitor_value(results("ab")) == "ab"
    assert monitor.get_monitor_value(results("ab", "abcd")) == "ab"
    assert monitor.get_monitor_value(results("abc", "ab")) == "abc"


def test_a_warning_names_another_result_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ResultsMonitor("acc")
    for reported in ("acc#acc", "acc#acc", "acc#dev"):
        monitor.get_monitor_value(results(reported))
    assert [line.rpartition("; ")[2] for line in caplog.messages] == ["using 'acc#acc'", "using 'acc#dev'"]


def test_case_22_equal_is_not_better_and_nan_and_none_never_are() -> None:
    monitor = ResultsMonitor("acc", larger_better=True)
    assert [monitor.is_better_monitor_value(value) for value in (0.1, 0.1, 0.2, math.nan, None, 0.1)] == [
        *(True, False, True),
        *(False, False, False),
    ]
    smaller = ResultsMonitor("loss", larger_better=False)
    assert [smaller.is_better_results({"loss": torch.tensor(value)}) for value in (0.5, 0.6, 0.4)] == [True, False, True]
    assert smaller.monitor_value == pytest.approx(0.4)


def test_a_better_value_may_be_checked_without_keeping_it() -> None:
    monitor = ResultsMonitor("acc")
    assert monitor.is_better_results({"acc": 0.5}, keep_if_better=False)
    assert monitor.is_better_results({"acc": 0.5})


def test_of_two_values_the_first_is_better_if_the_other_is_none() -> None:
    first = ResultsMonitor("acc").is_former_monitor_value_better
    assert [first(None, None), first(None, 0.1), first(0.1, None), first(0.2, 0.1)] == [True, False, True, True]


def test_a_function_of_the_results_is_a_monitor() -> None:
    monitor = ResultsMonitor(lambda results: results.get("a"), larger_better=False)
    assert [monitor.get_monitor_value({"a": 2.0}), monitor.get_monitor_value({"b": 2.0})] == [2.0, None]
    assert monitor.get_monitor_value({}) is None
    assert ResultsMonitor(partial(score, weight=2)).monitor_name == "score"
    with pytest.raises(TypeError, match="must accept one argument"):
        ResultsMonitor(lambda: 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="name of a result"):
        ResultsMonitor(3)  # type: ignore[arg-type]  # wrong on purpose


def score(results: dict[str, Any], weight: int) -> float:
    return float(weight * results["a"])


def test_an_error_in_the_function_names_the_callback() -> None:
    with pytest.raises(KeyError) as caught:
        ResultsMonitor(partial(score, weight=2)).get_monitor_value({"b": 1})
    assert "the monitor 'score' of ResultsMonitor" in caught.value.__notes__[0]


class Watching(HasMonitorCallback):
    """Notes each value, and whether it is better."""

    def __init__(self, monitor: Any = None, larger_better: bool = True, must_have_monitor: bool = False) -> None:
        super().__init__(monitor, larger_better, must_have_monitor)
        self.seen: list[tuple[Any, bool]] = []

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.seen.append((self.get_monitor_value(results), self.is_better_results(results)))


def test_case_22_the_sanity_check_does_not_count() -> None:
    watching = Watching("acc#acc")
    toy_trainer(8, [watching], {"acc": Scripted(0.9, 0.1, 0.3, 0.2)}, n_epochs=3).run()
    assert watching.seen == [(0.1, True), (0.3, True), (0.2, False)]


def test_callbacks_without_a_monitor_use_the_trainers() -> None:
    class Forgets(Watching):
        def on_after_trainer_initialized(self, trainer: Any, driver: Any) -> None:
            """Call no super, as fastNLP's own progress bars did."""

    own, none, forgets = Watching("acc"), Watching(), Forgets()
    metrics = {"acc": Scripted(0.9, 0.1, 0.3)}
    toy_trainer(8, [own, none, forgets], metrics, n_epochs=2, monitor="acc#acc", larger_better=False).run()
    assert own.seen == [(0.1, True), (0.3, True)]
    assert none.seen == forgets.seen == [(0.1, True), (0.3, False)]


def test_a_missing_monitor_is_an_error_in_the_trainers_constructor() -> None:
    with pytest.raises(RuntimeError, match="Watching needs a monitor"):
        toy_trainer(8, [Watching(must_have_monitor=True)], {"acc": Scripted()})
    with pytest.raises(RuntimeError, match="nothing is evaluated"):
        toy_trainer(8, [Watching("acc", must_have_monitor=True)])
    assert toy_trainer(8, [Watching(must_have_monitor=True)], {"acc": Scripted()}, monitor="acc").evaluates


def test_case_22_a_function_is_called_at_each_improvement() -> None:
    calls: list[int] = []
    once = ExecuteOnceBetterMonitor("acc", True, lambda: calls.append(1))
    toy_trainer(8, [once], {"acc": Scripted(0.0, 0.1, 0.5, 0.3, 0.7)}, n_epochs=4).run()
    assert len(calls) == 3


def test_a_new_training_resets_the_best_value() -> None:
    watching = Watching("acc")
    for values in ((0.0, 0.9), (0.0, 0.1)):
        toy_trainer(8, [watching], {"acc": Scripted(*values)}, n_epochs=1).run()
    assert watching.seen == [(0.9, True), (0.1, True)]


def test_a_native_evaluation_can_be_monitored() -> None:
    watching = Watching("loss", larger_better=False)
    run = tiny_run(callbacks=[Evaluate(tiny_loader(), sanity_batches=1), watching], epochs=2)
    assert [value for value, _ in watching.seen] == [value for _, value in run.history["eval/loss"]]
    assert watching.seen[0][1]

"""Events, filters, and functions at events: cases 7 to 10, 12 and 24."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.compat.fastnlp import Callback, Event, Filter, Trainer
from cadenza.compat.fastnlp.core.callbacks.callback_event import filter_of
from cadenza.compat.fastnlp.translation import EVENTS
from cadenza.testing import tiny_run
from tests.compat.fastnlp.toy import toy_trainer


def done(event: Event, **arguments: Any) -> list[int]:
    """Return at which batches a function at an event is called, in ten batches."""
    called: list[int] = []

    @Trainer.on(event)
    def note(trainer: Any, *_: Any) -> None:
        called.append(trainer.global_forward_batches)

    toy_trainer(20, n_epochs=2, **arguments).run()
    return called


def test_there_is_a_factory_and_a_trainers_method_for_each_of_the_24_events() -> None:
    assert len(EVENTS) == 24
    trainer = toy_trainer()
    for name in EVENTS:
        assert getattr(Event, name)(every=2) == Event(name, every=2)
        assert callable(getattr(trainer, name))
        assert str(getattr(Event, name)()) == name


def test_case_7_every_once_and_filter_fn() -> None:
    assert done(Event.on_train_batch_end(every=2)) == [2, 4, 6, 8, 10]
    assert done(Event.on_train_batch_end(once=2)) == [2]
    assert done(Event.on_train_batch_end(filter_fn=lambda filter, trainer: filter.num_called % 2 == 0)) == [2, 4, 6, 8, 10]


def test_case_7_a_filter_counts_calls_and_passed_calls() -> None:
    @Filter(every=10)
    def function(trainer: Any) -> None:
        """Do nothing."""

    executed = []
    for _ in range(100):
        function(None)
        executed.append(function.__fastNLP_filter__.num_executed)
    assert executed[:9] == [0] * 9
    assert executed[9:19] == [1] * 10
    assert executed[-1] == 10


def test_a_filter_fn_sees_this_call_counted_and_its_execution_not_yet() -> None:
    seen: list[tuple[int, int]] = []

    def second(filter: Filter, trainer: Any) -> bool:
        seen.append((filter.num_called, filter.num_executed))
        return True

    done(Event.on_train_epoch_end(filter_fn=second))
    assert seen == [(1, 0), (2, 1)]


def test_case_8_once_true_is_the_first_time() -> None:
    assert done(Event.on_train_batch_end(once=True)) == done(Event.on_train_batch_end(once=1)) == [1]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Event.on_train_begin(every=0), ValueError),
        (Event.on_train_begin(every=-1), ValueError),
        (Event.on_train_begin(once=1.0), ValueError),  # type: ignore[arg-type]  # wrong on purpose
        (Event.on_train_begin(filter_fn=3), TypeError),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_case_8_wrong_numbers_are_errors_in_the_trainers_constructor(event: Event, error: type[Exception]) -> None:
    Trainer.on(event)(lambda trainer: None)
    with pytest.raises(error, match=r"every must|once must|filter_fn must"):
        toy_trainer()
    with pytest.raises(error):
        toy_trainer().add_callback_fn(event, lambda trainer: None)


def test_case_8_of_several_arguments_the_first_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As the tutorial promises; fastNLP refuses two, and takes three."""
    assert done(Event.on_train_batch_end(every=4, once=2)) == [4, 8]
    assert done(Event.on_train_batch_end(once=3, filter_fn=lambda filter, trainer: True)) == [3]
    assert "every= is used, and once= is ignored" in caplog.text
    assert "once= is used, and filter_fn= is ignored" in caplog.text


def test_case_9_markers_choose_the_functions_of_a_trainer() -> None:
    order: list[str] = []

    def waiting(name: str, marker: str | None) -> None:
        Trainer.on(Event.on_train_begin(), marker=marker)(lambda trainer: order.append(name))

    def called(marker: str | None) -> list[str]:
        order.clear()
        toy_trainer(n_epochs=1, marker=marker).run()
        return list(order)

    for name, marker in (("none1", None), ("all1", "all"), ("a1", "a"), ("none2", None), ("b1", "b"), ("all2", "all")):
        waiting(name, marker)
    assert called(None) == ["all1", "all2", "none1", "none2"]
    assert called("a") == ["all1", "all2", "a1"]
    assert called("a") == ["all1", "all2", "a1"]
    assert called("b") == ["all1", "all2", "b1"]
    assert called(None) == ["all1", "all2"]


def test_a_trainer_with_the_marker_all_calls_each_function_once() -> None:
    """Deviation: fastNLP calls them twice."""
    order: list[str] = []
    Trainer.on(Event.on_train_begin(), marker="all")(lambda trainer: order.append("all"))
    toy_trainer(n_epochs=1, marker="all").run()
    assert order == ["all"]


def test_case_10_each_trainer_has_a_fresh_filter() -> None:
    seen: list[int] = []
    Trainer.on(Event.on_train_batch_end(every=3), marker="all")(lambda trainer: seen.append(trainer.global_forward_batches))
    for _ in range(2):
        toy_trainer(20, n_epochs=1).run()
    assert seen == [3, 3]


def test_decorated_functions_are_returned_unchanged() -> None:
    def function(trainer: Any) -> None:
        """Do nothing."""

    assert Trainer.on(Event.on_train_begin())(function) is function


@pytest.mark.parametrize(
    ("function", "fits"),
    [
        (lambda trainer, batch: None, False),
        (lambda a, b, c, d=1: None, True),
        (lambda *everything: None, True),
        (lambda a, b, c, *, needed: None, False),
    ],
)
def test_case_12_a_function_must_accept_the_arguments_of_its_event(function: Callable[..., None], fits: bool) -> None:
    subscribe = Trainer.on(Event.on_train_batch_begin())
    if fits:
        subscribe(function)
    else:
        with pytest.raises(TypeError, match="on_train_batch_begin calls a function with \\(trainer, batch, indices\\)"):
            subscribe(function)


def test_case_12_an_unknown_event_is_an_error() -> None:
    with pytest.raises(AttributeError, match="expected an event"):
        Trainer.on("on_train_begin")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="expected an event"):
        toy_trainer().add_callback_fn("on_train_begin", lambda trainer: None)  # type: ignore[arg-type]  # wrong on purpose


def test_a_function_added_during_an_event_is_called_in_the_same_event() -> None:
    order: list[str] = []
    trainer = toy_trainer(n_epochs=1)

    def add(trainer: Trainer) -> None:
        order.append("first")
        trainer.add_callback_fn(Event.on_train_epoch_begin(), lambda trainer: order.append("second"))

    trainer.add_callback_fn(Event.on_train_epoch_begin(), add)
    trainer.run()
    assert order == ["first", "second"]


class Counting(Callback):
    """Has two filtered methods."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.filters: list[str] = []

    @Filter(every=3)
    def on_train_batch_end(self, trainer: Any) -> None:
        self.ends.append(trainer.global_forward_batches)

    @Filter(filter_fn=lambda filter, trainer: bool(trainer.cur_epoch_idx == 2))
    def on_train_epoch_end(self, trainer: Any) -> None:
        self.filters.append("second")


def test_a_filtered_method_counts_per_instance_and_passes_the_trainer_to_filter_fn() -> None:
    """Deviation: in fastNLP all instances share a counter, and filter_fn gets the callback."""
    one, other = Counting(), Counting()
    toy_trainer(20, [one, other], n_epochs=2).run()
    assert one.ends == other.ends == [3, 6, 9]
    assert one.filters == ["second"]
    filter = filter_of(Counting.on_train_batch_end)
    assert filter is not None
    assert filter.num_called == 0


def test_filters_work_in_a_native_trainer() -> None:
    counting = Counting()
    tiny_run(callbacks=[counting], epochs=2, batches=5)
    assert counting.ends == [3, 6, 9]


def test_a_method_named_almost_like_an_event_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelled(Callback):
        def on_train_batch_start(self, trainer: Any, batch: Any, indices: Any) -> None:
            """Is never called."""

        def on_purpose(self) -> None:
            """Is a method of the user's own."""

    assert Misspelled.__name__
    assert [line.partition("Misspelled.")[2] for line in caplog.messages] == [
        "on_train_batch_start is not an event, and is never called by a training. Did you mean 'on_train_batch_end'?"
    ]


def test_a_callable_without_source_is_a_hook() -> None:
    """Deviation: fastNLP compares source texts, and fails."""
    scope: dict[str, Any] = {"Callback": Callback, "seen": []}
    exec("class Made(Callback):\n    def on_train_begin(self, trainer): seen.append(1)", scope)
    tiny_run(callbacks=[scope["Made"]()])
    assert scope["seen"] == [1]


def test_case_24_a_filter_continues_after_a_resume(tmp_path: Path) -> None:
    def trainer(called: list[int]) -> Trainer:
        @Trainer.on(Event.on_before_backward(every=3))
        def note(trainer: Any, outputs: Any) -> None:
            called.append(trainer.global_forward_batches)

        return toy_trainer(8, n_epochs=3)

    first: list[int] = []
    cut = trainer(first)
    cut.add_callback_fn(Event.on_train_epoch_end(once=2), lambda trainer: trainer.save_checkpoint(tmp_path))
    cut.run()
    second: list[int] = []
    trainer(second).run(resume_from=tmp_path)
    assert first == [2, 5]
    assert second == [5]

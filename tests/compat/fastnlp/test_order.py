"""Events: their order and counters, filters, functions at events; the end of a training: cases 1 to 15, 17, 24, 26 and 29."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback as NativeCallback
from cadenza.callbacks import EarlyStopping, Evaluate, Limit
from cadenza.compat.fastnlp import Callback, EarlyStopCallback, EarlyStopException, Event, Filter, Trainer
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.callbacks.callback_event import filter_of
from cadenza.compat.fastnlp.translation import EVENTS
from cadenza.testing import Recorder, tiny_loader, tiny_run
from tests.compat.fastnlp.toy import Hooks, Raising, Scribe, Scripted, Seen, Toy, live, toy_trainer, trained, weights_of

BATCH = [
    *("on_fetch_data_begin", "on_fetch_data_end", "on_train_batch_begin", "on_before_backward", "on_after_backward"),
    *("on_before_optimizers_step", "on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad"),
]


def epoch(number: int, done: int) -> list[Seen]:
    """Return an epoch of two batches, as it was recorded of the development version."""
    first = [(name, number, 0, done) for name in ["on_train_epoch_begin", *BATCH]]
    second = [(name, number, 1, done + 1) for name in ["on_train_batch_end", *BATCH]]
    rest = ["on_train_batch_end", "on_fetch_data_begin", "on_fetch_data_end", "on_evaluate_begin", "on_evaluate_end"]
    return [*first, *second, *((name, number, 2, done + 2) for name in rest), ("on_train_epoch_end", number + 1, 0, done + 2)]


def test_case_1_two_epochs_of_two_batches_give_this_sequence() -> None:
    scribe = Scribe()
    trainer = toy_trainer(8, [scribe], {"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=2)
    trainer.run()
    start = ["on_after_trainer_initialized", "on_sanity_check_begin", "on_sanity_check_end", "on_train_begin"]
    assert scribe.seen == [*((name, 0, 0, 0) for name in start), *epoch(0, 0), *epoch(1, 2), ("on_train_end", 2, 0, 4)]
    assert trainer.callback_manager.callback_counter["on_fetch_data_begin"] == 6
    assert trainer.callback_manager.callback_counter["on_train_batch_end"] == 4


def test_case_2_an_update_follows_three_batches_also_over_the_end_of_an_epoch_and_before_its_evaluation() -> None:
    """Deviation: in fastNLP the gradients of the last, incomplete window are lost. Here they are applied at the end."""
    scribe = Scribe()
    toy_trainer(20, [scribe], accumulation_steps=3, n_epochs=2).run()
    assert [g for _, _, g in scribe.at("on_before_optimizers_step")] == [2, 5, 8, 10]
    assert len(scribe.at("on_before_backward")) == 10
    steps = [name for name in scribe.names if "optimizers_step" in name or "zero_grad" in name]
    assert steps == BATCH[-4:] * 4
    scribe = Scribe()
    trained(12, scribe, {"acc": Scripted(*range(3))}, n_epochs=2, accumulation_steps=4, evaluate_every=-2)
    assert [scribe.at(event)[-1] for event in BATCH[-4:]] == [(1, 3, 6)] * 4
    assert scribe.at("on_evaluate_begin") == scribe.at("on_evaluate_end") == [(1, 3, 6)]
    assert scribe.at("on_train_epoch_end")[-1] == (2, 0, 6)


@pytest.mark.parametrize(
    ("every", "n_epochs", "between", "at"),
    [
        (3, 2, ("on_train_batch_end", "on_fetch_data_begin"), [(0, 3, 3), (1, 1, 6), (1, 4, 9)]),
        (-2, 5, ("on_fetch_data_end", "on_train_epoch_end"), [(1, 5, 10), (3, 5, 20)]),
    ],
    ids=["3, which counts on over epochs", "4, which sees the epoch before it is counted"],
)
def test_case_3_and_4_evaluate_each_third_batch_or_second_epoch(every: int, n_epochs: int, between: Any, at: Any) -> None:
    scribe = Scribe()
    trained(20, scribe, {"acc": Scripted(*range(9))}, n_epochs=n_epochs, evaluate_every=every)
    assert scribe.at("on_evaluate_begin") == scribe.at("on_evaluate_end") == at
    for index in [index for index, name in enumerate(scribe.names) if name == "on_evaluate_begin"]:
        assert (scribe.names[index - 1], scribe.names[index + 2]) == between


def test_case_5_a_function_decides_after_each_batch_and_case_6_every_tenth_epoch_is_evaluated() -> None:
    asked: list[int] = []

    def at_four(trainer: Trainer) -> bool:
        asked.append(trainer.global_forward_batches)
        return asked[-1] == 4

    scribe = Scribe("on_evaluate_end")
    trained(20, scribe, {"acc": Scripted(*range(9))}, n_epochs=2, evaluate_every=at_four)
    assert asked == list(range(1, 11))
    assert scribe.at("on_evaluate_end") == [(0, 4, 4)]
    said: list[str] = []

    def checked(trainer: Any, results: Any) -> None:
        trial = AdaptedRun.of(trainer.live).trial
        assert trial is not None
        said.append(f"trial of {trial.batch} batches")

    watch = Hooks(
        on_sanity_check_end=checked,
        on_evaluate_end=lambda trainer, results: said.append(f"{trainer.cur_epoch_idx + 1}/{trainer.n_epochs}"),
    )
    trained(12, watch, {"acc": Scripted(*range(9))}, n_epochs=40, evaluate_every=-10)
    assert said == ["trial of 2 batches", "10/40", "20/40", "30/40", "40/40"]


def test_case_11_functions_run_first_then_callbacks_then_added_functions() -> None:
    order: list[str] = []
    Trainer.on(Event.on_train_begin())(lambda trainer: order.append("function"))
    callbacks = [Hooks(on_train_begin=lambda trainer, name=name: order.append(name)) for name in ("first", "second")]
    trainer = toy_trainer(8, callbacks, n_epochs=1)
    trainer.add_callback_fn(Event.on_train_begin(), lambda trainer: order.append("added"))
    trainer.run()
    assert order == ["function", "first", "second", "added"]


def test_the_lengths_of_the_training_are_known_in_on_train_begin_and_case_26_a_second_run_has_no_epoch() -> None:
    scribe = Scribe()
    trainer = trained(8, scribe, {"acc": Scripted(*range(9))}, n_epochs=1)
    scribe.seen.clear()
    trainer.run()
    assert scribe.names == ["on_sanity_check_begin", "on_sanity_check_end", "on_train_begin", "on_train_end"]
    assert scribe.at("on_train_end") == [(1, 0, 2)]
    seen: dict[str, Any] = {}

    def lengths(trainer: Any, driver: Any = None) -> tuple[Any, ...]:
        return trainer.n_epochs, trainer.n_batches, trainer.num_batches_per_epoch, driver is trainer.driver

    look = Hooks(
        on_after_trainer_initialized=lambda trainer, driver: seen.update(made=lengths(trainer, driver)),
        on_train_begin=lambda trainer: seen.update(begin=lengths(trainer)),
    )
    toy_trainer(20, look, n_epochs=3).run(num_train_batch_per_epoch=2)
    assert seen == {"made": (3, -1, None, True), "begin": (3, 6, 2, False)}


def test_case_29_n_batches_is_exact_also_inside_a_window_and_the_last_epoch_is_shorter() -> None:
    scribe = Scribe("on_evaluate_end", "on_train_epoch_end", "on_train_end")
    trainer = toy_trainer(20, [scribe], {"acc": Scripted(*range(9))}, n_batches=7)
    assert trainer.n_epochs is None
    trainer.run()
    assert [trainer.n_epochs, trainer.n_batches, trainer.global_forward_batches] == [2, 7, 7]
    assert scribe.seen == [
        ("on_evaluate_end", 0, 5, 5),
        ("on_train_epoch_end", 1, 0, 5),
        ("on_evaluate_end", 1, 2, 7),
        ("on_train_epoch_end", 2, 0, 7),
        ("on_train_end", 2, 0, 7),
    ]
    scribe = Scribe("on_before_optimizers_step")
    assert trained(20, scribe, n_batches=7, accumulation_steps=3).global_forward_batches == 7
    assert len(scribe.seen) == 3  # batches 1 to 3, 4 to 5, 6 to 7


def test_a_native_trainer_calls_the_same_events_but_for_those_of_the_trainer_itself() -> None:
    scribe, limited = Scribe(), Scribe("on_train_epoch_end", "on_train_end")
    run = tiny_run(callbacks=[scribe, Recorder()], epochs=2, batches=2)
    expected = [name for name, *_ in [*epoch(0, 0), *epoch(1, 2)] if "evaluate" not in name]
    assert scribe.names == ["on_after_trainer_initialized", "on_train_begin", *expected, "on_train_end"]
    assert scribe.at("on_train_epoch_end") == [(1, 0, 2), (2, 0, 4)]
    assert run.progress.batch == 4
    tiny_run(callbacks=[limited], steps=7, batches=5)  # the limit ends the last epoch
    assert limited.seen == [("on_train_epoch_end", 1, 0, 5), ("on_train_epoch_end", 2, 0, 7), ("on_train_end", 2, 0, 7)]
    assert [listener.moment.__name__ for listener in Hooks().listeners()] == ["on_setup"]  # one without hooks


# -- filters ---------------------------------------------------------------------------------------------


def done(event: Event) -> list[int]:
    """Return at which batches a function at an event is called, in ten batches."""
    called: list[int] = []
    Trainer.on(event)(lambda trainer, *_: called.append(trainer.global_forward_batches))
    trained(20, n_epochs=2)
    return called


def test_there_is_a_factory_and_a_trainers_method_for_each_of_the_24_events() -> None:
    assert len(EVENTS) == 24
    trainer = toy_trainer()
    for name in EVENTS:
        assert getattr(Event, name)(every=2) == Event(name, every=2)
        assert callable(getattr(trainer, name))
        assert str(getattr(Event, name)()) == name


@pytest.mark.parametrize(
    ("arguments", "batches"),
    [
        ({"every": 2}, [2, 4, 6, 8, 10]),
        ({"once": 2}, [2]),
        ({"filter_fn": lambda filter, trainer: filter.num_called % 2 == 0}, [2, 4, 6, 8, 10]),
        ({"once": True}, [1]),
        ({"once": 1}, [1]),
        ({"every": 4, "once": 2}, [4, 8]),
        ({"once": 3, "filter_fn": lambda filter, trainer: True}, [3]),
    ],
    ids=["every", "once", "filter_fn", "once, the first time", "once, the first", "every and once", "once and filter_fn"],
)
def test_case_7_and_8_every_once_and_filter_fn_of_which_the_first_is_used(
    arguments: Any, batches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As the tutorial promises; fastNLP refuses two arguments, and takes three."""
    assert done(Event.on_train_batch_end(**arguments)) == batches
    ignored = [f"{first}= is used, and {other}= is ignored" for first, other in zip(arguments, [*arguments][1:], strict=False)]
    assert [message for message in ignored if message not in caplog.text] == []
    assert ("is ignored" in caplog.text) == bool(ignored)


def test_case_7_a_filter_counts_calls_and_passed_calls_and_its_function_sees_this_execution_not_yet() -> None:
    @Filter(every=10)
    def function(trainer: Any) -> None:
        """Do nothing."""

    def second(filter: Filter, trainer: Any) -> bool:
        seen.append((filter.num_called, filter.num_executed))
        return True

    executed = []
    for _ in range(100):
        function(None)
        executed.append(function.__fastNLP_filter__.num_executed)
    assert executed[:9] == [0] * 9
    assert executed[9:19] == [1] * 10
    assert executed[-1] == 10
    seen: list[tuple[int, int]] = []
    done(Event.on_train_epoch_end(filter_fn=second))
    assert seen == [(1, 0), (2, 1)]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": -1}, {"once": 1.0}, {"filter_fn": 3}])
def test_case_8_wrong_numbers_are_errors_in_the_trainers_constructor(wrong: Any) -> None:
    event, error = Event.on_train_begin(**wrong), TypeError if "filter_fn" in wrong else ValueError
    Trainer.on(event)(lambda trainer: None)
    with pytest.raises(error, match=r"every must|once must|filter_fn must"):
        toy_trainer()
    with pytest.raises(error):
        toy_trainer().add_callback_fn(event, lambda trainer: None)


def test_case_9_and_10_markers_choose_the_functions_of_a_trainer_and_each_has_a_fresh_filter() -> None:
    order: list[str] = []

    def called(marker: str | None) -> list[str]:
        order.clear()
        trained(n_epochs=1, marker=marker)
        return list(order)

    seen: list[int] = []
    Trainer.on(Event.on_train_batch_end(every=3), marker="all")(lambda trainer: seen.append(trainer.global_forward_batches))
    for _ in range(2):
        trained(20, n_epochs=1)
    assert seen == [3, 3]
    Trainer._custom_callbacks.clear()
    for name, marker in (("none1", None), ("all1", "all"), ("a1", "a"), ("none2", None), ("b1", "b"), ("all2", "all")):
        Trainer.on(Event.on_train_begin(), marker=marker)(lambda trainer, name=name: order.append(name))
    assert called(None) == ["all1", "all2", "none1", "none2"]
    assert called("a") == ["all1", "all2", "a1"]
    assert called("a") == ["all1", "all2", "a1"]
    assert called("b") == ["all1", "all2", "b1"]
    assert called(None) == ["all1", "all2"]
    assert called("all") == ["all1", "all2"]  # deviation: fastNLP calls them twice


@pytest.mark.parametrize(
    ("function", "fits"),
    [
        (lambda a, b: None, False),
        (lambda a, b, c, d=1: None, True),
        (lambda *a: None, True),
        (lambda a, b, c, *, d: None, False),
    ],
)
def test_case_12_a_function_must_accept_the_arguments_of_an_existing_event(function: Callable[..., None], fits: bool) -> None:
    subscribe = Trainer.on(Event.on_train_batch_begin())
    if fits:
        assert subscribe(function) is function
    else:
        with pytest.raises(TypeError, match="on_train_batch_begin calls a function with \\(trainer, batch, indices\\)"):
            subscribe(function)
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
    one, other, native = Counting(), Counting(), Counting()
    trained(20, [one, other], n_epochs=2)
    tiny_run(callbacks=[native], epochs=2, batches=5)
    assert one.ends == other.ends == native.ends == [3, 6, 9]
    assert one.filters == ["second"]
    filter = filter_of(Counting.on_train_batch_end)
    assert filter is not None
    assert filter.num_called == 0


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


# -- the end -----------------------------------------------------------------------------------------------


def test_case_13_on_exception_is_called_for_an_error_which_is_raised_as_is_ctrl_c_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scribe, error = Scribe(), RuntimeError("third")
    with pytest.raises(RuntimeError, match="third"):
        trained(20, [Raising("on_train_batch_end", 3, error), scribe], n_epochs=1)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 3, 3)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert "on_train_epoch_end" not in scribe.names
    assert scribe.at("on_train_batch_end") == [(0, 1, 1), (0, 2, 2)]  # callbacks after the failing one do not get the event
    trainer = toy_trainer(20, [Raising("on_train_batch_begin", 2, KeyboardInterrupt())], n_epochs=1)
    monkeypatch.setattr(trainer.driver, "is_distributed", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=True)
    assert "catch_KeyboardInterrupt works in a single process only" in caplog.text


@pytest.mark.parametrize("event", ["on_train_batch_begin", "on_before_backward", "on_before_optimizers_step"])
@pytest.mark.parametrize("caught", [True, False])
def test_case_14_ctrl_c_in_the_third_batch_ends_the_training_and_is_raised_unless_caught(event: str, caught: bool) -> None:
    scribe = Scribe()
    trainer = toy_trainer(20, [Raising(event, 2, KeyboardInterrupt()), scribe], n_epochs=1)
    with nullcontext() if caught else pytest.raises(KeyboardInterrupt):
        trainer.run(catch_KeyboardInterrupt=None if caught else False)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_sanity_check_begin", KeyboardInterrupt()), ("on_sanity_check_end", EarlyStopException("no"))],
    ids=["Ctrl-C", "stop"],
)
def test_case_15_a_stop_or_ctrl_c_before_the_training_is_raised(event: str, error: BaseException) -> None:
    scribe = Scribe("on_exception", "on_train_end")
    trainer = toy_trainer(20, [Raising(event, 0, error), scribe], {"acc": Scripted(0.1, 0.1)}, n_epochs=1)
    for _ in range(2):
        with pytest.raises(type(error)):
            trainer.run()
    assert scribe.seen == []


def test_an_evaluation_may_be_requested_in_a_hook_which_may_handle_its_error() -> None:
    def judge(trainer: Any) -> None:
        with pytest.raises(RuntimeError, match="judged"):
            trainer.run_evaluate()

    scribe, broken = Scribe("on_train_batch_end", "on_train_epoch_end"), Scribe()
    broken.on_evaluate_end = Raising("on_evaluate_end", 1, RuntimeError("judged")).on_evaluate_end  # type: ignore[method-assign]
    metrics = {"acc": Scripted(*range(9))}
    trained(4, [Hooks(on_train_batch_end=judge), scribe, broken], metrics, n_epochs=1, evaluate_every=-2)
    assert scribe.names == ["on_train_batch_end", "on_train_epoch_end"]
    seen: list[Any] = []
    last = Hooks(on_train_end=lambda trainer: seen.append(trainer.run_evaluate()))
    trained(8, last, {"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=1)
    assert seen == [{"acc#acc": 0.2}]


IN_A_BATCH = BATCH[:6]  # before the update


@pytest.mark.parametrize("event", IN_A_BATCH)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_case_15_a_stop_in_the_third_batch_ends_the_training_before_its_update(event: str, accumulate: int) -> None:
    stop, scribe = Raising(event, 2, EarlyStopException("enough")), Scribe()
    trainer = trained(20, [stop, scribe], n_epochs=4, accumulation_steps=accumulate)
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]
    assert (trainer.cur_epoch_idx, trainer.global_forward_batches) == (0, 2)
    outcome = live(trainer).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("stopped", "enough")
    expected = trained(20, n_batches=2) if accumulate == 1 else Toy()
    assert torch.equal(weights_of(trainer), weights_of(expected))  # the third batch left no trace


@pytest.mark.parametrize("event", [*IN_A_BATCH, "on_after_optimizers_step", "on_train_batch_end"])
def test_in_a_native_trainer_a_stop_is_a_stop(event: str) -> None:
    scribe = Scribe()
    run = tiny_run(callbacks=[Raising(event, 2, EarlyStopException("enough")), scribe], epochs=3)
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")
    assert scribe.at("on_exception") == scribe.at("on_train_end") == [(0, 2, 2)]
    assert scribe.names[-2:] == ["on_exception", "on_train_end"]


def test_after_a_stop_at_the_start_no_epoch_begins_and_an_error_in_an_update_does_not_count() -> None:
    scribe = Scribe()
    trained(20, [Raising("on_train_begin", 0, EarlyStopException()), scribe], n_epochs=1)
    assert scribe.names == ["on_after_trainer_initialized", "on_exception", "on_train_end"]

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never returns
            raise RuntimeError("no step")

    model, scribe = Toy(), Scribe("on_exception")
    with pytest.raises(RuntimeError, match="no step"):
        toy_trainer(20, [scribe], model=model, optimizers=Broken(model.parameters(), 0.1), n_epochs=1).run()
    assert scribe.at("on_exception") == [(0, 0, 0)]


def test_on_exception_gets_the_raised_exception_and_a_native_stop_as_an_early_stop() -> None:
    seen: list[BaseException] = []
    see, stop = Hooks(on_exception=lambda trainer, exception: seen.append(exception)), EarlyStopException("enough")
    trained(20, [Raising("on_train_batch_end", 3, stop), see], n_epochs=1)
    tiny_run(callbacks=[Raising("on_train_batch_end", 3, stop), see])
    assert seen == [stop, stop]
    assert stop.msg == "enough"
    seen.clear()
    evaluate = Evaluate(tiny_loader(), compute=lambda model, batch: {"loss": torch.tensor(1.0)})
    run = tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", mode="min", patience=1), see, Limit(9)], epochs=5)
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert [type(one) for one in seen] == [EarlyStopException]
    assert str(seen[0]) == run.outcome.reason


def test_a_stopped_training_ends_all_started_moments_and_continues_in_the_next_run() -> None:
    scribe = Scribe("on_train_batch_begin")
    trainer = trained(20, [Raising("on_train_epoch_begin", 5, EarlyStopException()), scribe], n_epochs=2)
    trainer.own_callbacks.pop(0)
    trainer.run()
    assert [g for *_, g in scribe.seen] == list(range(10))
    recorder = Recorder(NativeCallback.on_step_start, NativeCallback.on_step_end)
    tiny_run(callbacks=[Raising("on_before_backward", 1, EarlyStopException()), recorder])
    assert recorder.names == ["on_step_start", "on_step_end"] * 2


# -- early stop ------------------------------------------------------------------------------------------


def test_case_17_evaluations_between_batches_stop_before_the_next_fetch() -> None:
    scribe = Scribe("on_fetch_data_begin", "on_evaluate_end", "on_train_epoch_end", "on_exception", "on_train_end")
    metrics = {"acc": Scripted(0.0, 0.4, 0.3, 0.9, 0.9, 0.9)}
    trained(20, [scribe, EarlyStopCallback("acc#acc", patience=2)], metrics, evaluate_every=2, n_epochs=4)
    assert len(scribe.at("on_evaluate_end")) == 5
    assert scribe.at("on_train_epoch_end") == [(1, 0, 5)]
    assert scribe.seen[-3:] == [("on_fetch_data_begin", 1, 5, 10), ("on_exception", 1, 5, 10), ("on_train_end", 1, 5, 10)]


def test_a_checkpoint_restores_the_patience(tmp_path: Path) -> None:
    def stopped(*values: float, **run: Any) -> int:
        stop = EarlyStopCallback("acc", larger_better=False, patience=3)
        trainer = toy_trainer(8, stop, {"acc": Scripted(9.0, *values)}, n_epochs=len(values))
        if not run:
            trainer.add_callback_fn(Event.on_train_epoch_end(once=2), lambda trainer: trainer.save_checkpoint(tmp_path))
        trainer.run(**run)
        return int(trainer.cur_epoch_idx)

    assert stopped(0.1, 0.2, 0.3, 0.4, 0.5) == 4
    assert stopped(0.3, 0.2, 0.1, resume_from=tmp_path) == 3  # one was without gain before, two are now
    assert EarlyStopCallback("acc", patience=3).callback_name == "EarlyStopCallback#monitor-acc#patience-3"


def test_an_early_stop_needs_a_monitor_and_patience_and_does_not_stop_a_training_that_ends_first() -> None:
    with pytest.raises(RuntimeError, match="EarlyStopCallback needs a monitor"):
        toy_trainer(8, EarlyStopCallback(), {"acc": Scripted(0.0)})
    with pytest.raises(ValueError, match="patience must be a whole number of at least 1; got 0"):
        EarlyStopCallback("acc", patience=0)
    scribe = Scribe("on_exception", "on_train_epoch_end")
    trained(8, [scribe, EarlyStopCallback("acc", patience=2)], {"acc": Scripted(0.0, 3.0, 2.0, 1.0)}, n_epochs=3)
    assert scribe.names == ["on_train_epoch_end"] * 3

"""The order of the events, and the counters that they see: cases 1 to 6, 11, 26 and 29."""

from __future__ import annotations

from typing import Any

from cadenza import Run
from cadenza.compat.fastnlp import Callback, Event, Trainer
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.testing import Recorder, tiny_run
from tests.compat.fastnlp.toy import Scribe, Scripted, Seen, toy_trainer

BATCH = [
    "on_fetch_data_begin",
    "on_fetch_data_end",
    "on_train_batch_begin",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizers_step",
    "on_after_optimizers_step",
    "on_before_zero_grad",
    "on_after_zero_grad",
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
    assert scribe.seen == [
        *((name, 0, 0, 0) for name in start),
        *epoch(0, 0),
        *epoch(1, 2),
        ("on_train_end", 2, 0, 4),
    ]
    assert trainer.callback_manager.callback_counter["on_fetch_data_begin"] == 6
    assert trainer.callback_manager.callback_counter["on_train_batch_end"] == 4


def test_case_2_an_update_follows_three_batches_also_over_the_end_of_an_epoch() -> None:
    """Deviation: in fastNLP the gradients of the last, incomplete window are lost. Here they are applied at the end."""
    scribe = Scribe()
    toy_trainer(20, [scribe], accumulation_steps=3, n_epochs=2).run()
    assert [g for _, _, g in scribe.at("on_before_optimizers_step")] == [2, 5, 8, 10]
    assert len(scribe.at("on_before_backward")) == 10
    steps = [name for name in scribe.names if "optimizers_step" in name or "zero_grad" in name]
    assert steps == BATCH[-4:] * 4


def test_case_3_evaluation_after_each_third_batch_counts_on_over_epochs() -> None:
    scribe = Scribe()
    toy_trainer(20, [scribe], {"acc": Scripted(*range(9))}, n_epochs=2, evaluate_every=3).run()
    assert scribe.at("on_evaluate_end") == [(0, 3, 3), (1, 1, 6), (1, 4, 9)]
    for at in [at for at, name in enumerate(scribe.names) if name == "on_evaluate_begin"]:
        assert scribe.names[at - 1] == "on_train_batch_end"
        assert scribe.names[at + 2] == "on_fetch_data_begin"


def test_case_4_evaluation_after_each_second_epoch_sees_the_epoch_before_it_is_counted() -> None:
    scribe = Scribe("on_evaluate_begin", "on_evaluate_end")
    toy_trainer(20, [scribe], {"acc": Scripted(*range(9))}, n_epochs=5, evaluate_every=-2).run()
    assert scribe.at("on_evaluate_begin") == scribe.at("on_evaluate_end") == [(1, 5, 10), (3, 5, 20)]


def test_case_5_a_function_decides_after_each_batch_whether_to_evaluate() -> None:
    asked: list[int] = []

    def at_four(trainer: Trainer) -> bool:
        asked.append(trainer.global_forward_batches)
        return bool(trainer.global_forward_batches == 4)

    scribe = Scribe("on_evaluate_end")
    toy_trainer(20, [scribe], {"acc": Scripted(*range(9))}, n_epochs=2, evaluate_every=at_four).run()
    assert asked == list(range(1, 11))
    assert scribe.at("on_evaluate_end") == [(0, 4, 4)]


def test_case_6_forty_epochs_are_evaluated_at_ten_twenty_thirty_forty() -> None:
    said: list[str] = []

    class Watch(Callback):
        def on_sanity_check_end(self, trainer: Any, sanity_check_res: Any) -> None:
            trial = AdaptedRun.of(trainer.live).trial

            assert trial is not None
            said.append(f"trial of {trial.batch} batches")

        def on_evaluate_end(self, trainer: Any, results: Any) -> None:
            said.append(f"{trainer.cur_epoch_idx + 1}/{trainer.n_epochs}")

    toy_trainer(12, [Watch()], {"acc": Scripted(*range(9))}, n_epochs=40, evaluate_every=-10).run()
    assert said == ["trial of 2 batches", "10/40", "20/40", "30/40", "40/40"]


def test_case_11_functions_run_first_then_callbacks_then_added_functions() -> None:
    order: list[str] = []

    class First(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            order.append("first")

    class Second(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            order.append("second")

    @Trainer.on(Event.on_train_begin())
    def function(trainer: Any) -> None:
        order.append("function")

    trainer = toy_trainer(8, [First(), Second()], n_epochs=1)
    trainer.add_callback_fn(Event.on_train_begin(), lambda trainer: order.append("added"))
    trainer.run()
    assert order == ["function", "first", "second", "added"]


def test_case_26_a_second_run_has_no_epoch_left() -> None:
    scribe = Scribe()
    trainer = toy_trainer(8, [scribe], {"acc": Scripted(*range(9))}, n_epochs=1)
    trainer.run()
    scribe.seen.clear()
    trainer.run()
    assert scribe.names == ["on_sanity_check_begin", "on_sanity_check_end", "on_train_begin", "on_train_end"]
    assert scribe.at("on_train_end") == [(1, 0, 2)]


def test_case_29_n_batches_is_exact_and_the_last_epoch_is_shorter() -> None:
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


def test_case_29_n_batches_may_end_inside_an_accumulation_window() -> None:
    scribe = Scribe("on_before_optimizers_step")
    trainer = toy_trainer(20, [scribe], n_batches=7, accumulation_steps=3)
    trainer.run()
    assert trainer.global_forward_batches == 7
    assert len(scribe.seen) == 3  # batches 1 to 3, 4 to 5, 6 to 7


def test_the_lengths_of_the_training_are_known_in_on_train_begin() -> None:
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_after_trainer_initialized(self, trainer: Any, driver: Any) -> None:
            seen["made"] = (trainer.n_epochs, trainer.n_batches, trainer.num_batches_per_epoch, driver is trainer.driver)

        def on_train_begin(self, trainer: Any) -> None:
            seen["begin"] = (trainer.n_epochs, trainer.n_batches, trainer.num_batches_per_epoch)

    toy_trainer(20, Look(), n_epochs=3).run(num_train_batch_per_epoch=2)
    assert seen == {"made": (3, -1, None, True), "begin": (3, 6, 2)}


def test_a_native_trainer_calls_the_same_events_but_for_those_of_the_trainer_itself() -> None:
    scribe, recorder = Scribe(), Recorder()
    run: Run = tiny_run(callbacks=[scribe, recorder], epochs=2, batches=2)
    expected = [name for name, *_ in [*epoch(0, 0), *epoch(1, 2)] if "evaluate" not in name]
    assert scribe.names == ["on_after_trainer_initialized", "on_train_begin", *expected, "on_train_end"]
    assert scribe.at("on_train_epoch_end") == [(1, 0, 2), (2, 0, 4)]
    assert run.progress.batch == 4


def test_in_a_native_run_a_limit_of_steps_ends_the_last_epoch() -> None:
    scribe = Scribe("on_train_epoch_end", "on_train_end")
    tiny_run(callbacks=[scribe], steps=7, batches=5)
    assert scribe.seen == [("on_train_epoch_end", 1, 0, 5), ("on_train_epoch_end", 2, 0, 7), ("on_train_end", 2, 0, 7)]


def test_a_callback_without_hooks_has_only_the_listener_of_the_start() -> None:
    class Idle(Callback):
        """Overrides nothing."""

    assert [listener.moment.__name__ for listener in Idle().listeners()] == ["on_setup"]


def test_the_evaluation_after_the_last_incomplete_window_sees_the_epoch_before_it_is_counted() -> None:
    scribe = Scribe()
    evaluations = {"acc": Scripted(*range(3))}
    toy_trainer(12, [scribe], evaluations, n_epochs=2, accumulation_steps=4, evaluate_every=-2).run()
    updates = ("on_before_optimizers_step", "on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad")
    assert [scribe.at(event)[-1] for event in updates] == [(1, 3, 6)] * 4
    assert scribe.at("on_evaluate_begin") == scribe.at("on_evaluate_end") == [(1, 3, 6)]
    assert scribe.at("on_train_epoch_end")[-1] == (2, 0, 6)

"""The eight events of NeMo 0.11 and the six of 0.10: cases 1-5, 10, 15 and 19 of part F2, 1-3 and 19 of F1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.nemo10.backends.pytorch.nm import LossNM
from cadenza.compat.neural.action import ActionCallback
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import EVENTS, SGD, OldTrace, Trace, line, spoiled, train, train_0_10

VERSIONS = pytest.mark.parametrize(("train", "trace_of"), [(train, Trace), (train_0_10, OldTrace)], ids=["0.11", "0.10"])


def traced(batches: int = 2, *, loader: Any = None, **arguments: Any) -> Trace:
    trace = Trace()
    train(line(batches, loader=loader), trace, **arguments)
    return trace


def traced_0_10(batches: int, **arguments: Any) -> OldTrace:
    trace = OldTrace()
    train_0_10(line(batches), trace, **arguments)
    return trace


# -- both versions ------------------------------------------------------------------------------------


@VERSIONS
def test_19_a_batch_with_a_nan_loss_is_skipped_with_a_warning_or_stops_a_single_process_too(
    train: Any, trace_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph, trace = line(loader=spoiled(5, 1)), trace_of()
    train(graph, trace, num_epochs=1)
    assert trace.seen[-1] == ("on_action_end", 5, 1)
    assert all(bool(weight.isfinite().all()) for weight in graph.weights)
    assert "Loss is NaN or inf: it is nan at step 1; the batch is skipped" in caplog.text
    stopped = trace_of()
    with pytest.raises(ValueError, match="Loss is NaN or inf: it is nan at step 1, and stop_on_nan_loss=True"):
        train(line(loader=spoiled(5, 1)), stopped, num_epochs=1, stop_on_nan_loss=True)  # 0.10.1 continues with NaN weights
    last = {Trace: "on_batch_start", OldTrace: "on_iteration_start"}[trace_of]
    assert stopped.seen[-1] == (last, 1, 0)

    good, spoilt = line(5), line(loader=spoiled(5, 4))
    train(good, max_steps=4)
    train(spoilt, max_steps=5)
    assert good.weights == spoilt.weights


@VERSIONS
def test_one_instance_works_in_several_trainings(train: Any, trace_of: Any) -> None:
    trace = trace_of()
    for batches in (1, 2):
        train(line(batches), trace, num_epochs=1)
    assert [event for event in trace.seen if event[0] == "on_action_end"] == [("on_action_end", 1, 1), ("on_action_end", 2, 1)]


class Fail(ActionCallback):
    def on_iteration_start(self) -> None:
        raise ArithmeticError("on purpose")


@VERSIONS
def test_nothing_is_called_after_an_error(train: Any, trace_of: Any) -> None:
    trace = trace_of()
    with pytest.raises(ArithmeticError, match="on purpose"):
        train(line(2), trace, Fail(), max_steps=3)
    start = {Trace: "on_step_start", OldTrace: "on_iteration_start"}[trace_of]
    assert trace.seen == [("on_action_start", 0, 0), ("on_epoch_start", 0, 0), (start, 0, 0)]


# -- 0.11 ---------------------------------------------------------------------------------------------


def test_01_three_steps_with_two_per_epoch_have_these_18_events() -> None:
    step = ("on_step_start", "on_batch_start", "on_batch_end", "on_step_end")
    assert traced(max_steps=3).seen == [
        ("on_action_start", 0, 0),
        ("on_epoch_start", 0, 0),
        *((event, 0, 0) for event in step),
        *((event, 1, 0) for event in step),
        ("on_epoch_end", 2, 0),
        ("on_epoch_start", 2, 1),
        *((event, 2, 1) for event in step),
        ("on_epoch_end", 3, 1),
        ("on_action_end", 3, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        # NeMo drops the fifth batch and has 4 step ends.
        pytest.param({"batches": 5, "num_epochs": 2, "batches_per_step": 2}, (10, 10, 6, 6, 2, 2, 1, 1), id="02, short window"),
        pytest.param({"max_steps": 4, "batches_per_step": 2}, (8, 8, 4, 4, 4, 4, 1, 1), id="03, four steps of two batches"),
        # NeMo drops the ends of a NaN loss and starts its step twice: it has 4 batch ends and 4 step ends.
        pytest.param({"loader": spoiled(5, 1), "num_epochs": 1}, (5, 5, 5, 5, 1, 1, 1, 1), id="19, a NaN loss"),
        pytest.param({"max_steps": 4}, (4, 4, 4, 4, 2, 2, 1, 1), id="04, four steps are two epochs"),
    ],
)
def test_each_start_and_end_is_called_as_often_as_batches_steps_and_epochs(
    arguments: dict[str, Any], counts: tuple[int, ...]
) -> None:
    assert traced(**arguments).counts == counts


def test_05_the_state_has_these_keys_and_an_added_key_lasts_for_one_event() -> None:
    seen: list[Any] = []

    @nemo.on_step_end
    def first(state: State) -> None:
        seen.append(sorted(state))
        seen.append((state["local_rank"], state["global_rank"], len(state["optimizers"])))
        state["mine"] = state["step"]
        state["step"] = 100

    @nemo.on_step_end
    def second(state: State) -> None:
        seen.append((state["mine"], state["step"]))

    @nemo.on_epoch_end
    def third(state: State) -> None:
        seen.append(("mine" in state, state["step"]))

    train(line(2), first, second, third, max_steps=1)
    keys = ["epoch", "global_rank", "local_rank", "optimizers", "step", "tensors"]
    assert seen == [keys, (None, None, 1), (0, 100), (False, 1)]


def test_05_each_end_of_a_batch_and_of_a_step_has_its_own_state() -> None:
    states: list[State] = []
    train(line(loader=spoiled(4, 0)), nemo.on_batch_end(states.append), batches_per_step=4, num_epochs=1)
    assert len({id(state) for state in states}) == len(states) == 4
    assert len({id(state["tensors"]) for state in states}) == 1

    ends: list[State] = []
    train(line(20), nemo.on_step_end(ends.append), batches_per_step=2, num_epochs=2)
    assert [state["step"] for state in ends] == list(range(20))
    assert len({id(state) for state in ends}) == 20


@pytest.mark.parametrize("event", EVENTS)
def test_10_a_decorator_returns_a_callback_of_its_event_that_is_not_callable(event: str) -> None:
    trace, seen_events = Trace(), list[tuple[int, int]]()
    decorate: Callable[[Callable[[State], object]], NeMoCallback] = getattr(nemo, event)
    made = decorate(lambda state: seen_events.append((state["step"], state["epoch"])))
    assert isinstance(made, NeMoCallback)
    assert not callable(made)
    train(line(2), made, trace, max_steps=3)
    assert seen_events == [(step, epoch) for name, step, epoch in trace.seen if name == event]


def undecorated(state: State) -> None:
    raise AssertionError("never called")


def test_10_decorators_cannot_be_stacked() -> None:
    with pytest.raises(TypeError, match="Do not stack decorators"):
        nemo.on_step_end(nemo.on_step_start(print))  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("callbacks", "error"),
    [
        (Trace(), TypeError),
        (undecorated, TypeError),
        ([[Trace()]], ValueError),
        ([undecorated], ValueError),
        ([Trace], ValueError),
    ],
)
def test_15_anything_but_a_list_of_callbacks_is_an_error(callbacks: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="callback"):
        NeuralModuleFactory().train([line().loss], optimization_params={**SGD, "max_steps": 1}, callbacks=callbacks)


def test_15_without_callbacks_it_trains_and_a_tuple_works_like_a_list() -> None:
    trace = Trace()  # NeMo accepts a tuple and never calls its callbacks
    callbacks: Any
    for callbacks in (None, [], (trace,)):
        run = NeuralModuleFactory().train([line().loss], optimization_params={**SGD, "max_steps": 1}, callbacks=callbacks)
        assert run.progress.step == 1
    assert trace.counts == (1, 1, 1, 1, 1, 1, 1, 1)


# -- 0.10 ---------------------------------------------------------------------------------------------


def test_01_five_batches_in_pairs_are_three_iterations_the_last_of_which_is_short() -> None:
    # NeMo drops the fifth batch: its iteration ends are 0 and 1, and action_end has step 2.
    assert traced_0_10(5, batches_per_step=2, num_epochs=1).seen == [
        ("on_action_start", 0, 0),
        ("on_epoch_start", 0, 0),
        *((f"on_iteration_{which}", step, 0) for step in (0, 1, 2) for which in ("start", "end")),
        ("on_epoch_end", 3, 0),
        ("on_action_end", 3, 1),
    ]


def test_02_registered_tensors_are_those_of_the_last_batch_and_ranks_optimizers_and_the_logger_are_known() -> None:
    graph, seen, known = line(2), list[Any](), list[Any]()

    class Look(ActionCallback):
        def on_action_start(self) -> None:
            known.append((self.local_rank, self.global_rank, len(self.action.optimizers), self.logger.name))

        def on_iteration_end(self) -> None:
            seen.append(self.registered_tensors[graph.y.unique_name])
            known.append(sorted(name.partition("~")[0] for name in self.registered_tensors))

        def on_action_end(self) -> None:
            seen.append(self.registered_tensors[graph.y.unique_name])

    train_0_10(graph, Look(), max_steps=1, batches_per_step=2)
    assert all(torch.equal(one, tiny_loader(2)[1][1]) for one in seen)
    assert len(seen) == 2
    names = ["loss", "loss", "x", "y", "y_pred"]  # the tensor of the loss, and the optimised sum
    assert known == [(None, None, 1, "nemo"), names]
    with pytest.raises(RuntimeError, match="Look is in no training; its attributes can be read only in its events"):
        _ = Look().step


def test_03_three_steps_with_two_per_epoch_are_two_epochs_with_the_rate_and_from_the_first_end_on_the_tensors() -> None:
    trace = traced_0_10(2, max_steps=3)
    assert [event for event in trace.seen if event[0].startswith("on_epoch")] == [
        ("on_epoch_start", 0, 0),
        ("on_epoch_end", 2, 0),
        ("on_epoch_start", 2, 1),
        ("on_epoch_end", 3, 1),
    ]
    assert trace.seen[-1] == ("on_action_end", 3, 2)
    assert set(trace.rates) == {0.1}
    counts = trace.registered
    assert counts["on_action_start"] == [0]
    assert counts["on_epoch_start"][0] == counts["on_iteration_start"][0] == 0
    assert set(counts["on_iteration_end"] + counts["on_epoch_end"] + counts["on_action_end"]) == {5}


def test_the_rate_is_that_of_the_optimizer_of_the_step() -> None:
    first, second, trace = line(2), line(2), OldTrace()
    loss = LossNM.of(nn.functional.mse_loss, ["predictions", "target"])(predictions=second.net(x=first.x), target=first.y)
    factory = NeuralModuleFactory()
    pairs = [
        (factory.create_optimizer("sgd", first.net, {**SGD, "lr": 0.1}), [first.loss]),
        (factory.create_optimizer("sgd", second.net, {**SGD, "lr": 0.2}), [loss]),
    ]
    factory.train(pairs, optimization_params={"max_steps": 4}, callbacks=[trace])
    rates = [rate for (event, *_), rate in zip(trace.seen, trace.rates, strict=True) if event == "on_iteration_end"]
    assert rates == [0.1, 0.2, 0.1, 0.2]
    params = {"lr": 0.8, "max_steps": 2}
    factory.reset_trainer()
    factory.train(pairs, optimization_params=params, lr_policy=lambda lr, step, epoch: lr / (step + 1))
    assert [optimizer.param_groups[0]["lr"] for optimizer, _ in pairs] == [0.8, 0.4]

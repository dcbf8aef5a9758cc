"""NeMo 0.11, its eight events: equivalence cases 1-5, 10, 15, 16 and 19 of the specification's part F2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.neural.action import ActionCallback
from tests.compat.nemo.graphs import SGD, line, spoiled

Event = tuple[str, int, int]

EVENTS = (
    "on_action_start",
    "on_epoch_start",
    "on_step_start",
    "on_batch_start",
    "on_batch_end",
    "on_step_end",
    "on_epoch_end",
    "on_action_end",
)


class Trace(NeMoCallback):
    """Records each event with its step and epoch."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_action_start(self, state: State) -> None:
        self._keep("on_action_start", state)

    def on_epoch_start(self, state: State) -> None:
        self._keep("on_epoch_start", state)

    def on_step_start(self, state: State) -> None:
        self._keep("on_step_start", state)

    def on_batch_start(self, state: State) -> None:
        self._keep("on_batch_start", state)

    def on_batch_end(self, state: State) -> None:
        self._keep("on_batch_end", state)

    def on_step_end(self, state: State) -> None:
        self._keep("on_step_end", state)

    def on_epoch_end(self, state: State) -> None:
        self._keep("on_epoch_end", state)

    def on_action_end(self, state: State) -> None:
        self._keep("on_action_end", state)

    def _keep(self, event: str, state: State) -> None:
        self.seen.append((event, state["step"], state["epoch"]))

    @property
    def counts(self) -> tuple[int, ...]:
        counted = Counter(event for event, _, _ in self.seen)
        order = ("on_batch_start", "on_batch_end", "on_step_start", "on_step_end", "on_epoch_start", "on_epoch_end")
        return tuple(counted[event] for event in (*order, "on_action_start", "on_action_end"))


def train(*callbacks: Any, batches: int = 2, loader: Any = None, **arguments: Any) -> Any:
    length: dict[str, Any] = {name: arguments.pop(name) for name in ("max_steps", "num_epochs") if name in arguments}
    graph = line(batches, loader=loader)
    return NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, **length}, list(callbacks), **arguments)


def traced(**arguments: Any) -> Trace:
    trace = Trace()
    train(trace, **arguments)
    return trace


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


def test_02_a_short_last_window_is_applied_so_two_epochs_of_5_batches_in_pairs_have_6_steps() -> None:
    # NeMo drops the fifth batch and has 4 step ends.
    assert traced(batches=5, num_epochs=2, batches_per_step=2).counts == (10, 10, 6, 6, 2, 2, 1, 1)


def test_03_four_steps_of_two_batches_take_four_epochs_of_two() -> None:
    assert traced(max_steps=4, batches_per_step=2).counts == (8, 8, 4, 4, 4, 4, 1, 1)


def test_04_24_samples_in_batches_of_12_and_four_steps_are_two_epochs() -> None:
    assert traced(max_steps=4).counts == (4, 4, 4, 4, 2, 2, 1, 1)


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

    train(first, second, third, max_steps=1)
    keys = ["epoch", "global_rank", "local_rank", "optimizers", "step", "tensors"]
    assert seen == [keys, (None, None, 1), (0, 100), (False, 1)]


def test_05_each_end_of_a_batch_has_its_own_state() -> None:
    states: list[State] = []
    train(nemo.on_batch_end(states.append), loader=spoiled(4, 0), batches_per_step=4, num_epochs=1)
    assert len({id(state) for state in states}) == len(states) == 4
    assert len({id(state["tensors"]) for state in states}) == 1


def test_05_each_end_of_a_step_has_its_own_state() -> None:
    states: list[State] = []
    train(nemo.on_step_end(states.append), batches=20, batches_per_step=2, num_epochs=2)
    assert [state["step"] for state in states] == list(range(20))
    assert len({id(state) for state in states}) == 20


@pytest.mark.parametrize("event", EVENTS)
def test_10_a_decorator_returns_a_callback_of_its_event_that_is_not_callable(event: str) -> None:
    trace, seen_events = Trace(), list[tuple[int, int]]()
    decorate: Callable[[Callable[[State], object]], NeMoCallback] = getattr(nemo, event)
    made = decorate(lambda state: seen_events.append((state["step"], state["epoch"])))
    assert isinstance(made, NeMoCallback)
    assert not callable(made)
    train(made, trace, max_steps=3)
    assert seen_events == [(step, epoch) for name, step, epoch in trace.seen if name == event]


def test_10_decorators_cannot_be_stacked() -> None:
    with pytest.raises(TypeError, match="Do not stack decorators"):
        nemo.on_step_end(nemo.on_step_start(print))  # type: ignore[arg-type]  # the mistake under test


def undecorated(state: State) -> None:
    raise AssertionError("never called")


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


@pytest.mark.parametrize("callbacks", [None, []])
def test_15_without_callbacks_it_trains(callbacks: Any) -> None:
    run = NeuralModuleFactory().train([line().loss], optimization_params={**SGD, "max_steps": 3}, callbacks=callbacks)
    assert run.progress.step == 3


def test_15_a_tuple_works_like_a_list() -> None:
    trace = Trace()  # NeMo accepts it and never calls its callbacks
    NeuralModuleFactory().train([line().loss], optimization_params={**SGD, "max_steps": 1}, callbacks=(trace,))
    assert trace.counts == (1, 1, 1, 1, 1, 1, 1, 1)


class Old(ActionCallback):
    """Appends its name at each of its events."""

    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__()
        self.name, self.said = name, said

    def on_iteration_start(self) -> None:
        self.said.append(f"{self.name} start")

    def on_iteration_end(self) -> None:
        self.said.append(f"{self.name} end {sorted(name.partition('~')[0] for name in self.registered_tensors)}")


def test_16_old_and_new_callbacks_are_called_in_the_order_of_the_list() -> None:
    said: list[str] = []

    class New(NeMoCallback):
        def on_step_start(self, state: State) -> None:
            said.append("new start")

        def on_batch_end(self, state: State) -> None:
            said.append("new batch")

        def on_step_end(self, state: State) -> None:
            said.append("new end")

    train(Old("a", said), New(), Old("b", said), max_steps=1)
    tensors = "['loss', 'loss', 'x', 'y', 'y_pred']"  # the tensor of the loss, and the optimised sum
    assert said == ["a start", "new start", "b start", "new batch", f"a end {tensors}", "new end", f"b end {tensors}"]


def test_19_a_batch_with_a_nan_loss_is_skipped_and_every_start_has_its_end() -> None:
    trace = traced(loader=spoiled(5, 1), num_epochs=1)
    # NeMo drops its ends and starts step 1 twice: it has 4 batch ends and 4 step ends.
    assert trace.counts == (5, 5, 5, 5, 1, 1, 1, 1)
    assert [step for event, step, _ in trace.seen if event == "on_step_start"] == [0, 1, 2, 3, 4]
    assert trace.seen[-1] == ("on_action_end", 5, 1)


def test_19_the_weights_are_those_of_a_training_without_the_batch() -> None:
    good, spoilt = line(5), line(loader=spoiled(5, 4))
    for graph, steps in ((good, 4), (spoilt, 5)):
        NeuralModuleFactory().train([graph.loss], optimization_params={**SGD, "max_steps": steps})
    assert good.weights == spoilt.weights


def test_19_after_stop_on_nan_loss_no_event_is_called() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="Loss is NaN or inf: it is nan at step 1, and stop_on_nan_loss=True"):
        train(trace, loader=spoiled(5, 1), num_epochs=1, stop_on_nan_loss=True)
    assert trace.seen[-2:] == [("on_step_start", 1, 0), ("on_batch_start", 1, 0)]


def test_after_an_error_in_a_callback_no_end_event_is_called() -> None:
    trace = Trace()

    @nemo.on_batch_end
    def fail(state: State) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        train(trace, fail, max_steps=3)
    assert trace.counts == (1, 1, 1, 0, 1, 0, 1, 0)

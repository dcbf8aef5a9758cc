"""NeMo 0.10, its six events: equivalence cases 1-3 of the specification's part F1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cadenza.compat.nemo10.backends.pytorch.nm import LossNM
from cadenza.compat.nemo10.core import ActionCallback, NeuralModuleFactory
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import SGD, Line, line

Event = tuple[str, int, int]


class Trace(ActionCallback):
    """Records each event with its step, its epoch, and the number of registered tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Event] = []
        self.registered: dict[str, list[int]] = {}
        self.rates: list[float] = []

    def on_action_start(self) -> None:
        self._keep("on_action_start")

    def on_epoch_start(self) -> None:
        self._keep("on_epoch_start")

    def on_iteration_start(self) -> None:
        self._keep("on_iteration_start")

    def on_iteration_end(self) -> None:
        self._keep("on_iteration_end")

    def on_epoch_end(self) -> None:
        self._keep("on_epoch_end")

    def on_action_end(self) -> None:
        self._keep("on_action_end")

    def _keep(self, event: str) -> None:
        self.seen.append((event, self.step, self.epoch_num))
        self.registered.setdefault(event, []).append(len(self.registered_tensors))
        self.rates.append(self.learning_rate)


def traced(graph: Line, accumulate: int = 1, **length: int) -> Trace:
    trace = Trace()
    factory = NeuralModuleFactory()
    factory.train([graph.loss], "sgd", {**SGD, **length}, [trace], batches_per_step=accumulate)
    return trace


def test_01_five_batches_in_pairs_are_three_iterations_the_last_of_which_is_short() -> None:
    # NeMo drops the fifth batch: its iteration ends are 0 and 1, and action_end has step 2.
    assert traced(line(5), accumulate=2, num_epochs=1).seen == [
        ("on_action_start", 0, 0),
        ("on_epoch_start", 0, 0),
        *((f"on_iteration_{which}", step, 0) for step in (0, 1, 2) for which in ("start", "end")),
        ("on_epoch_end", 3, 0),
        ("on_action_end", 3, 1),
    ]


def test_02_tensors_are_registered_at_the_first_end_and_stay_until_the_next() -> None:
    trace = traced(line(2), num_epochs=2)
    counts = trace.registered
    assert counts["on_action_start"] == [0]
    assert counts["on_epoch_start"][0] == counts["on_iteration_start"][0] == 0
    assert set(counts["on_iteration_end"] + counts["on_epoch_end"] + counts["on_action_end"]) == {5}


def test_02_registered_tensors_are_those_of_the_last_batch() -> None:
    graph, seen = line(2), list[Any]()

    class Look(ActionCallback):
        def on_iteration_end(self) -> None:
            seen.append(self.registered_tensors[graph.y.unique_name])

        def on_action_end(self) -> None:
            seen.append(self.registered_tensors[graph.y.unique_name])

    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "max_steps": 1}, [Look()], batches_per_step=2)
    assert all(torch.equal(one, tiny_loader(2)[1][1]) for one in seen)
    assert len(seen) == 2


def test_03_three_steps_with_two_per_epoch_are_two_epochs_and_the_rate_is_available_from_the_start() -> None:
    trace = traced(line(2), max_steps=3)
    assert [event for event in trace.seen if event[0].startswith("on_epoch")] == [
        ("on_epoch_start", 0, 0),
        ("on_epoch_end", 2, 0),
        ("on_epoch_start", 2, 1),
        ("on_epoch_end", 3, 1),
    ]
    assert trace.seen[-1] == ("on_action_end", 3, 2)
    assert set(trace.rates) == {0.1}


def test_outside_its_events_a_callback_is_in_no_training() -> None:
    with pytest.raises(RuntimeError, match="Trace is in no training; its attributes can be read only in its events"):
        _ = Trace().step


def test_nothing_is_called_after_an_error() -> None:
    trace = Trace()

    class Fail(ActionCallback):
        def on_iteration_start(self) -> None:
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        NeuralModuleFactory().train([line().loss], "sgd", {**SGD, "max_steps": 1}, [trace, Fail()])
    assert trace.seen[-1] == ("on_iteration_start", 0, 0)


def test_a_callback_knows_ranks_optimizers_and_the_logger() -> None:
    seen: list[Any] = []

    class Look(ActionCallback):
        def on_action_start(self) -> None:
            seen.append((self.local_rank, self.global_rank, len(self.action.optimizers), self.logger.name))

    NeuralModuleFactory().train([line().loss], "sgd", {**SGD, "max_steps": 1}, [Look()])
    assert seen == [(None, None, 1, "nemo")]


def test_one_instance_works_in_several_trainings() -> None:
    trace = Trace()
    for batches in (1, 2):
        graph = line(batches)
        NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "num_epochs": 1}, [trace])
    assert [event for event in trace.seen if event[0] == "on_action_end"] == [("on_action_end", 1, 1), ("on_action_end", 2, 1)]


def test_the_rate_is_that_of_the_optimizer_of_the_step() -> None:
    first, second, trace = line(2), line(2), Trace()
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

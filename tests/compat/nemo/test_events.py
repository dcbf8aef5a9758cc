"""The events of NeMo 0.11 and 0.10 and the tensors of their states: cases 1-10, 15 and 19 of part F2, 1-3 and 19 of F1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.core import NeuralModuleFactory, NmTensor
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.neural.action import ActionCallback
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import EVENTS, SGD, Line, NetNM, OldTrace, Trace, line, spoiled, train, train_0_10, worst_of

VERSIONS = pytest.mark.parametrize(("train", "trace_of"), [(train, Trace), (train_0_10, OldTrace)], ids=["0.11", "0.10"])


def traced(batches: int = 2, *, loader: Any = None, old: bool = False, **arguments: Any) -> Any:
    trace = OldTrace() if old else Trace()
    (train_0_10 if old else train)(line(batches, loader=loader), trace, **arguments)
    return trace


# -- both versions ------------------------------------------------------------------------------------


@VERSIONS
def test_19_a_batch_with_a_nan_loss_is_skipped_or_an_error(train: Any, trace_of: Any, caplog: pytest.LogCaptureFixture) -> None:
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
def test_starts_and_ends_are_as_many_as_batches_steps_and_epochs(arguments: dict[str, Any], counts: tuple[int, ...]) -> None:
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
def test_10_a_decorator_returns_a_callback_of_its_event_that_can_be_neither_called_nor_decorated(event: str) -> None:
    trace, seen_events = Trace(), list[tuple[int, int]]()
    decorate: Callable[[Callable[[State], object]], NeMoCallback] = getattr(nemo, event)
    made = decorate(lambda state: seen_events.append((state["step"], state["epoch"])))
    assert isinstance(made, NeMoCallback)
    assert not callable(made)
    train(line(2), made, trace, max_steps=3)
    assert seen_events == [(step, epoch) for name, step, epoch in trace.seen if name == event]
    with pytest.raises(TypeError, match="Do not stack decorators"):
        decorate(made)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("callbacks", "error"),
    [(Trace(), TypeError), (print, TypeError), ([[Trace()]], ValueError), ([print], ValueError), ([Trace], ValueError)],
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
    assert traced(5, old=True, batches_per_step=2, num_epochs=1).seen == [
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
    trace = traced(old=True, max_steps=3)
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


# -- tensors by name, in 0.11 ----------------------------------------------------------------------


def at(event: str, look: Callable[[Any], object], graph: Line) -> None:
    """Train one step, and look at the tensors of an event."""
    train(graph, getattr(nemo, event)(lambda state: look(state["tensors"])), max_steps=1)


def test_06_the_loss_is_the_undivided_loss_of_the_last_batch() -> None:
    graph, seen = line(2), dict[str, list[float]]()

    def note(event: str) -> Any:
        return getattr(nemo, event)(lambda state: seen.setdefault(event, []).append(state["tensors"].get_tensor("loss").item()))

    train(graph, note("on_batch_end"), note("on_step_end"), max_steps=1, batches_per_step=2)
    untrained = [float(nn.functional.mse_loss(0.5 * x, y)) for x, y in tiny_loader(2)]
    assert seen == {"on_batch_end": pytest.approx(untrained), "on_step_end": [pytest.approx(untrained[-1])]}


def test_06_two_losses_are_added() -> None:
    graph = line(1)
    other = LossNM.of(nn.functional.l1_loss, ["a", "b"])(a=graph.prediction, b=graph.y)
    seen: list[Any] = []

    @nemo.on_step_end
    def look(state: State) -> None:
        get = state["tensors"].get_tensor
        seen.append((get("loss"), get(graph.loss) + get(other), get(graph.loss)))

    train([graph.loss, other], look, max_steps=1)
    [(loss, both, first)] = seen
    assert loss == both
    assert loss != first
    assert loss.grad_fn is not None


@pytest.mark.parametrize("event", ["on_batch_start", "on_epoch_end", "on_action_end"])
def test_06_at_other_events_there_is_no_loss(event: str) -> None:
    graph = line()

    def look(tensors: Any) -> None:
        assert tensors.get_tensor("loss", compute=False) is None
        with pytest.raises(KeyError, match="'loss' is available only from the end of a batch to the end of its step"):
            tensors.get_tensor("loss")
        if event == "on_batch_start":
            with pytest.raises(ValueError, match="the current batch has not been read yet"):
                tensors.get_tensor(graph.prediction)

    at(event, look, graph)


def test_06_the_loss_of_a_skipped_batch_can_be_read() -> None:
    seen: list[float] = []
    look = nemo.on_batch_end(lambda state: seen.append(state["tensors"].get_tensor("loss").item()))
    train(line(loader=spoiled(2, 1)), look, max_steps=2)
    assert [value == value for value in seen] == [True, False]


def test_07_09_a_tensor_is_found_by_its_constant_unique_name_and_its_newest_name_in_its_own_graph_alone() -> None:
    graph, other = line(), line()
    unique = graph.prediction.unique_name
    port, module, number = unique.split("~~~")
    assert (port, module, len(number)) == ("y_pred", graph.net.name, 36)
    graph.prediction.rename("first")
    graph.prediction.rename("guess")
    assert (graph.prediction.name, str(graph.prediction), graph.prediction.unique_name) == ("guess", "guess", unique)

    def look(tensors: Any) -> None:
        found = tensors.get_tensor(graph.prediction)
        assert found is tensors.get_tensor(unique) is tensors.get_tensor("guess")
        assert isinstance(found, Tensor)
        for unknown in ("y_pred", "x", "gues", "first"):
            with pytest.raises(KeyError, match=rf"there is no tensor '{unknown}'.* The known names are \['loss', 'guess'\]"):
                tensors.get_tensor(unknown)
        with pytest.raises(ValueError, match=r"belongs to another graph\. This training does not read the data layer"):
            tensors.get_tensor(other.prediction)
        late, _ = worst_of(graph)
        with pytest.raises(KeyError, match=r"was created after the training started\. Create it before"):
            tensors.get_tensor(late)

    at("on_step_end", look, graph)


def test_07_a_name_in_use_is_an_error_and_the_old_name_stays() -> None:
    graph = line()
    graph.y.rename("goal")
    graph.prediction.rename("guess")
    for taken in ("goal", "loss"):
        with pytest.raises(KeyError, match=f"the name '{taken}' is already used in this graph; 'guess' keeps its name"):
            graph.prediction.rename(taken)
    assert graph.prediction.name == "guess"
    line().prediction.rename("goal")  # another graph has its own names
    graph.prediction.rename("guess")  # its own
    with pytest.raises(KeyError, match="is already used in this graph"):
        graph.prediction.rename(graph.x.unique_name)
    for wrong in ("", 3):
        with pytest.raises(TypeError, match="the name of a tensor must be a non-empty string"):
            graph.prediction.rename(wrong)  # type: ignore[arg-type]  # the mistake under test
    assert graph.prediction.name == "guess"


def test_08_a_tensor_that_the_training_does_not_need_is_computed_on_demand_once_per_batch() -> None:
    graph = line()
    worst, computed = worst_of(graph)
    cached: list[bool] = []

    @nemo.on_step_end
    def look(state: State) -> None:
        if state["step"] == 1:
            tensors = state["tensors"]
            cached.append(tensors.check_tensor_cached(worst.unique_name))
            assert tensors.get_tensor(worst, compute=False) is None
            assert tensors.get_tensor(worst) is tensors.get_tensor(worst.unique_name)
            cached.append(tensors.check_tensor_cached(worst.unique_name))
        if state["step"] == 2:
            cached.append(state["tensors"].check_tensor_cached(worst.unique_name))

    train(graph, look, max_steps=3)
    assert len(computed) == 1
    assert cached == [False, True, False]


class LineWithNoise(NetNM):
    """A module around one that is also used elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        result: Tensor = self.inner(x)
        return result


def test_08_reading_a_tensor_changes_neither_the_training_nor_the_rng_states() -> None:
    def trained(look: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        graph = line(net=LineWithNoise(inner))
        again: NmTensor = TrainableNM.of(inner, ["x"], ["out"])(x=graph.x)  # the trained module, used once more
        noise: NmTensor = NonTrainableNM.of(torch.rand_like, ["like"], ["noise"])(like=graph.x)

        @nemo.on_step_end
        def ask(state: State) -> None:
            assert state["tensors"].get_tensor(again).requires_grad
            state["tensors"].get_tensor(noise)

        train(graph, *([ask] if look else []), factory=NeuralModuleFactory(random_seed=1), max_steps=5)
        return list(graph.net.state_dict().values())

    assert all(map(torch.equal, trained(look=True), trained(look=False)))


def test_a_tensor_may_be_the_input_of_two_ports_and_values_can_be_set_and_deleted_until_the_next_batch() -> None:
    graph = line()  # NeMo raises a KeyError
    zero: NmTensor = NonTrainableNM.of(torch.sub, ["a", "b"], ["zero"])(a=graph.prediction, b=graph.prediction)

    def look(tensors: Any) -> None:
        assert tensors.get_tensor(zero).abs().sum() == 0
        tensors.set_tensor(graph.prediction, 7)
        assert tensors.get_tensor(graph.prediction) == 7
        tensors.clear_dict()
        assert not tensors.check_tensor_cached(graph.prediction.unique_name)
        assert graph.prediction.unique_name in tensors.tensor_list()

    at("on_step_end", look, graph)

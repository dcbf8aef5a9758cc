"""NeMo 0.11, tensors by name: equivalence cases 6-9 of part F2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.core import (
    NeuralModuleFactory,
    NmTensor,
)
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import Line, NetNM, line, spoiled, train, worst_of


def at(event: str, look: Callable[[Any], object], graph: Line) -> None:
    """Train one step, and look at the tensors of an event."""
    train(graph, getattr(nemo, event)(lambda state: look(state["tensors"])), max_steps=1)


# -- 6: the loss --------------------------------------------------------------------------------------


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


# -- 7: names -----------------------------------------------------------------------------------------


def test_07_the_nmtensor_its_constant_unique_name_and_its_newest_name_return_the_same_tensor() -> None:
    graph = line()
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


# -- 8: on demand -------------------------------------------------------------------------------------


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


# -- 9: other graphs ----------------------------------------------------------------------------------


def test_09_a_tensor_of_another_data_layer_or_created_during_training_is_an_error() -> None:
    graph, other = line(), line()

    def look(tensors: Any) -> None:
        with pytest.raises(ValueError, match=r"belongs to another graph\. This training does not read the data layer"):
            tensors.get_tensor(other.prediction)
        late, _ = worst_of(graph)
        with pytest.raises(KeyError, match=r"was created after the training started\. Create it before"):
            tensors.get_tensor(late)

    at("on_step_end", look, graph)

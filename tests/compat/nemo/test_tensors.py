"""NeMo 0.11, tensors by name: equivalence cases 6-9 of part F2; and the ports of neural modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import (
    NeuralModuleFactory,
    NeuralPortNameMismatchError,
    NeuralPortNmTensorMismatchError,
    NeuralType,
    NmTensor,
)
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.neural_types import ChannelType, LossType, PredictionsType, RegressionValuesType, VoidType
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import SGD, Line, NetNM, line, spoiled, worst_of


def train(tensors: list[NmTensor], *callbacks: Any, steps: int = 2, **arguments: Any) -> None:
    params = {**SGD, "max_steps": steps}
    NeuralModuleFactory().train(tensors, optimization_params=params, callbacks=list(callbacks), **arguments)


def at(event: str, look: Callable[[Any], object], graph: Line, **arguments: Any) -> None:
    """Train one step, and look at the tensors of an event."""
    decorate = getattr(nemo, event)
    train([graph.loss], decorate(lambda state: look(state["tensors"])), steps=1, **arguments)


# -- 6: the loss --------------------------------------------------------------------------------------


def test_06_the_loss_is_the_undivided_loss_of_the_last_batch() -> None:
    graph, seen = line(2), dict[str, list[float]]()

    def note(event: str) -> Any:
        return getattr(nemo, event)(lambda state: seen.setdefault(event, []).append(state["tensors"].get_tensor("loss").item()))

    train([graph.loss], note("on_batch_end"), note("on_step_end"), steps=1, batches_per_step=2)
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

    train([graph.loss, other], look, steps=1)
    [(loss, both, first)] = seen
    assert loss == both
    assert loss != first
    assert loss.grad_fn is not None


@pytest.mark.parametrize("event", ["on_batch_start", "on_epoch_end", "on_action_end"])
def test_06_at_other_events_there_is_no_loss(event: str) -> None:
    def look(tensors: Any) -> None:
        assert tensors.get_tensor("loss", compute=False) is None
        with pytest.raises(KeyError, match="'loss' is available only from the end of a batch to the end of its step"):
            tensors.get_tensor("loss")

    at(event, look, line())


def test_06_a_tensor_requested_before_its_batch_is_read_is_an_error() -> None:
    graph = line()

    def look(tensors: Any) -> None:
        with pytest.raises(ValueError, match="the current batch has not been read yet"):
            tensors.get_tensor(graph.prediction)

    at("on_batch_start", look, graph)


# -- 7: names -----------------------------------------------------------------------------------------


def test_07_the_nmtensor_its_unique_name_and_its_new_name_return_the_same_tensor() -> None:
    graph = line()
    graph.prediction.rename("guess")

    def look(tensors: Any) -> None:
        found = tensors.get_tensor(graph.prediction)
        assert found is tensors.get_tensor(graph.prediction.unique_name) is tensors.get_tensor("guess")
        assert isinstance(found, Tensor)
        for unknown in ("y_pred", "x", "gues"):
            with pytest.raises(KeyError, match=rf"there is no tensor '{unknown}'.* The known names are \['loss', 'guess'\]"):
                tensors.get_tensor(unknown)

    at("on_step_end", look, graph)


def test_07_a_second_rename_removes_the_old_name() -> None:
    graph = line()
    graph.prediction.rename("first")
    graph.prediction.rename("second")
    assert (graph.prediction.name, str(graph.prediction)) == ("second", "second")

    def look(tensors: Any) -> None:
        tensors.get_tensor("second")
        with pytest.raises(KeyError):
            tensors.get_tensor("first")

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


def test_unique_names_have_port_module_and_a_constant_id() -> None:
    graph = line()
    unique = graph.prediction.unique_name
    port, module, number = unique.split("~~~")
    assert (port, module, len(number)) == ("y_pred", graph.net.name, 36)
    graph.prediction.rename("guess")
    assert graph.prediction.unique_name == unique


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

    train([graph.loss], look, steps=3)
    assert len(computed) == 1
    assert cached == [False, True, False]


def test_08_reading_a_tensor_does_not_change_the_training() -> None:
    def trained(look: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        noisy = TrainableNM.of(inner, ["x"], ["out"])
        graph = line(net=LineWithNoise(inner))
        again: NmTensor = noisy(x=graph.x)  # the trained module, used once more

        @nemo.on_step_end
        def ask(state: State) -> None:
            assert state["tensors"].get_tensor(again).requires_grad

        train([graph.loss], *([ask] if look else []), steps=5)
        return list(graph.net.state_dict().values())

    assert all(map(torch.equal, trained(look=True), trained(look=False)))


def test_08_reading_a_tensor_restores_the_rng_states() -> None:
    def trained(look: bool) -> list[Tensor]:
        graph = line(net=LineWithNoise(nn.Sequential(nn.Linear(1, 8), nn.Dropout(), nn.Linear(8, 1))))
        for weight in graph.net.parameters():
            nn.init.constant_(weight, 0.1)
        noise: NmTensor = NonTrainableNM.of(torch.rand_like, ["like"], ["noise"])(like=graph.x)
        asks = [nemo.on_step_end(lambda state: state["tensors"].get_tensor(noise))] if look else []
        factory = NeuralModuleFactory(random_seed=1)
        factory.train([graph.loss], optimization_params={**SGD, "max_steps": 5}, callbacks=asks)
        return graph.weights

    assert all(map(torch.equal, trained(look=True), trained(look=False)))


class LineWithNoise(NetNM):
    """A module around one that is also used elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        result: Tensor = self.inner(x)
        return result


def test_a_value_can_be_set_and_all_values_deleted_until_the_next_batch() -> None:
    graph = line()

    def look(tensors: Any) -> None:
        tensors.set_tensor(graph.prediction, 7)
        assert tensors.get_tensor(graph.prediction) == 7
        tensors.clear_dict()
        assert not tensors.check_tensor_cached(graph.prediction.unique_name)
        assert graph.prediction.unique_name in tensors.tensor_list()

    at("on_step_end", look, graph)


def test_one_tensor_may_be_the_input_of_two_ports() -> None:
    graph = line()  # NeMo raises a KeyError
    zero: NmTensor = NonTrainableNM.of(torch.sub, ["a", "b"], ["zero"])(a=graph.prediction, b=graph.prediction)
    seen: list[Tensor] = []
    at("on_step_end", lambda tensors: seen.append(tensors.get_tensor(zero)), graph)
    assert seen[0].abs().sum() == 0


# -- 9: other graphs ----------------------------------------------------------------------------------


def test_09_a_tensor_of_another_data_layer_is_an_error() -> None:
    graph, other = line(), line()

    def look(tensors: Any) -> None:
        with pytest.raises(ValueError, match=r"belongs to another graph\. This training does not read the data layer"):
            tensors.get_tensor(other.prediction)

    at("on_step_end", look, graph)


def test_09_a_tensor_created_during_training_is_an_error() -> None:
    graph = line()

    def look(tensors: Any) -> None:
        late, _ = worst_of(graph)
        with pytest.raises(KeyError, match=r"was created after the training started\. Create it before"):
            tensors.get_tensor(late)

    at("on_step_end", look, graph)


def test_the_loss_of_a_skipped_batch_can_be_read() -> None:
    seen: list[float] = []
    look = nemo.on_batch_end(lambda state: seen.append(state["tensors"].get_tensor("loss").item()))
    train([line(loader=spoiled(2, 1)).loss], look)
    assert [value == value for value in seen] == [True, False]


# -- ports --------------------------------------------------------------------------------------------


def test_a_wrong_port_is_an_error_that_names_the_module() -> None:
    graph = line()
    with pytest.raises(NeuralPortNameMismatchError, match=r"line.* \(LineNM\) has no input port 'X'.*It has \['x'\]"):
        graph.net(X=graph.x)
    with pytest.raises(NeuralPortNameMismatchError, match=r"was called without \['target'\]"):
        MSELoss()(predictions=graph.prediction)
    with pytest.raises(NeuralPortNameMismatchError, match=r"accepts NmTensors by name only. Its ports are \['x'\]"):
        graph.net(graph.x)
    layer = DataLayerNM.of([], ["x"])
    for wrapped, name in (
        (layer, r"datalayernm\d+ \(DataLayerNM\)"),
        (LossNM.of(nn.functional.l1_loss, ["a", "b"]), r"l1_loss \(LossNM\)"),
        (NonTrainableNM.of(torch.relu, ["a"], ["b"]), r"relu \(NonTrainableNM\)"),
        (TrainableNM.of(nn.Linear(1, 1), ["a"], ["b"]), r"linear \(Linear\)"),
    ):
        with pytest.raises(NeuralPortNameMismatchError, match=f"^{name} has no input port 'wrong'"):
            wrapped(wrong=graph.x)
    assert layer().unique_name.startswith("x~~~datalayernm")


def test_axes_and_element_types_are_checked() -> None:
    x, y = RealFunctionDataLayer(n=8, batch_size=4)()
    net = TaylorNet(dim=2)
    with pytest.raises(NeuralPortNmTensorMismatchError, match=r"port 'x' of taylornet\d+ \(TaylorNet\) accepts .*ChannelType"):
        net(x=y)
    prediction = net(x=x)
    loss = MSELoss()(predictions=prediction, target=y)
    assert isinstance(loss.ntype.elements_type, LossType)
    assert not NeuralType(("B", "D")).accepts(NeuralType(("B",), ChannelType()))
    with pytest.raises(NeuralPortNmTensorMismatchError, match=r"port 'target' of .* needs an NmTensor; got a Tensor"):
        MSELoss()(predictions=prediction, target=torch.zeros(1))


class Regression(TaylorNet):
    """A module that says of its outputs that they are predictions."""

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"y_pred": NeuralType(("B", "D"), RegressionValuesType())}


class WeightedNM(LossNM):
    """A loss of predictions of any type, with optional weights."""

    @property
    def input_ports(self) -> dict[str, NeuralType]:
        return {
            "scores": NeuralType(("B", "D"), PredictionsType()),
            "target": NeuralType(("B", "D"), VoidType()),
            "weights": NeuralType(optional=True),
        }

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"loss": NeuralType(elements_type=LossType())}

    def _loss_function(self, scores: Tensor, target: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        return ((scores - target).abs() * weights).mean()


def test_special_types_fit_general_ones_void_accepts_all_and_optional_ports_may_be_omitted() -> None:
    x, y = RealFunctionDataLayer(n=8, batch_size=4)()
    prediction = Regression(dim=2)(x=x)
    loss = WeightedNM()(scores=prediction, target=y)
    assert loss.producer_args.keys() == WeightedNM()(scores=prediction, target=y, weights=None).producer_args.keys()
    train([loss], steps=1)
    train([WeightedNM()(scores=prediction, target=y, weights=y)], steps=1)
    with pytest.raises(
        NeuralPortNmTensorMismatchError, match=r"accepts .*PredictionsType; got 'x' of realfunctiondatalayer\d+"
    ):
        WeightedNM()(scores=x, target=y)
    general = NonTrainableNM.of(torch.neg, ["a"], ["b"])  # accepts any type
    WeightedNM()(scores=general(a=y), target=y)


def test_a_module_called_with_tensors_computes() -> None:
    x = torch.ones(2, 1)
    net = TaylorNet(dim=3)
    assert torch.equal(net(x=x), net(x))
    assert MSELoss()(predictions=x, target=x).item() == 0
    assert torch.equal(NonTrainableNM.of(torch.mul, ["a", "b"], ["c"])(a=net(x), b=x), net(x))


def test_a_batch_that_does_not_fit_the_ports_is_an_error() -> None:
    x, y = DataLayerNM.of([{"x": torch.ones(2, 1)}], ["x", "y"])()
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=TrainableNM.of(nn.Linear(1, 1), ["x"], ["y"])(x=x), b=y)
    with pytest.raises(ValueError, match=r"returned a batch without \['y'\]; it has \['x'\]"):
        train([loss])
    with pytest.raises(ValueError, match="must depend on one data layer, called once; got"):
        train([loss, line().loss])


def test_weights_are_frozen_by_name_or_all() -> None:
    net = TaylorNet(dim=3)
    assert net.num_weights == 4
    net.freeze(["fc1.bias"])
    assert net.num_weights == 3
    net.freeze()
    assert net.num_weights == 0
    net.unfreeze()
    assert net.num_weights == 4
    with pytest.raises(KeyError, match=r"TaylorNet has no weight 'fc1.bais'. Did you mean 'fc1.bias'\?"):
        net.freeze(["fc1.weight", "fc1.bais"])
    assert net.num_weights == 4


class Squares(DataLayerNM):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.shuffle = 4, False

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"x": NeuralType(("B", "D"), ChannelType()), "y": NeuralType(("B", "D"))}

    @property
    def dataset(self) -> TensorDataset:
        x = torch.arange(10.0).unsqueeze(1)
        return TensorDataset(x, x**2)


def test_a_data_layer_may_have_a_dataset() -> None:
    seen: list[Tensor] = []
    x, y = Squares()()
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=TrainableNM.of(nn.Linear(1, 1), ["x"], ["y"])(x=x), b=y)
    train([loss], nemo.on_step_end(lambda state: seen.append(state["tensors"].get_tensor(y))), steps=3)
    assert [one.flatten().tolist() for one in seen] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]

"""What the kinds of modules do beside their computation: gradients, loaders, inputs that have a default."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import NeuralModuleFactory, NeuralPortNameMismatchError
from cadenza.compat.nemo.core.neural_types import ChannelType, NeuralType
from cadenza.compat.neural.modules import loader_of
from tests.compat.nemo.graphs import SGD

# -- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "learns"), [("nemo", True), ("nemo10", False)])
def test_gradients_flow_through_a_module_without_weights_since_0_11(version: str, learns: bool) -> None:
    nm: Any = importlib.import_module(f"cadenza.compat.{version}.backends.pytorch.nm")
    value = torch.ones(2, 1, requires_grad=True)

    class Doubled(nm.NonTrainableNM):  # type: ignore[misc]  # the class depends on the version
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert Doubled()(x=value).requires_grad is learns
    assert nm.NonTrainableNM.of(torch.neg, ["x"], ["y"])(x=value).requires_grad is learns
    assert isinstance(Doubled(), NonTrainableNM)


def test_a_training_reaches_the_weights_before_a_module_without_weights() -> None:
    x, y = RealFunctionDataLayer(batch_size=4, n=8, x_lo=-1, x_hi=1)()
    net = TaylorNet(dim=2)
    halved = NonTrainableNM.of(lambda value: value / 2, ["value"], ["half"])(value=net(x=x))
    before = net.fc1.weight.detach().clone()
    NeuralModuleFactory().train([MSELoss()(predictions=halved, target=y)], "sgd", {**SGD, "max_steps": 1})
    assert not torch.equal(before, net.fc1.weight)


# -- data layers --------------------------------------------------------------------------------------


class Numbers(DataLayerNM):
    """The numbers 0 to 9."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.__dict__.update(settings)

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"x": NeuralType(("B", "D"), ChannelType())}

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.arange(10.0))


def test_a_data_layer_has_nemo_s_defaults_and_settings() -> None:
    plain = Numbers()
    assert (plain.batch_size, plain.shuffle, plain.pin_memory) == (1, False, False)
    loader = loader_of(Numbers(_batch_size=5, _num_workers=2, _pin_memory=True))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.pin_memory) == (5, 2, True)
    assert [x.tolist() for (x,) in loader_of(Numbers(_batch_size=5))] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    torch.manual_seed(0)
    (shuffled,) = next(iter(loader_of(Numbers(_batch_size=10, _shuffle=True))))
    assert shuffled.tolist() != list(range(10))
    assert sorted(shuffled.tolist()) == list(range(10))


def test_a_data_layer_may_join_its_samples_itself() -> None:
    class Summed(Numbers):
        def collate_fn(self, samples: list[tuple[Tensor]]) -> Tensor:
            return torch.stack([x for (x,) in samples]).sum()

    assert [batch.item() for batch in loader_of(Summed(_batch_size=5))] == [10, 35]


def test_a_data_layer_prefers_its_dataset_as_nemo_does() -> None:
    class Both(Numbers):
        @property
        def data_iterator(self) -> Any:
            raise AssertionError("it must not be read")

    assert len(list(loader_of(Both(_batch_size=5)))) == 2


def test_a_dataset_may_be_a_stream() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.arange(4.0).unsqueeze(1))

    class Streamed(Numbers):
        @property
        def dataset(self) -> Any:
            return Stream()

    assert [batch.flatten().tolist() for batch in loader_of(Streamed(_batch_size=2))] == [[0, 1], [2, 3]]


# -- inputs -------------------------------------------------------------------------------------------


class Scaled(TrainableNM):
    """A module whose port is not declared as optional, but has a default, as some of NeMo's have."""

    @property
    def input_ports(self) -> dict[str, NeuralType]:
        return {port: NeuralType(("B", "D"), ChannelType()) for port in ("x", "factor")}

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"y": NeuralType(("B", "D"), ChannelType())}

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return 3 * x if factor is None else factor * x


def test_an_input_with_a_default_may_be_left_out() -> None:
    x, _ = RealFunctionDataLayer(batch_size=4, n=8)()
    assert str(Scaled()(x=x)) == "y"
    with pytest.raises(NeuralPortNameMismatchError, match=r"was called without \['x'\]"):
        Scaled()(factor=x)

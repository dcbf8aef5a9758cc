"""NeMo's hello world: its modules, their values, and a short training by an independent loop with NeMo's formulas."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from cadenza.compat.nemo.backends.pytorch.tutorials import CrossEntropyLoss, L1Loss, MSELoss, RealFunctionDataLayer, TaylorNet

VERSIONS = ["nemo", "nemo10"]


def test_taylor_net_is_a_weighted_sum_of_the_powers_from_0_on() -> None:
    net = TaylorNet(dim=4)
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == {"fc1.weight": (1, 4), "fc1.bias": (1,)}
    net.load_state_dict({"fc1.weight": torch.tensor([[2.0, 3.0, 5.0, 7.0]]), "fc1.bias": torch.tensor([11.0])})
    x = torch.tensor([[0.0], [1.0], [-2.0]])
    assert net(x=x).flatten().tolist() == [13, 2 + 3 + 5 + 7 + 11, 2 - 6 + 20 - 56 + 11]


def test_taylor_net_starts_with_nemo_s_weights() -> None:
    torch.manual_seed(4)
    net = TaylorNet(dim=4)
    torch.manual_seed(4)
    plain = torch.nn.Linear(4, 1)
    torch.nn.init.xavier_uniform_(plain.weight)
    assert torch.equal(net.fc1.weight, plain.weight)
    assert torch.equal(net.fc1.bias, plain.bias)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_the_data_layer_draws_with_numpy_and_keeps_the_order(name: str) -> None:
    np.random.seed(6)
    layer = RealFunctionDataLayer(4, name, 10, -1, 3)
    drawn = np.random.RandomState(6).uniform(-1, 3, 10)
    batches = list(layer.loader())
    expected = np.stack([drawn, getattr(np, name)(drawn)], 1).astype(np.float32)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    np.testing.assert_allclose(torch.cat([torch.cat(batch, 1) for batch in batches]), expected, rtol=1e-7, atol=1e-8)
    assert [part.dtype for part in layer.dataset.tensors] == [torch.float32] * 2
    assert (len(layer), layer.batch_size, layer.shuffle) == (10, 4, False)


def test_the_data_layer_has_nemo_s_defaults() -> None:
    np.random.seed(0)
    layer = RealFunctionDataLayer(batch_size=128)
    x, y = layer.dataset.tensors
    assert len(layer) == 1000
    assert -4 <= x.min() < -3.9
    assert 3.9 < x.max() < 4
    torch.testing.assert_close(y, torch.sin(x))
    with pytest.raises(ValueError, match=r"f_name must be one of \['sin', 'cos'"):
        RealFunctionDataLayer(128, "tan")


def test_the_losses_of_the_tutorial() -> None:
    predictions, target = torch.tensor([[1.0], [4.0]]), torch.tensor([[0.0], [1.0]])
    assert MSELoss()(predictions=predictions, target=target).item() == 5
    assert L1Loss()(predictions=predictions, target=target).item() == 2
    scores, labels = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    assert CrossEntropyLoss()(predictions=scores, labels=labels).item() == pytest.approx(np.log(2))
    assert list(MSELoss().input_ports) == ["predictions", "target"]
    assert list(CrossEntropyLoss().input_ports) == ["predictions", "labels"]


def test_the_optional_input_of_nemo_0_10() -> None:
    tutorials: Any = importlib.import_module("cadenza.compat.nemo10.backends.pytorch.tutorials")
    layer, net = tutorials.RealFunctionDataLayer(batch_size=2, n=4), tutorials.TaylorNetO(dim=3)
    x, _ = layer()
    assert [str(net(x=x)), str(net(x=x, o=x))] == ["y_pred", "y_pred"]
    value = torch.tensor([[2.0]])
    assert torch.equal(net(x=value, o=value), tutorials.TaylorNet.forward(net, value))

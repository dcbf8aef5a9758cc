"""NeMo's hello world: its modules, their values, and a short training by an independent loop with NeMo's formulas."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, on
from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM
from cadenza.compat.nemo.backends.pytorch.tutorials import CrossEntropyLoss, L1Loss, MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.neural.modules import loader_of

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
    batches = list(loader_of(layer))
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


# -- a short training, computed once more by a loop of plain tensors with NeMo's formulas ---------------------------

RATE, BATCHES = 0.01, 5  # batches per epoch, of 4 pairs


def loss_and_gradients(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the mean squared error of the polynomial, and its derivatives by the weights and the bias."""
    powers = torch.cat([x**power for power in range(weight.shape[1])], dim=1)
    error = powers @ weight.T + bias - y
    return (error**2).mean(), [2 * (error * powers).mean(0, keepdim=True), 2 * error.mean(0)]


class PlainSgd:
    """SGD with NeMo's default momentum of 0.9: ``v = 0.9 * v + g; w = w - lr * v``."""

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum, self.velocities = momentum, [torch.zeros(()), torch.zeros(())]

    def update(self, weights: list[Tensor], gradients: list[Tensor], rate: float) -> list[Tensor]:
        self.velocities = [self.momentum * v + g for v, g in zip(self.velocities, gradients, strict=True)]
        return [w - rate * v for w, v in zip(weights, self.velocities, strict=True)]


class PlainAdam:
    """Adam (Kingma and Ba 2015) with betas 0.9 and 0.999 and eps 1e-8."""

    def __init__(self) -> None:
        self.step, self.first, self.second = 0, [torch.zeros(())] * 2, [torch.zeros(())] * 2

    def update(self, weights: list[Tensor], gradients: list[Tensor], rate: float) -> list[Tensor]:
        self.step += 1
        self.first = [0.9 * m + 0.1 * g for m, g in zip(self.first, gradients, strict=True)]
        self.second = [0.999 * v + 0.001 * g**2 for v, g in zip(self.second, gradients, strict=True)]
        moments = zip(weights, self.first, self.second, strict=True)
        corrections = 1 - 0.9**self.step, 1 - 0.999**self.step
        return [w - rate * (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-8) for w, m, v in moments]


def by_hand(optimizer: Any, epochs: int, per_step: int = 1, policy: Any = None, clip: float | None = None) -> tuple[Any, Any]:
    """Return the losses of the batches, and the final weights and bias."""
    np.random.seed(1)
    x = np.random.uniform(-1, 1, 4 * BATCHES)
    pairs = [torch.tensor(values).float().view(BATCHES, 4, 1) for values in (x, np.sin(x))]
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 1)
    torch.nn.init.xavier_uniform_(layer.weight)
    weights = [layer.weight.detach().double(), layer.bias.detach().double()]
    losses, summed, step = [], [torch.zeros(()), torch.zeros(())], 0
    for batch in range(epochs * BATCHES):
        loss, gradients = loss_and_gradients(*weights, *(part[batch % BATCHES].double() for part in pairs))
        losses.append(loss.item())
        summed = [total + one / per_step for total, one in zip(summed, gradients, strict=True)]
        if batch % per_step == per_step - 1:
            length = math.sqrt(sum((one**2).sum() for one in summed))
            if clip is not None and length > clip:
                summed = [one * clip / (length + 1e-6) for one in summed]
            weights = optimizer.update(weights, summed, RATE if policy is None else policy(step))
            summed, step = [torch.zeros(()), torch.zeros(())], step + 1
    return losses, weights


def cosine(step: int) -> float:
    """Return the rate of ``CosineAnnealing(10, min_lr=0.001, warmup_steps=2)``."""
    if step < 2:
        return RATE * (step + 1) / 3
    return (RATE - 0.001) * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8)) + 0.001


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sgd", {}, {"optimizer": PlainSgd(), "epochs": 2}),
    ("sgd", {"momentum": 0.5, "batches_per_step": 5}, {"optimizer": PlainSgd(0.5), "epochs": 2, "per_step": 5}),
    ("sgd", {"grad_norm_clip": 0.2}, {"optimizer": PlainSgd(), "epochs": 2, "clip": 0.2}),
    ("sgd", {"policy": True}, {"optimizer": PlainSgd(), "epochs": 2, "policy": cosine}),
    ("adam", {}, {"optimizer": PlainAdam(), "epochs": 2}),
]


def trained(version: str, optimizer: str, given: dict[str, Any], epochs: int) -> tuple[list[float], Any]:
    """Return the losses of the batches, and the trained module."""
    nemo: Any = importlib.import_module(f"cadenza.compat.{version}")
    losses: list[float] = []
    np.random.seed(1)
    torch.manual_seed(1)
    factory = nemo.core.NeuralModuleFactory(placement=nemo.core.DeviceType.CPU)
    x, y = nemo.tutorials.RealFunctionDataLayer(batch_size=4, n=4 * BATCHES, x_lo=-1, x_hi=1)()
    net = nemo.tutorials.TaylorNet(dim=4)
    loss = nemo.tutorials.MSELoss()(predictions=net(x=x), target=y)
    keep = on(Callback.on_after_backward)(lambda run, outputs: losses.append(outputs["loss"].item()))
    params = {"lr": RATE, "num_epochs": epochs, **given}
    per_step, policy = params.pop("batches_per_step", None), params.pop("policy", None)
    annealing = nemo.utils.lr_policies.CosineAnnealing(10, min_lr=0.001, warmup_steps=2) if policy else None
    factory.train([loss], optimizer, params, [keep], lr_policy=annealing, batches_per_step=per_step)
    return losses, net


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("optimizer", "given", "plain"), CASES, ids=lambda value: str(value)[:40])
def test_losses_and_weights_are_those_of_nemo_s_formulas(
    version: str, optimizer: str, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    losses, net = trained(version, optimizer, given, plain["epochs"])
    expected, weights = by_hand(**copy.deepcopy(plain))
    assert losses == pytest.approx(expected, rel=2e-6)
    torch.testing.assert_close(net.fc1.weight.double(), weights[0], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(net.fc1.bias.double(), weights[1], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("per_step", [1, 5])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_training_is_bit_identical_to_a_plain_loop(version: str, kind: str, per_step: int) -> None:
    np.random.seed(1)
    x = torch.tensor(np.random.uniform(-1, 1, 4 * BATCHES)).unsqueeze(-1)
    pairs = list(zip(x.float().split(4), torch.sin(x).float().split(4), strict=True))
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    nn.init.xavier_uniform_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), RATE, 0.9) if kind == "sgd" else torch.optim.Adam(net.parameters(), RATE)
    for batch in range(4 * BATCHES):
        x, y = pairs[batch % BATCHES]
        loss = nn.functional.mse_loss(net(torch.cat([x**0, x, x**2, x**3], -1)), y)
        loss.backward(torch.tensor(1 / per_step))
        if batch % per_step == per_step - 1:
            optimizer.step()
            optimizer.zero_grad()
    losses, own = trained(version, kind, {"batches_per_step": per_step}, epochs=4)
    assert losses[-1] == loss.item()
    assert torch.equal(own.fc1.weight, net.weight)
    assert torch.equal(own.fc1.bias, net.bias)


class DroppingNet(TaylorNet):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("version", VERSIONS)
def test_dropout_draws_the_numbers_of_a_plain_loop_with_the_same_seed(version: str) -> None:
    nemo: Any = importlib.import_module(f"cadenza.compat.{version}")
    losses, expected = list[float](), list[float]()
    factory = nemo.core.NeuralModuleFactory(placement=nemo.core.DeviceType.CPU, random_seed=7)
    x, y = nemo.tutorials.RealFunctionDataLayer(batch_size=4, n=4 * BATCHES, x_lo=-1, x_hi=1)()
    net = DroppingNet(dim=4)
    loss = nemo.tutorials.MSELoss()(predictions=net(x=x), target=y)
    keep = on(Callback.on_after_backward)(lambda run, outputs: losses.append(outputs["loss"].item()))
    factory.train([loss], "sgd", {"lr": RATE, "num_epochs": 3}, [keep])

    np.random.seed(7)
    torch.manual_seed(7)
    numbers = torch.tensor(np.random.uniform(-1, 1, 4 * BATCHES)).unsqueeze(-1)
    loader = DataLoader(TensorDataset(numbers.float(), torch.sin(numbers).float()), batch_size=4)
    plain = nn.Linear(4, 1)
    nn.init.xavier_uniform_(plain.weight)
    optimizer = torch.optim.SGD(plain.parameters(), RATE, 0.9)
    for _ in range(3):
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            values = nn.functional.dropout(plain(torch.cat([batch_x**power for power in range(4)], -1)), 0.5)
            error = nn.functional.mse_loss(values, batch_y)
            error.backward()
            optimizer.step()
            expected.append(error.item())
    assert losses == expected


class Batches(DataLayerNM):
    """Batches of a list, which is not a DataLoader."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self.loader, self.execute, self.defaults, self.type = batches, 1, 2, "mine"  # a subclass may use these names

    @property
    def output_ports(self) -> dict[str, None]:
        return {"x": None, "y": None}

    @property
    def data_iterator(self) -> Iterable[Any]:
        return self.loader


@pytest.mark.parametrize("version", VERSIONS)
def test_an_iterable_that_is_no_dataloader_draws_no_numbers(version: str) -> None:
    nemo: Any = importlib.import_module(f"cadenza.compat.{version}")
    losses, expected = list[float](), list[float]()
    factory = nemo.core.NeuralModuleFactory(placement=nemo.core.DeviceType.CPU, random_seed=7)
    net = DroppingNet(dim=4)
    numbers = torch.linspace(-1, 1, 4 * BATCHES).view(BATCHES, 4, 1)
    x, y = Batches(list(zip(numbers, torch.sin(numbers), strict=True)))()
    loss = nemo.tutorials.MSELoss()(predictions=net(x=x), target=y)
    keep = on(Callback.on_after_backward)(lambda run, outputs: losses.append(outputs["loss"].item()))
    factory.train([loss], "sgd", {"lr": 0.0, "num_epochs": 2}, [keep])

    torch.manual_seed(7)
    plain = DroppingNet(dim=4)
    for batch_x in numbers.repeat(2, 1, 1):
        expected.append(nn.functional.mse_loss(plain(x=batch_x), torch.sin(batch_x)).item())
    assert losses == expected


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("version", "epoch_key"), [("nemo", "epoch"), ("nemo10", "epoch_num")])
def test_a_checkpoint_of_nemo_predicts_the_same(version: str, epoch_key: str, legacy: bool, tmp_path: Path) -> None:
    weights = {"fc1.weight": torch.tensor([[0.25, -1.5, 0.75, 2.0]]), "fc1.bias": torch.tensor([-0.5])}
    states = [torch.optim.SGD(list(weights.values()), lr=RATE, momentum=0.9).state_dict()]
    for name, content in (("TaylorNet", weights), ("trainer", {"step": 4, epoch_key: 0, "optimizer_state": states})):
        torch.save(content, tmp_path / f"{name}-STEP-4.pt", _use_new_zipfile_serialization=not legacy)

    nemo: Any = importlib.import_module(f"cadenza.compat.{version}")
    layer, net = nemo.tutorials.RealFunctionDataLayer(batch_size=4, n=4 * BATCHES), nemo.tutorials.TaylorNet(dim=4)
    x, y = layer()
    loss = nemo.tutorials.MSELoss()(predictions=net(x=x), target=y)
    predicted: list[Tensor] = []
    numbers = torch.tensor([[0.5], [-2.0]])
    look = on(Callback.on_epoch_start)(lambda run: predicted.append(net(numbers).detach()))
    factory = nemo.core.NeuralModuleFactory(placement=nemo.core.DeviceType.CPU)
    restore = nemo.core.callbacks.CheckpointCallback(str(tmp_path), force_load=True)
    run = factory.train([loss], "sgd", {"lr": RATE, "max_steps": 6}, [restore, look])
    expected = [0.25 - 1.5 * v + 0.75 * v**2 + 2.0 * v**3 - 0.5 for v in (0.5, -2.0)]
    assert predicted[0].flatten().tolist() == expected
    assert run.progress.step == 6

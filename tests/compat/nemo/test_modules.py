"""The modules that NeMo brings, what each kind of module does, and hello world's trainings beside plain loops of torch."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Callback, on
from cadenza.compat.nemo.backends.pytorch import common, tutorials
from cadenza.compat.nemo.backends.pytorch.common import neuralType2TensorShape
from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import NeuralPortNameMismatchError
from cadenza.compat.nemo.core.neural_types import AxisKind, AxisType, ChannelType, LabelsType, LogitsType, NeuralType
from cadenza.compat.nemo10.backends.pytorch import tutorials as tutorials10
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.policies import CosineAnnealing
from tests.compat.nemo.graphs import OF_TRAIN, ports, train

# -- kinds of modules ---------------------------------------------------------------------------------


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
    train([tutorials.MSELoss()(predictions=halved, target=y)], max_steps=1)
    assert not torch.equal(before, net.fc1.weight)


class Numbers(DataLayerNM):
    """The numbers 0 to 9."""

    output_ports = ports(x=NeuralType(("B", "D"), ChannelType()))

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.__dict__.update(settings)

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.arange(10.0))


def test_a_data_layer_has_nemo_s_defaults_and_settings() -> None:
    plain = Numbers()
    assert (plain.batch_size, plain.shuffle, plain.pin_memory) == (1, False, False)
    loader = loader_of(Numbers(_batch_size=5, _num_workers=2, _pin_memory=True))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.pin_memory) == (5, 2, True)
    torch.manual_seed(0)
    (shuffled,) = next(iter(loader_of(Numbers(_batch_size=10, _shuffle=True))))
    assert shuffled.tolist() != list(range(10))
    assert sorted(shuffled.tolist()) == list(range(10))
    plain.batch_size, plain.shuffle = 4, False
    assert [x.tolist() for (x,) in loader_of(plain)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_data_layer_joins_its_samples_itself_prefers_its_dataset_and_may_have_a_stream() -> None:
    class Summed(Numbers):
        def collate_fn(self, samples: list[tuple[Tensor]]) -> Tensor:
            return torch.stack([x for (x,) in samples]).sum()

        @property
        def data_iterator(self) -> Any:
            raise AssertionError("it must not be read")

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.arange(4.0).unsqueeze(1))

    class Streamed(Numbers):
        @property
        def dataset(self) -> Any:
            return Stream()

    assert [batch.item() for batch in loader_of(Summed(_batch_size=5))] == [10, 35]
    assert [batch.flatten().tolist() for batch in loader_of(Streamed(_batch_size=2))] == [[0, 1], [2, 3]]


class Scaled(TrainableNM):
    """A module whose port is not declared as optional, but has a default, as some of NeMo's have."""

    input_ports = ports(x=NeuralType(("B", "D"), ChannelType()), factor=NeuralType(("B", "D"), ChannelType()))
    output_ports = ports(y=NeuralType(("B", "D"), ChannelType()))

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return 3 * x if factor is None else factor * x


def test_an_input_with_a_default_may_be_left_out() -> None:
    x, _ = RealFunctionDataLayer(batch_size=4, n=8)()
    assert str(Scaled()(x=x)) == "y"
    with pytest.raises(NeuralPortNameMismatchError, match=r"was called without \['x'\]"):
        Scaled()(factor=x)


# -- the tutorial -------------------------------------------------------------------------------------


def test_taylor_net_starts_with_nemo_s_weights_and_is_a_sum_of_the_powers_from_0_on() -> None:
    torch.manual_seed(4)
    net = TaylorNet(dim=4)
    torch.manual_seed(4)
    plain = nn.Linear(4, 1)
    nn.init.xavier_uniform_(plain.weight)
    assert torch.equal(net.fc1.weight, plain.weight)
    assert torch.equal(net.fc1.bias, plain.bias)
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == {"fc1.weight": (1, 4), "fc1.bias": (1,)}
    net.load_state_dict({"fc1.weight": torch.tensor([[2.0, 3.0, 5.0, 7.0]]), "fc1.bias": torch.tensor([11.0])})
    x = torch.tensor([[0.0], [1.0], [-2.0]])
    assert net(x=x).flatten().tolist() == [13, 2 + 3 + 5 + 7 + 11, 2 - 6 + 20 - 56 + 11]


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
    assert tutorials.MSELoss()(predictions=predictions, target=target).item() == 5
    assert tutorials.L1Loss()(predictions=predictions, target=target).item() == 2
    scores, labels = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    assert tutorials.CrossEntropyLoss()(predictions=scores, labels=labels).item() == pytest.approx(np.log(2))
    assert list(tutorials.MSELoss().input_ports) == ["predictions", "target"]
    assert list(tutorials.CrossEntropyLoss().input_ports) == ["predictions", "labels"]


def test_the_optional_input_of_nemo_0_10() -> None:
    layer, net = tutorials10.RealFunctionDataLayer(batch_size=2, n=4), tutorials10.TaylorNetO(dim=3)
    x, _ = layer()
    assert [str(net(x=x)), str(net(x=x, o=x))] == ["y_pred", "y_pred"]
    value = torch.tensor([[2.0]])
    assert torch.equal(net(x=value, o=value), tutorials10.TaylorNet.forward(net, value))


# -- losses of nemo.backends.pytorch.common -----------------------------------------------------------


def test_the_cross_entropy_is_the_mean_of_the_selected_elements_or_without_any_that_of_the_largest_logits() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 4), torch.randint(4, (2, 3))
    each = -logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    loss = common.CrossEntropyLossNM(logits_ndim=3)
    assert loss(logits=logits, labels=labels).item() == pytest.approx(each.mean().item())
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    selected = each[mask.bool()]
    for given in (mask, mask.bool(), mask.float()):
        assert loss(logits=logits, labels=labels, loss_mask=given).item() == pytest.approx(selected.mean().item())
    summed = common.CrossEntropyLossNM(3, reduction="sum")(logits=logits, labels=labels)
    assert summed.item() == pytest.approx(each.sum().item())
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weighted = common.CrossEntropyLossNM(3, weight=weights.tolist())(logits=logits, labels=labels)
    assert weighted.item() == pytest.approx(((each * weights[labels]).sum() / weights[labels].sum()).item())

    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    loss = common.CrossEntropyLossNM()(logits=logits, labels=torch.tensor([0, 1]), loss_mask=torch.zeros(2))
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert list(common.CrossEntropyLossNM(3).input_ports) == ["logits", "labels", "loss_mask"]
    assert str(common.CrossEntropyLossNM(3).input_ports["logits"]) == "axes: (batch, any, any); elements_type: LogitsType"


def test_losses_are_added_with_weights_and_the_mean_squared_error_has_its_own_ports() -> None:
    losses = {"loss_1": torch.tensor(2.0), "loss_2": torch.tensor(3.0), "loss_3": torch.tensor(5.0)}
    assert common.LossAggregatorNM(3)(**losses).item() == 10
    assert common.LossAggregatorNM(3, weights=[1, 0.5, 2])(**dict(reversed(losses.items()))).item() == 13.5
    with pytest.raises(ValueError, match=r"one number for each of the 2 losses; got \[1.0\]"):
        common.LossAggregatorNM(weights=[1.0])

    given = {"preds": torch.tensor([1.0, 4.0]), "labels": torch.tensor([0.0, 1.0])}
    assert common.MSELoss()(**given).item() == 5
    assert common.MSELoss(reduction="sum")(**given).item() == 10
    assert {name: str(type) for name, type in common.MSELoss().input_ports.items()} == {
        "preds": "axes: (batch,); elements_type: RegressionValuesType",
        "labels": "axes: (batch,); elements_type: LabelsType",
    }


def test_the_loss_of_a_sequence_leaves_out_padding() -> None:
    log_probs = torch.log(torch.tensor([[[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]]]))
    targets = torch.tensor([[1, 2, 0]])
    right = -2 * math.log(0.6)
    mean = -(log_probs[0, :2].mean(-1).sum().item())
    given = {"log_probs": log_probs, "targets": targets}
    assert common.SequenceLoss()(**given).item() == pytest.approx(right / (2 + 1e-5))
    assert common.SequenceLoss(sample_wise=True)(**given).item() == pytest.approx(right)
    smooth = common.SequenceLoss(smoothing_coef=0.25, sample_wise=True)(**given)
    assert smooth.item() == pytest.approx(0.75 * right + 0.25 * mean)


def test_the_loss_of_a_sequence_with_ctc() -> None:
    torch.manual_seed(0)
    given = {"log_probs": torch.randn(2, 5, 4).log_softmax(-1), "targets": torch.tensor([[1, 2, 1, 0, 0], [2, 1, 2, 1, 1]])}
    lengths = torch.tensor([3, 5])
    ctc = nn.CTCLoss(blank=3, reduction="none", zero_infinity=True)
    extra = ctc(given["log_probs"].transpose(0, 1), given["targets"], lengths, lengths).mean()
    loss = common.SequenceLoss(aux_ctc=True, ctc_initial_coef=0.5, ctc_blank_id=3)(**given)
    assert loss.item() == pytest.approx((common.SequenceLoss()(**given) + 0.5 * extra).item())
    with pytest.raises(ValueError, match="aux_ctc=True needs ctc_blank_id"):
        common.SequenceLoss(aux_ctc=True)


# -- layers -------------------------------------------------------------------------------------------


def test_an_embedding_has_nemo_s_weights_and_zeros_are_integers_of_the_same_shape() -> None:
    module = common.SequenceEmbedding(voc_size=5, hidden_size=3, dropout=0.5)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {"embedding.weight": (5, 3)}
    indices = torch.tensor([[0, 4], [2, 2]])
    module.eval()
    assert torch.equal(module(input_seq=indices), module.embedding.weight[indices])
    module.train()
    assert (module(input_seq=torch.zeros(50, 2, dtype=torch.int64)) == 0).any()
    zeros = common.ZerosLikeNM()(input_type_ids=torch.ones(2, 3))
    assert zeros.dtype is torch.int64
    assert zeros.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_an_attention_is_the_mean_of_the_context_by_its_weights() -> None:
    torch.manual_seed(0)
    query, context = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    for method, names in (("dot", ["linear_out.weight"]), ("general", ["linear_in.weight", "linear_out.weight"])):
        module = common.Attention(4, method)
        assert list(module.state_dict()) == names
        output, weights = module(query, context)
        asked = query @ module.linear_in.weight.T if method == "general" else query
        torch.testing.assert_close(weights, torch.einsum("bqd,btd->bqt", asked, context).softmax(-1))
        mixed = torch.einsum("bqt,btd->bqd", weights, context)
        torch.testing.assert_close(output, torch.tanh(torch.cat((mixed, asked), 2) @ module.linear_out.weight.T))
    with pytest.raises(ValueError, match="method must be 'general' or 'dot'; got 'sum'"):
        common.Attention(4, "sum")


def test_a_classifier_has_nemo_s_layers() -> None:
    module = common.MultiLayerPerceptron(3, 2, "cpu", num_layers=3, activation="tanh")
    assert [name for name in module.state_dict() if name.endswith("weight")] == [f"layer{i}.weight" for i in (0, 2, 4)]
    assert module.last_linear_layer is module.get_submodule("layer4")
    x = torch.randn(4, 5, 3)
    layers = [module.get_submodule(f"layer{index}") for index in (0, 2, 4)]
    scores = layers[2](layers[1](layers[0](x).tanh()).tanh())
    torch.testing.assert_close(module(x), scores.log_softmax(-1))
    plain = common.MultiLayerPerceptron(3, 2, "cpu", num_layers=1, log_softmax=False)
    torch.testing.assert_close(plain(x), plain.last_linear_layer(x))


# -- data layers --------------------------------------------------------------------------------------


def test_zeros_have_the_shapes_and_types_of_the_ports() -> None:
    sized = NeuralType((AxisType(AxisKind.Batch), AxisType(AxisKind.Time), AxisType(AxisKind.Dimension, 7)), ChannelType())
    layer = common.ZerosDataLayer(3, {"a": sized, "b": NeuralType(("B",))}, [torch.FloatTensor, torch.LongTensor], 2)
    batches = list(loader_of(layer))
    assert [(len(a), len(b)) for a, b in batches] == [(2, 2), (1, 1)]
    assert batches[0][0].shape == (2, 32, 7)
    assert [part.dtype for part in batches[0]] == [torch.float32, torch.int64]
    assert neuralType2TensorShape(sized, default_dim=5, skip_batch_axis=False) == (5, 5, 7)
    with pytest.raises(ValueError, match="a shape needs a type with axes"):
        neuralType2TensorShape(NeuralType())
    given = common.ZerosDataLayer(1, {"a": NeuralType()}, None, 1, shapes=[(2, 3)])
    assert next(iter(loader_of(given)))[0].shape == (1, 2, 3)


class Letters(DataLayerNM):
    def __init__(self, letters: str, *ports: str) -> None:
        super().__init__()
        self._ports, self._letters = ports or ("letter",), [(letter,) for letter in letters]

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {port: NeuralType(("B",)) for port in self._ports}

    @property
    def dataset(self) -> Any:
        return self._letters


def test_several_data_layers_are_combined() -> None:
    product = common.MultiDataLayer([Letters("ab"), Letters("xyz", "other")], batch_size=1)
    assert ["".join(product.dataset[index]) for index in range(len(product))] == ["ax", "bx", "ay", "by", "az", "bz"]
    zipped = common.MultiDataLayer([Letters("ab"), Letters("xy")], 2, combination_mode=common.DataCombination.ZIP)
    assert [list(batch) for batch in loader_of(zipped)] == [[("a", "b"), ("x", "y")]]
    assert list(zipped.output_ports) == ["letter", "letter_1"]
    assert list(common.MultiDataLayer([Letters("a"), Letters("b")], 1, port_names=["1", "2"]).output_ports) == ["1", "2"]
    same = common.MultiDataLayer([Letters("p", "a", "b"), Letters("q", "a", "c")], 4)
    assert list(same.output_ports) == ["a", "b", "a_1", "c"]
    with pytest.raises(ValueError, match=r"needs data sets of equal lengths; got \[2, 1\]"):
        common.MultiDataLayer([Letters("ab"), Letters("x")], 1, combination_mode=common.DataCombination.ZIP)
    with pytest.raises(ValueError, match="combination_mode must be a DataCombination; got 'cross'"):
        common.MultiDataLayer([Letters("a")], 1, combination_mode="cross")  # type: ignore[arg-type]


class Scores(TrainableNM):
    input_ports = ports(features=NeuralType(("B", "T", "C"), ChannelType()))
    output_ports = ports(scores=NeuralType(("B", "T", "C"), LogitsType()))

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.inner(features)
        return scores


@pytest.mark.parametrize("version", ["nemo", "nemo10"])
def test_a_training_with_these_modules(version: str) -> None:
    package: Any = importlib.import_module(f"cadenza.compat.{version}.backends.pytorch.common")
    types = {"tokens": NeuralType(("B", "T")), "labels": NeuralType(("B", "T"), LabelsType())}
    data = package.ZerosDataLayer(8, types, torch.LongTensor, 4, shapes=[(3,), (3,)])
    tokens, labels = data()
    features = package.SequenceEmbedding(voc_size=4, hidden_size=6)(input_seq=tokens)
    scores = Scores(package.MultiLayerPerceptron(6, 2, "cpu", log_softmax=False))(features=features)
    loss = package.CrossEntropyLossNM(logits_ndim=3)(logits=scores, labels=labels)
    total = package.LossAggregatorNM(num_inputs=2)(loss_1=loss, loss_2=LossNM.of(lambda a: 0 * a, ["a"])(a=loss))
    run = train([total], num_epochs=3)
    assert run.progress.step == 6
    assert run.loss is not None
    assert run.loss < 0.6


# -- the trainings of the hello world, in both versions -------------------------------------------------


RATE, BATCHES = 0.01, 5  # batches per epoch, of 4 pairs
VERSIONS = pytest.mark.parametrize("version", ["nemo", "nemo10"])


def graph_of(version: str, layer: DataLayerNM, net: TaylorNet) -> Any:
    """Return the loss of a network on a data layer."""
    tutorials: Any = importlib.import_module(f"cadenza.compat.{version}").tutorials
    x, y = layer()
    return tutorials.MSELoss()(predictions=net(x=x), target=y)


def losses_of(factory: Any, loss: Any, optimizer: str = "sgd", *, epochs: int, **given: Any) -> list[float]:
    """Train with NeMo's defaults; return the losses of the batches."""
    losses: list[float] = []
    keep = on(Callback.on_after_backward)(lambda run, outputs: losses.append(outputs["loss"].item()))
    arguments = {name: given.pop(name) for name in OF_TRAIN & given.keys()}
    factory.train([loss], optimizer, {"lr": RATE, "num_epochs": epochs, **given}, [keep], **arguments)
    return losses


def factory_of(version: str, **arguments: Any) -> Any:
    core: Any = importlib.import_module(f"cadenza.compat.{version}.core")
    return core.NeuralModuleFactory(placement=core.DeviceType.CPU, **arguments)


def by_hand(
    optimizer: str,
    epochs: int,
    *,
    seed: int = 1,
    momentum: float = 0.9,
    per_step: int = 1,
    policy: Any = None,
    clip: float = math.inf,
    dropout: float = 0.0,
) -> tuple[list[float], nn.Linear]:
    """Return the losses of the batches of a plain loop, and its layer, which computes what `TaylorNet` computes."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    numbers = torch.tensor(np.random.uniform(-1, 1, 4 * BATCHES)).unsqueeze(-1)
    loader = DataLoader(TensorDataset(numbers.float(), torch.sin(numbers).float()), batch_size=4)
    net, losses, step = nn.Linear(4, 1), list[float](), 0
    nn.init.xavier_uniform_(net.weight)
    sgd = torch.optim.SGD(net.parameters(), RATE, momentum)
    updates = sgd if optimizer == "sgd" else torch.optim.Adam(net.parameters(), RATE)
    for at, (x, y) in (pair for _ in range(epochs) for pair in enumerate(loader)):
        predicted = net(torch.cat([x**power for power in range(4)], -1))
        loss = nn.functional.mse_loss(nn.functional.dropout(predicted, dropout), y)
        window = min(per_step, BATCHES - at // per_step * per_step)  # the last window of an epoch may be short
        loss.backward(torch.tensor(1 / window))
        losses.append(loss.item())
        if at % per_step == window - 1:
            if clip < math.inf:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            updates.param_groups[0]["lr"] = RATE if policy is None else policy(step)
            updates.step()
            updates.zero_grad()
            step += 1
    return losses, net


def cosine(step: int) -> float:
    """Return the rate of ``CosineAnnealing(10, min_lr=0.001, warmup_steps=2)``."""
    if step < 2:
        return RATE * (step + 1) / 3
    return (RATE - 0.001) * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8)) + 0.001


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("sgd", {}, {}),
    "sgd, accumulated": ("sgd", {"momentum": 0.5, "batches_per_step": 5}, {"momentum": 0.5, "per_step": 5}),
    "sgd, clipped": ("sgd", {"grad_norm_clip": 0.2}, {"clip": 0.2}),
    "sgd, policy": ("sgd", {"lr_policy": CosineAnnealing(10, min_lr=0.001, warmup_steps=2)}, {"policy": cosine}),
    "adam": ("adam", {}, {}),
    "adam, accumulated": ("adam", {"batches_per_step": 5}, {"per_step": 5}),
    "adam, short window": ("adam", {"batches_per_step": 2, "grad_norm_clip": 0.2}, {"per_step": 2, "clip": 0.2}),
}


@VERSIONS
@pytest.mark.parametrize("case", CASES)
def test_a_training_is_bit_identical_to_a_plain_loop(version: str, case: str) -> None:
    optimizer, given, plain = CASES[case]
    expected, layer = by_hand(optimizer, epochs=2, **plain)
    np.random.seed(1)
    torch.manual_seed(1)
    data = RealFunctionDataLayer(batch_size=4, n=4 * BATCHES, x_lo=-1, x_hi=1)
    net = TaylorNet(dim=4)
    assert losses_of(factory_of(version), graph_of(version, data, net), optimizer, epochs=2, **given) == expected
    assert torch.equal(net.fc1.weight, layer.weight)
    assert torch.equal(net.fc1.bias, layer.bias)


class DroppingNet(TaylorNet):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@VERSIONS
def test_dropout_draws_the_numbers_of_a_plain_loop_with_the_same_seed(version: str) -> None:
    factory = factory_of(version, random_seed=7)
    loss = graph_of(version, RealFunctionDataLayer(batch_size=4, n=4 * BATCHES, x_lo=-1, x_hi=1), DroppingNet(dim=4))
    losses = losses_of(factory, loss, epochs=3)
    assert losses == by_hand("sgd", epochs=3, seed=7, dropout=0.5)[0]


@VERSIONS
def test_an_iterable_that_is_no_dataloader_draws_no_numbers(version: str) -> None:
    factory, net = factory_of(version, random_seed=7), DroppingNet(dim=4)
    numbers = torch.linspace(-1, 1, 4 * BATCHES).view(BATCHES, 4, 1)
    data = DataLayerNM.of(list(zip(numbers, torch.sin(numbers), strict=True)), ["x", "y"])
    losses = losses_of(factory, graph_of(version, data, net), epochs=2, lr=0.0)
    torch.manual_seed(7)
    plain = DroppingNet(dim=4)
    batches = numbers.repeat(2, 1, 1)
    assert losses == [nn.functional.mse_loss(plain(x=x), torch.sin(x)).item() for x in batches]

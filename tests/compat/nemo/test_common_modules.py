"""The small modules of ``nemo.backends.pytorch.common``: losses, layers and data layers, with NeMo's values."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.common import (
    Attention,
    CrossEntropyLossNM,
    DataCombination,
    LossAggregatorNM,
    MSELoss,
    MultiDataLayer,
    MultiLayerPerceptron,
    SequenceEmbedding,
    SequenceLoss,
    ZerosDataLayer,
    ZerosLikeNM,
)
from cadenza.compat.nemo.backends.pytorch.common.zero_data import neuralType2TensorShape
from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, TrainableNM
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core.neural_types import AxisKind, AxisType, ChannelType, LabelsType, LogitsType, NeuralType
from cadenza.compat.neural.modules import loader_of
from tests.compat.nemo.graphs import SGD

# -- losses -------------------------------------------------------------------------------------------


def test_the_cross_entropy_of_sequences_is_the_mean_of_the_selected_elements() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 4), torch.randint(4, (2, 3))
    each = -logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    loss = CrossEntropyLossNM(logits_ndim=3)
    assert loss(logits=logits, labels=labels).item() == pytest.approx(each.mean().item())
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    selected = each[mask.bool()]
    for given in (mask, mask.bool(), mask.float()):
        assert loss(logits=logits, labels=labels, loss_mask=given).item() == pytest.approx(selected.mean().item())
    summed = CrossEntropyLossNM(3, reduction="sum")(logits=logits, labels=labels)
    assert summed.item() == pytest.approx(each.sum().item())
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weighted = CrossEntropyLossNM(3, weight=weights.tolist())(logits=logits, labels=labels)
    assert weighted.item() == pytest.approx(((each * weights[labels]).sum() / weights[labels].sum()).item())


def test_a_mask_that_selects_nothing_takes_the_largest_logits_as_labels() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    loss = CrossEntropyLossNM()(logits=logits, labels=torch.tensor([0, 1]), loss_mask=torch.zeros(2))
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert list(CrossEntropyLossNM(3).input_ports) == ["logits", "labels", "loss_mask"]
    assert str(CrossEntropyLossNM(3).input_ports["logits"]) == "axes: (batch, any, any); elements_type: LogitsType"


def test_the_common_mean_squared_error_has_its_own_ports() -> None:
    given = {"preds": torch.tensor([1.0, 4.0]), "labels": torch.tensor([0.0, 1.0])}
    assert MSELoss()(**given).item() == 5
    assert MSELoss(reduction="sum")(**given).item() == 10
    assert {name: str(type) for name, type in MSELoss().input_ports.items()} == {
        "preds": "axes: (batch,); elements_type: RegressionValuesType",
        "labels": "axes: (batch,); elements_type: LabelsType",
    }


def test_losses_are_added_with_weights() -> None:
    losses = {"loss_1": torch.tensor(2.0), "loss_2": torch.tensor(3.0), "loss_3": torch.tensor(5.0)}
    assert LossAggregatorNM(3)(**losses).item() == 10
    assert LossAggregatorNM(3, weights=[1, 0.5, 2])(**dict(reversed(losses.items()))).item() == 13.5
    with pytest.raises(ValueError, match=r"one number for each of the 2 losses; got \[1.0\]"):
        LossAggregatorNM(weights=[1.0])


def test_the_loss_of_a_sequence_leaves_out_padding() -> None:
    log_probs = torch.log(torch.tensor([[[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]]]))
    targets = torch.tensor([[1, 2, 0]])
    right = -2 * math.log(0.6)
    mean = -(log_probs[0, :2].mean(-1).sum().item())
    given = {"log_probs": log_probs, "targets": targets}
    assert SequenceLoss()(**given).item() == pytest.approx(right / (2 + 1e-5))
    assert SequenceLoss(sample_wise=True)(**given).item() == pytest.approx(right)
    assert SequenceLoss(smoothing_coef=0.25, sample_wise=True)(**given).item() == pytest.approx(0.75 * right + 0.25 * mean)


def test_the_loss_of_a_sequence_with_ctc() -> None:
    torch.manual_seed(0)
    given = {"log_probs": torch.randn(2, 5, 4).log_softmax(-1), "targets": torch.tensor([[1, 2, 1, 0, 0], [2, 1, 2, 1, 1]])}
    lengths = torch.tensor([3, 5])
    ctc = nn.CTCLoss(blank=3, reduction="none", zero_infinity=True)
    extra = ctc(given["log_probs"].transpose(0, 1), given["targets"], lengths, lengths).mean()
    loss = SequenceLoss(aux_ctc=True, ctc_initial_coef=0.5, ctc_blank_id=3)(**given)
    assert loss.item() == pytest.approx((SequenceLoss()(**given) + 0.5 * extra).item())
    with pytest.raises(ValueError, match="aux_ctc=True needs ctc_blank_id"):
        SequenceLoss(aux_ctc=True)


# -- layers -------------------------------------------------------------------------------------------


def test_an_embedding_has_nemo_s_weights() -> None:
    module = SequenceEmbedding(voc_size=5, hidden_size=3, dropout=0.5)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {"embedding.weight": (5, 3)}
    indices = torch.tensor([[0, 4], [2, 2]])
    module.eval()
    assert torch.equal(module(input_seq=indices), module.embedding.weight[indices])
    module.train()
    assert (module(input_seq=torch.zeros(50, 2, dtype=torch.int64)) == 0).any()


def test_zeros_are_integers_of_the_same_shape() -> None:
    zeros = ZerosLikeNM()(input_type_ids=torch.ones(2, 3))
    assert zeros.dtype is torch.int64
    assert zeros.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_an_attention_is_the_mean_of_the_context_by_its_weights() -> None:
    torch.manual_seed(0)
    query, context = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    for method, names in (("dot", ["linear_out.weight"]), ("general", ["linear_in.weight", "linear_out.weight"])):
        module = Attention(4, method)
        assert list(module.state_dict()) == names
        output, weights = module(query, context)
        asked = query @ module.linear_in.weight.T if method == "general" else query
        torch.testing.assert_close(weights, torch.einsum("bqd,btd->bqt", asked, context).softmax(-1))
        mixed = torch.einsum("bqt,btd->bqd", weights, context)
        torch.testing.assert_close(output, torch.tanh(torch.cat((mixed, asked), 2) @ module.linear_out.weight.T))
    with pytest.raises(ValueError, match="method must be 'general' or 'dot'; got 'sum'"):
        Attention(4, "sum")


def test_a_classifier_has_nemo_s_layers() -> None:
    module = MultiLayerPerceptron(3, 2, "cpu", num_layers=3, activation="tanh")
    assert [name for name in module.state_dict() if name.endswith("weight")] == [f"layer{i}.weight" for i in (0, 2, 4)]
    assert module.last_linear_layer is module.get_submodule("layer4")
    x = torch.randn(4, 5, 3)
    layers = [module.get_submodule(f"layer{index}") for index in (0, 2, 4)]
    scores = layers[2](layers[1](layers[0](x).tanh()).tanh())
    torch.testing.assert_close(module(x), scores.log_softmax(-1))
    plain = MultiLayerPerceptron(3, 2, "cpu", num_layers=1, log_softmax=False)
    torch.testing.assert_close(plain(x), plain.last_linear_layer(x))


# -- data layers --------------------------------------------------------------------------------------


def zeros_of(size: int, *ports: str, dtype: Any = torch.FloatTensor) -> ZerosDataLayer:
    types = {port: NeuralType(("B", "T"), ChannelType()) for port in ports}
    return ZerosDataLayer(size=size, output_ports=types, dtype=dtype, batch_size=2)


def test_zeros_have_the_shapes_and_types_of_the_ports() -> None:
    sized = NeuralType((AxisType(AxisKind.Batch), AxisType(AxisKind.Time), AxisType(AxisKind.Dimension, 7)), ChannelType())
    layer = ZerosDataLayer(3, {"a": sized, "b": NeuralType(("B",))}, [torch.FloatTensor, torch.LongTensor], 2)
    batches = list(loader_of(layer))
    assert [(len(a), len(b)) for a, b in batches] == [(2, 2), (1, 1)]
    assert batches[0][0].shape == (2, 32, 7)
    assert [part.dtype for part in batches[0]] == [torch.float32, torch.int64]
    assert neuralType2TensorShape(sized, default_dim=5, skip_batch_axis=False) == (5, 5, 7)
    with pytest.raises(ValueError, match="a shape needs a type with axes"):
        neuralType2TensorShape(NeuralType())
    given = ZerosDataLayer(1, {"a": NeuralType()}, None, 1, shapes=[(2, 3)])
    assert next(iter(loader_of(given)))[0].shape == (1, 2, 3)


class Letters(DataLayerNM):
    def __init__(self, letters: str, port: str = "letter") -> None:
        super().__init__()
        self._port, self._letters = port, [(letter,) for letter in letters]

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {self._port: NeuralType(("B",))}

    @property
    def dataset(self) -> Any:
        return self._letters


def test_several_data_layers_are_combined() -> None:
    product = MultiDataLayer([Letters("ab"), Letters("xyz", "other")], batch_size=1)
    assert ["".join(product.dataset[index]) for index in range(len(product))] == ["ax", "bx", "ay", "by", "az", "bz"]
    zipped = MultiDataLayer([Letters("ab"), Letters("xy")], 2, combination_mode=DataCombination.ZIP)
    assert [list(batch) for batch in loader_of(zipped)] == [[("a", "b"), ("x", "y")]]
    assert list(zipped.output_ports) == ["letter", "letter_1"]
    assert list(MultiDataLayer([Letters("a"), Letters("b")], 1, port_names=["1", "2"]).output_ports) == ["1", "2"]
    assert list(MultiDataLayer([zeros_of(4, "a", "b"), zeros_of(4, "a", "c")], 4).output_ports) == ["a", "b", "a_1", "c"]
    with pytest.raises(ValueError, match=r"needs data sets of equal lengths; got \[2, 1\]"):
        MultiDataLayer([Letters("ab"), Letters("x")], 1, combination_mode=DataCombination.ZIP)
    with pytest.raises(ValueError, match="combination_mode must be a DataCombination; got 'cross'"):
        MultiDataLayer([Letters("a")], 1, combination_mode="cross")  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["nemo", "nemo10"])
def test_a_training_with_these_modules(version: str) -> None:
    common: Any = importlib.import_module(f"cadenza.compat.{version}.backends.pytorch.common")
    types = {"tokens": NeuralType(("B", "T")), "labels": NeuralType(("B", "T"), LabelsType())}
    data = common.ZerosDataLayer(8, types, torch.LongTensor, 4, shapes=[(3,), (3,)])
    tokens, labels = data()
    features = common.SequenceEmbedding(voc_size=4, hidden_size=6)(input_seq=tokens)
    scores = Scores(common.MultiLayerPerceptron(6, 2, "cpu", log_softmax=False))(features=features)
    loss = common.CrossEntropyLossNM(logits_ndim=3)(logits=scores, labels=labels)
    total = common.LossAggregatorNM(num_inputs=2)(loss_1=loss, loss_2=LossNM.of(lambda a: 0 * a, ["a"])(a=loss))
    run = NeuralModuleFactory().train([total], "sgd", {**SGD, "num_epochs": 3})
    assert run.progress.step == 6
    assert run.loss is not None
    assert run.loss < 0.6


class Scores(TrainableNM):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def input_ports(self) -> dict[str, NeuralType]:
        return {"features": NeuralType(("B", "T", "C"), ChannelType())}

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"scores": NeuralType(("B", "T", "C"), LogitsType())}

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.inner(features)
        return scores

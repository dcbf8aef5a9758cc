"""Neural types and ports: axes, elements, the results of comparisons, and what may be connected, as in NeMo."""

from __future__ import annotations

import importlib
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import NeuralPortNameMismatchError
from cadenza.compat.nemo.core.neural_types import (
    AcousticEncodedRepresentation,
    AudioSignal,
    AxisKind,
    AxisKindAbstract,
    AxisType,
    ChannelType,
    ElementType,
    LabelsType,
    LossType,
    MaskType,
    MelSpectrogramType,
    MFCCSpectrogramType,
    NeuralPortNmTensorMismatchError,
    NeuralType,
    NeuralTypeError,
    PredictionsType,
    RegressionValuesType,
    SpectrogramType,
    VoidType,
)
from cadenza.compat.nemo.core.neural_types import NeuralTypeComparisonResult as Result
from tests.compat.nemo.graphs import LineNM, line, train


class Box(ElementType):
    @property
    def fields(self) -> tuple[str, ...]:
        return ("x", "y", "width", "height")


class Corners(Box):
    fields = ("left", "top", "right", "bottom")


class Frames(AxisKindAbstract):
    Image = 0


def sized(*sizes: int | None, kind: AxisKind = AxisKind.Dimension) -> NeuralType:
    return NeuralType([AxisType(kind, size) for size in sizes], ChannelType())


def listed(*are_lists: bool) -> NeuralType:
    kinds = (AxisKind.Batch, AxisKind.Time, AxisKind.Dimension)
    axes = [AxisType(kind, is_list=is_list) for kind, is_list in zip(kinds, are_lists, strict=True)]
    return NeuralType(axes, ChannelType())


def sound(rate: int) -> NeuralType:
    return NeuralType(("B", "T"), AudioSignal(rate))


CHANNELS = NeuralType(("B", "T", "C"), ChannelType())
SPECTROGRAM = NeuralType(("B", "T", "C"), SpectrogramType())
LOSS = NeuralType(elements_type=LossType())
FRAMES = (AxisType(AxisKind.Batch, is_list=True), AxisType(Frames.Image, is_list=True))


@pytest.mark.parametrize(
    ("first", "second", "there", "back"),
    [
        (NeuralType(("B", "D"), MaskType()), NeuralType(("N", "c"), MaskType()), Result.SAME, Result.SAME),
        (NeuralType(("batch", " Time ")), NeuralType(("b", "t")), Result.SAME, Result.SAME),
        (CHANNELS, SPECTROGRAM, Result.GREATER, Result.LESS),
        (NeuralType(("B",), MelSpectrogramType()), NeuralType(("B",), MFCCSpectrogramType()), *[Result.INCOMPATIBLE] * 2),
        (NeuralType(("B",), ChannelType()), NeuralType(("B",), AcousticEncodedRepresentation()), Result.GREATER, Result.LESS),
        (NeuralType(("B",), LabelsType()), NeuralType(("B",), MaskType()), Result.GREATER, Result.LESS),
        (CHANNELS, NeuralType(("T", "B", "C"), ChannelType()), Result.TRANSPOSE_SAME, Result.TRANSPOSE_SAME),
        (CHANNELS, NeuralType(("T", "B", "C"), SpectrogramType()), Result.INCOMPATIBLE, Result.INCOMPATIBLE),
        (CHANNELS, NeuralType(("B", "T"), ChannelType()), Result.INCOMPATIBLE, Result.INCOMPATIBLE),
        (sized(None, 3), sized(8, 3), Result.SAME, Result.TRANSPOSE_SAME),
        (sized(4), sized(8), Result.DIM_INCOMPATIBLE, Result.DIM_INCOMPATIBLE),
        (sized(None), sized(8), Result.SAME, Result.DIM_INCOMPATIBLE),
        (listed(True, True, False), listed(False, False, False), Result.TRANSPOSE_SAME, Result.TRANSPOSE_SAME),
        (NeuralType(("B", "T", "C")), SPECTROGRAM, Result.SAME, Result.INCOMPATIBLE),
        (NeuralType(("B", "T")), SPECTROGRAM, Result.INCOMPATIBLE, Result.INCOMPATIBLE),
        (NeuralType(), SPECTROGRAM, Result.SAME, Result.INCOMPATIBLE),
        (NeuralType(), LOSS, Result.SAME, Result.INCOMPATIBLE),
        (LOSS, NeuralType(elements_type=LossType()), Result.SAME, Result.SAME),
        (LOSS, NeuralType(("B",), LossType()), Result.INCOMPATIBLE, Result.INCOMPATIBLE),
        (NeuralType(("B", "Any", "Any"), ChannelType()), SPECTROGRAM, Result.GREATER, Result.INCOMPATIBLE),
        (NeuralType(("T", "Any")), NeuralType(("B", "D")), Result.SAME, Result.INCOMPATIBLE),  # as NeMo compares
        (NeuralType(("Any", "T")), NeuralType(("B", "D")), Result.INCOMPATIBLE, Result.INCOMPATIBLE),
        (sound(8000), sound(16000), Result.SAME_TYPE_INCOMPATIBLE_PARAMS, Result.SAME_TYPE_INCOMPATIBLE_PARAMS),
        (sound(16000), sound(16000), Result.SAME, Result.SAME),
        (NeuralType(("B", "T"), AudioSignal()), sound(16000), Result.SAME, Result.SAME),
        (NeuralType(FRAMES, Box()), NeuralType(FRAMES, Box()), Result.SAME, Result.SAME),
        (NeuralType(FRAMES, Box()), NeuralType(FRAMES, Corners()), Result.GREATER, Result.LESS),
    ],
)
def test_a_comparison_has_nemo_s_result(first: NeuralType, second: NeuralType, there: Result, back: Result) -> None:
    assert (first.compare(second), second.compare(first)) == (there, back)


def test_a_port_accepts_what_is_the_same_or_a_special_case() -> None:
    types = [NeuralType(("B", "D"), one()) for one in (ChannelType, SpectrogramType, LabelsType, PredictionsType, VoidType)]
    for port, tensor in product(types, types):
        assert port.accepts(tensor) == (port.compare(tensor) in (Result.SAME, Result.GREATER))


def test_a_type_prints_its_axes_and_elements() -> None:
    assert str(NeuralType(("B", "C", "Any"), ChannelType())) == "axes: (batch, dimension, any); elements_type: ChannelType"
    assert str(LOSS) == "axes: None; elements_type: LossType"
    assert repr(AxisType(AxisKind.Width, 3)) == "width:3"
    assert repr(AxisType(AxisKind.Time, is_list=True)) == "time_listdim"
    assert repr(MaskType()) == "MaskType"
    assert NeuralType(("B",), MaskType(), optional=True).optional


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NeuralType(("B",), cast("Any", ChannelType)), r"must be an instance such as ChannelType\(\); got <class"),
        (lambda: NeuralType(("B", "Z")), r"there is no axis kind 'Z'. The names are b, n, batch"),
        (lambda: NeuralType(("B", cast("Any", 2))), r"an axis must be a name such as 'B', or an AxisType; got 2"),
        (lambda: NeuralType(("B", AxisType(AxisKind.Time))), r"use names or AxisTypes for all axes"),
        (lambda: listed(False, True, False), r"axes that are lists must stand before those of the tensor"),
        (lambda: AxisType(AxisKind.Batch, 3, is_list=True), r"an axis that is a list has no fixed size; got size=3"),
    ],
)
def test_a_wrong_type_is_an_error(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(("version", "elements"), [("nemo", 30), ("nemo10", 19)])
def test_each_version_has_its_own_types(version: str, elements: int) -> None:
    types: Any = importlib.import_module(f"cadenza.compat.{version}.core.neural_types")
    own = [one for name in types.__all__ if isinstance(one := getattr(types, name), type) and issubclass(one, ElementType)]
    assert len(own) == elements
    assert types.NmTensor is importlib.import_module(f"cadenza.compat.{version}.core").NmTensor


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


class Scale(TrainableNM):
    """A user's module, with the types of the hello world."""

    width: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(1, 1)

    @property
    def input_ports(self) -> dict[str, NeuralType]:
        return {"x": NeuralType((AxisType(AxisKind.Batch), AxisType(AxisKind.Dimension, self.width)), ChannelType())}

    @property
    def output_ports(self) -> dict[str, NeuralType]:
        return {"y_pred": NeuralType(("B", "D"), ChannelType())}

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.factor(x)
        return values


def test_axes_and_element_types_are_checked() -> None:
    x, y = RealFunctionDataLayer(batch_size=4, n=8)()
    net = TaylorNet(dim=2)
    for prediction in (Scale()(x=x), net(x=x), Scale()(x=net(x=x))):
        loss = MSELoss()(predictions=prediction, target=y)
        assert isinstance(loss.ntype.elements_type, LossType)
        assert loss.ntype.compare(LOSS) is Result.SAME
        with pytest.raises(NeuralPortNmTensorMismatchError, match=r"accepts .*ChannelType; got 'loss' of .*LossType") as caught:
            net(x=loss)
        assert isinstance(caught.value, NeuralTypeError)
        assert caught.value.message == str(caught.value)
    with pytest.raises(NeuralPortNmTensorMismatchError, match=r"port 'x' of taylornet\d+ \(TaylorNet\) accepts .*ChannelType"):
        net(x=y)
    with pytest.raises(NeuralPortNmTensorMismatchError, match=r"port 'target' of .* needs an NmTensor; got a Tensor"):
        MSELoss()(predictions=net(x=x), target=torch.zeros(1))


def test_the_error_has_the_result_of_the_comparison() -> None:
    class Narrow(Scale):
        width = 4

    class Wide(DataLayerNM):
        @property
        def output_ports(self) -> dict[str, NeuralType]:
            return {"x": NeuralType((AxisType(AxisKind.Batch), AxisType(AxisKind.Dimension, 8)), ChannelType())}

    with pytest.raises(NeuralPortNmTensorMismatchError, match=r"dimension:8.* comparison is DIM_INCOMPATIBLE"):
        Narrow()(x=Wide()())


def test_tensors_of_modules_without_types_fit_every_port() -> None:
    x, y = RealFunctionDataLayer(batch_size=4, n=8)()
    doubled = NonTrainableNM.of(lambda value: 2 * value, ["value"], ["twice"])(value=x)
    assert MSELoss()(predictions=TaylorNet(dim=2)(x=doubled), target=y).name == "loss"
    prediction = line().prediction
    assert LineNM()(x=prediction).ntype is prediction.ntype


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
    train([loss], max_steps=1)
    train([WeightedNM()(scores=prediction, target=y, weights=y)], max_steps=1)
    with pytest.raises(
        NeuralPortNmTensorMismatchError, match=r"accepts .*PredictionsType; got 'x' of realfunctiondatalayer\d+"
    ):
        WeightedNM()(scores=x, target=y)
    general = NonTrainableNM.of(torch.neg, ["a"], ["b"])  # accepts any type
    WeightedNM()(scores=general(a=y), target=y)


def test_a_batch_that_does_not_fit_the_ports_is_an_error() -> None:
    x, y = DataLayerNM.of([{"x": torch.ones(2, 1)}], ["x", "y"])()
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=TrainableNM.of(nn.Linear(1, 1), ["x"], ["y"])(x=x), b=y)
    with pytest.raises(ValueError, match=r"returned a batch without \['y'\]; it has \['x'\]"):
        train([loss], max_steps=1)
    with pytest.raises(ValueError, match="must depend on one data layer, called once; got"):
        train([loss, line().loss], max_steps=1)

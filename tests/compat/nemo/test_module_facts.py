"""What user code reads from modules and their calls (spec B6); neural types, and which ports may be connected, as in NeMo."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo import backends, core
from cadenza.compat.nemo.backends.pytorch import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import DeviceType, NeuralModuleFactory, NmTensor
from cadenza.compat.nemo.core import neural_types as types
from cadenza.compat.nemo.core.neural_types import AxisKind, AxisType, ChannelType, NeuralType
from cadenza.compat.neural.app_state import AppState
from tests.compat.nemo.graphs import LineNM, line, ports, train


class CustomNet(TaylorNet):
    """A module of NeMo 0.10 with an argument that is not a plain value."""

    def __init__(self, dim: int, kind: DeviceType) -> None:
        super().__init__(dim=dim)
        self.kind = kind

    def export_to_config(self, config_file: str) -> None:
        params = {**self._init_params, "kind": self.kind.name}
        Path(config_file).write_text(json.dumps({"header": self._create_config_header(), "init_params": params}))

    @classmethod
    def import_from_config(
        cls, config_file: str, section_name: Any = None, name: Any = None, overwrite_params: Any = None
    ) -> Any:
        params = {**cls._validate_config_file(config_file, section_name)["init_params"], **(overwrite_params or {})}
        return cls(params["dim"], DeviceType[params["kind"]])


class TestCalls:
    def test_several_outputs_are_a_named_tuple_in_the_order_of_the_ports_and_one_is_the_tensor(self) -> None:
        data = RealFunctionDataLayer(n=4, batch_size=2)()
        x, y = data
        assert type(data).__name__ == "RealFunctionDataLayerOutput"
        assert data._fields == ("x", "y")
        assert (data.x, data.y, data[0]) == (x, y, x)
        assert isinstance(TaylorNet(dim=2)(x=x), NmTensor)
        outputs = DataLayerNM.of([], ["audio-signal", "y"])()  # Python does not allow the first as a name: it has an index
        assert [tensor.name for tensor in outputs] == ["audio-signal", "y"]
        assert outputs.y is outputs[1]

    def test_a_tensor_knows_its_producer_and_its_consumers(self) -> None:
        source, net = RealFunctionDataLayer(n=4, batch_size=2, name="source"), TaylorNet(2, name="net")
        first, second = MSELoss(name="first"), MSELoss(name="second")
        x, y = source()
        prediction = net(x=x)
        losses = [loss(predictions=prediction, target=y) for loss in (first, second)]
        assert (prediction.producer, prediction.producer_name, prediction.producer_args) == (net, "net", {"x": x})
        assert (x.producer_args, y.output_port_name) == ({}, "y")
        assert [port[1:] for port in prediction.consumers] == [("first", "predictions"), ("second", "predictions")]
        assert x.producer_step_module_port[1:] == ("source", "x")
        steps = [tensor.producer_step_number for tensor in (x, prediction, *losses)]
        assert steps == list(range(steps[0], steps[0] + 4))
        (one,) = x.connections()
        assert one[:2] == (x.producer_step_module_port, x.consumers[0])
        assert one.ntype is x.ntype

    def test_a_tensor_is_of_the_type_of_its_port_and_may_go_into_two(self) -> None:
        x: NmTensor = RealFunctionDataLayer(n=4, batch_size=2)().x
        port = NeuralType(("B", "D"), ChannelType())
        assert issubclass(NmTensor, NeuralType)
        assert x.compare(port) is x.ntype.compare(port) is Result.SAME
        NonTrainableNM.of(torch.add, ["a", "b"], ["sum"], name="add")(a=x, b=x)
        assert [port.port_name for port in x.consumers] == ["a", "b"]

    def test_force_pt_computes_and_so_do_values_without_it(self) -> None:
        net, x = TaylorNet(dim=3), torch.ones(2, 1)
        assert torch.equal(net(force_pt=True, x=x), net(x=x))
        assert torch.equal(net(x=x), net(x))
        assert MSELoss()(force_pt=True, predictions=x, target=x) == MSELoss()(predictions=x, target=x) == 0
        assert NonTrainableNM.of(torch.neg, ["x"], ["y"])(force_pt=True, x=x).sum() == -2
        assert torch.equal(NonTrainableNM.of(torch.mul, ["a", "b"], ["c"])(a=net(x), b=x), net(x))

    def test_inputs_may_be_named_like_arguments_of_python(self) -> None:
        (mask,) = DataLayerNM.of([], ["x", "name"])()[1:]
        assert NonTrainableNM.of(torch.neg, ["name"], ["y"])(name=mask).producer_args == {"name": mask}


class TestWeights:
    def test_copied_weights_are_separate_and_may_be_renamed_and_transposed(self) -> None:
        first, second = TaylorNet(dim=3), TaylorNet(dim=3)
        second.set_weights(first.get_weights())
        assert torch.equal(first.fc1.weight, second.fc1.weight)
        nn.init.zeros_(first.fc1.weight)
        assert second.fc1.weight.any()
        assert [trainable for _, trainable in first.get_weights().values()] == [True, True]
        wide, narrow = TrainableNM.of(nn.Linear(3, 2), ["x"], ["y"]), TrainableNM.of(nn.Linear(2, 3), ["x"], ["y"])
        renames = {"module.weight": ("module.weight", core.WeightShareTransform.TRANSPOSE)}
        wide.set_weights(narrow.get_weights(), renames)
        assert torch.equal(wide.get_weights()["module.weight"][0], narrow.get_weights()["module.weight"][0].T)

    def test_tied_weights_are_one_parameter_that_both_modules_train(self) -> None:
        embedding, output = backends.pytorch.common.SequenceEmbedding(5, 4), TrainableNM.of(nn.Linear(4, 5), ["x"], ["y"])
        names = {"embedding.weight": ("module.weight", core.WeightShareTransform.SAME)}
        embedding.tie_weights_with(output, ["embedding.weight"], names)
        tokens, labels = DataLayerNM.of([(torch.arange(4).view(2, 2), torch.zeros(2, 2).long())], ["tokens", "labels"])()
        scores = output(x=embedding(input_seq=tokens))
        loss = LossNM.of(lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()), ["y", "t"])(y=scores, t=labels)
        before = embedding.embedding.weight.detach().clone()
        train([loss], optimizer="adam", max_steps=2)
        assert embedding.embedding.weight is output.get_weights()["module.weight"][0]
        assert not torch.equal(before, embedding.embedding.weight)

    def test_files_restore_a_module(self, tmp_path: Path) -> None:
        first, second, path = TaylorNet(dim=3), TaylorNet(dim=3), str(tmp_path / "net.pt")
        first.save_to(path)
        second.restore_from(path)
        assert all(map(torch.equal, first.parameters(), second.parameters()))
        second.set_weights(TaylorNet(dim=3).get_weights())
        backends.save(backends.get_state_dict(first), path)
        backends.set_state_dict(second, backends.load(path))
        assert all(map(torch.equal, first.parameters(), second.parameters()))
        torch.save({"fc1.weight": Path}, path)
        for read in (second.restore_from, backends.load):
            with pytest.raises(pickle.UnpicklingError):
                read(path)

    def test_weights_are_frozen_by_name_or_all(self) -> None:
        net = TaylorNet(dim=3)
        assert (net.num_weights, net.is_trainable(), net.is_frozen()) == (4, True, False)
        net.freeze(["fc1.bias"])
        assert net.num_weights == 3
        net.freeze()
        assert (net.num_weights, net.is_trainable(), net.is_frozen()) == (0, False, True)
        net.unfreeze({"fc1.bias"})
        assert (net.num_weights, net.is_frozen()) == (1, True)
        net.unfreeze()
        with pytest.raises(KeyError, match=r"TaylorNet has no weight 'fc1.bais'. Did you mean 'fc1.bias'\?"):
            net.freeze(["fc1.weight", "fc1.bais"])
        assert net.num_weights == 4

    def test_the_operation_mode_switches_between_training_and_evaluation_mode(self) -> None:
        net = TaylorNet(dim=3)
        assert (net.operation_mode, net.training) == (core.OperationMode.both, True)
        net.operation_mode = core.OperationMode.evaluation
        assert (net.operation_mode, net.training, net.fc1.training) == (core.OperationMode.evaluation, False, False)
        net.operation_mode = core.OperationMode.training
        assert net.training

    def test_user_modules_read_the_private_names_of_the_base_class(self) -> None:
        factory = NeuralModuleFactory(placement=DeviceType.CPU, optimization_level="O1")
        net, data = TrainableNM("bert-base", "mine"), DataLayerNM()
        assert (net._pretrained_model_name, net.name) == ("bert-base", "mine")
        assert (net._factory, net._opt_level, net._uuid) == (factory, core.Optimization.mxprO1, net.unique_instance_id)
        assert (data._factory, data._opt_level) == (factory, core.Optimization.mxprO1)

    def test_a_module_without_weights_has_the_same_methods(self, tmp_path: Path) -> None:
        loss = MSELoss()
        loss.freeze()
        loss.unfreeze()
        loss.save_to(str(tmp_path / "nothing.pt"))
        assert (loss.get_weights(), loss.num_weights, loss.is_trainable()) == (None, 0, False)
        assert not (tmp_path / "nothing.pt").exists()
        with pytest.raises(NotImplementedError, match="has no weights to restore"):
            loss.restore_from(str(tmp_path / "nothing.pt"))
        NonTrainableNM.of(torch.neg, ["x"], ["y"]).restore_from("no such file")  # in a loop over modules

    def test_wrong_names_and_shapes_are_errors(self) -> None:
        net, other = TaylorNet(dim=3), TaylorNet(dim=4)
        with pytest.raises(ValueError, match=r"'fc1.weight' of TaylorNet has shape \(1, 3\); got \(1, 4\)"):
            net.set_weights(other.get_weights())
        with pytest.raises(KeyError, match=r"has no weight 'fc1.wight'. Did you mean 'fc1.weight'\?"):
            net.tie_weights_with(other, ["fc1.wight"])
        with pytest.raises(ValueError, match="has shape"):
            net.tie_weights_with(other, ["fc1.weight"])
        with pytest.raises(ValueError, match="needs a module with weights and their names"):
            net.tie_weights_with(None, [])  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(NotImplementedError, match="cannot be tied to the transpose"):
            net.tie_weights_with(other, ["fc1.bias"], {"fc1.bias": ("fc1.bias", core.WeightShareTransform.TRANSPOSE)})


class TestPlacement:
    def test_modules_take_their_device_from_the_newest_factory_and_can_be_copied(self) -> None:
        factory = NeuralModuleFactory(placement=DeviceType.CPU)
        net = TaylorNet(dim=2)
        assert (net.placement, net._device, net.factory) == (DeviceType.CPU, torch.device("cpu"), factory)
        other = NeuralModuleFactory(set_default=False)
        assert NeuralModuleFactory.get_default_factory() is factory
        NeuralModuleFactory.set_default_factory(other)
        assert TaylorNet(dim=2).factory is other
        NeuralModuleFactory.reset_default_factory()
        assert TaylorNet(dim=2).factory is None

        for given in (None, DeviceType.AllGpu):  # user code makes a DistributedSampler for AllGpu
            assert NeuralModuleFactory(placement=given).placement in (DeviceType.GPU, DeviceType.CPU)

        NeuralModuleFactory()
        net = copy.deepcopy(TaylorNet(dim=2))
        assert net.init_params == {"dim": 2, "name": None}


class PairNM(TrainableNM):
    def __init__(self, a: Any, b: Any = 2, *, c: Any = 3) -> None:
        super().__init__()


class ChildNM(PairNM):
    def __init__(self, b: Any) -> None:
        super().__init__(1, b=b)


class TestConfigurations:
    def test_the_arguments_of_the_constructor_are_kept_with_default_values(self) -> None:
        assert PairNM(1).init_params == {"a": 1, "b": 2}
        assert ChildNM("x").init_params == {"b": "x"}
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
            PairNM()  # type: ignore[call-arg]  # the mistake under test

    @pytest.mark.parametrize("value", [123, 12.4, "text", True, None, [[1], ["a", {"b": 2.5}]], {"a": {"b": [None]}}])
    def test_a_file_creates_an_equal_module(self, value: Any, tmp_path: Path) -> None:
        path = str(tmp_path / "pair.yml")
        PairNM(value).export_to_config(path)
        for kind in (PairNM, core.NeuralModule):
            again = kind.import_from_config(path)
            assert type(again) is PairNM
            assert again.init_params == {"a": value, "b": 2}
        assert PairNM.import_from_config(path, overwrite_params={"b": 5}).init_params == {"a": value, "b": 5}

    def test_yaml_of_nemo_with_sections_is_read(self, tmp_path: Path) -> None:
        spec = "nemo.backends.pytorch.tutorials.toys.TaylorNet"
        text = f"net:\n  header: {{nemo_core_version: 0.11.0, full_spec: {spec}}}\n  init_params:\n    dim: 4\n"
        (tmp_path / "model.yml").write_text(text)
        net = core.NeuralModule.import_from_config(str(tmp_path / "model.yml"), "net", name="mine")
        assert isinstance(net, TaylorNet)
        assert (net.name, net.num_weights) == ("mine", 5)

    def test_a_module_of_0_10_writes_and_reads_arguments_of_its_own_kinds(self, tmp_path: Path) -> None:
        path = str(tmp_path / "net.yml")
        CustomNet(3, DeviceType.GPU).export_to_config(path)
        again = CustomNet.import_from_config(path, overwrite_params={"dim": 5})
        assert (again.kind, again.fc1.in_features) == (DeviceType.GPU, 5)
        with pytest.raises(ImportError, match="has no section 'net'"):
            CustomNet.import_from_config(path, "net")

    def test_what_is_not_a_configuration_of_the_class_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "pair.yml"
        with pytest.raises(ValueError, match=r"only numbers, strings.*PairNM has a=<object"):
            PairNM(object()).export_to_config(str(path))
        PairNM(1).export_to_config(str(path))
        with pytest.raises(ImportError, match="PairNM, which is not a TaylorNet"):
            TaylorNet.import_from_config(str(path))
        with pytest.raises(ImportError, match="has no section 'net'"):
            PairNM.import_from_config(str(path), "net")
        path.write_text(json.dumps({"header": {"full_spec": "os.system"}, "init_params": {"command": "false"}}))
        with pytest.raises(ImportError, match=r"os.system, which is not a NeuralModule"):
            core.NeuralModule.import_from_config(str(path))
        path.write_text("{}")
        with pytest.raises(ImportError, match="has no section 'header'"):
            PairNM.import_from_config(str(path))


def test_app_state_shows_the_modules_that_exist() -> None:
    net = TaylorNet(dim=2, name="a module of its own")
    modules = AppState().modules
    assert net in modules
    assert modules["a module of its own"] is net
    assert " * a module of its own (TaylorNet)" in modules.summary()
    assert AppState().device in DeviceType
    del net
    gc.collect()
    assert not AppState().modules.has("a module of its own")
    with pytest.raises(KeyError, match="there is no module 'a module of its own'"):
        AppState().modules["a module of its own"]
    with pytest.raises(AttributeError, match="there are no NeuralGraphs"):
        _ = AppState().active_graph
    with pytest.raises(AttributeError, match=r"Call tensor.rename\(name\)"):
        _ = AppState().tensor_names


def test_get_module_creates_modules_of_0_10() -> None:
    factory = nemo10.core.NeuralModuleFactory(nemo10.core.Backend.PyTorch)
    net = factory.get_module(name="TaylorNet", collection="toys", params={"dim": 3})
    assert isinstance(net, TaylorNet)
    with pytest.raises(ValueError, match="collection 'common' has no module 'Taylor'"):
        factory.get_module("Taylor", "common")
    with pytest.raises(ValueError, match="without pretrained weights; got 'BERT' of 'nemo_nlp'"):
        factory.get_module("BERT", "nemo_nlp", {}, pretrained=True)


# -- neural types ----------------------------------------------------------------------------------


Mismatch, Result = types.NeuralPortNmTensorMismatchError, types.NeuralTypeComparisonResult
INCOMPATIBLE = Result.INCOMPATIBLE


class Box(types.ElementType):
    @property
    def fields(self) -> tuple[str, ...]:
        return ("x", "y", "width", "height")


class Corners(Box):
    fields = ("left", "top", "right", "bottom")


class Frames(types.AxisKindAbstract):
    Image = 0


def sized(*sizes: int | None, kind: AxisKind = AxisKind.Dimension) -> NeuralType:
    return NeuralType([AxisType(kind, size) for size in sizes], ChannelType())


def listed(*are_lists: bool) -> NeuralType:
    kinds = (AxisKind.Batch, AxisKind.Time, AxisKind.Dimension)
    axes = [AxisType(kind, is_list=is_list) for kind, is_list in zip(kinds, are_lists, strict=True)]
    return NeuralType(axes, ChannelType())


def batch_of(elements: types.ElementType) -> NeuralType:
    return NeuralType(("B",), elements)


def sound(rate: int) -> NeuralType:
    return NeuralType(("B", "T"), types.AudioSignal(rate))


CHANNELS = NeuralType(("B", "T", "C"), ChannelType())
SPECTROGRAM = NeuralType(("B", "T", "C"), types.SpectrogramType())
LOSS = NeuralType(elements_type=types.LossType())
FRAMES = (AxisType(AxisKind.Batch, is_list=True), AxisType(Frames.Image, is_list=True))


@pytest.mark.parametrize(
    ("first", "second", "there", "back"),
    [
        (NeuralType(("B", "D"), types.MaskType()), NeuralType(("N", "c"), types.MaskType()), Result.SAME, Result.SAME),
        (NeuralType(("batch", " Time ")), NeuralType(("b", "t")), Result.SAME, Result.SAME),
        (CHANNELS, SPECTROGRAM, Result.GREATER, Result.LESS),
        (batch_of(types.MelSpectrogramType()), batch_of(types.MFCCSpectrogramType()), INCOMPATIBLE, INCOMPATIBLE),
        (batch_of(ChannelType()), batch_of(types.AcousticEncodedRepresentation()), Result.GREATER, Result.LESS),
        (batch_of(types.LabelsType()), batch_of(types.MaskType()), Result.GREATER, Result.LESS),
        (CHANNELS, NeuralType(("T", "B", "C"), ChannelType()), Result.TRANSPOSE_SAME, Result.TRANSPOSE_SAME),
        (CHANNELS, NeuralType(("T", "B", "C"), types.SpectrogramType()), INCOMPATIBLE, INCOMPATIBLE),
        (CHANNELS, NeuralType(("B", "T"), ChannelType()), INCOMPATIBLE, INCOMPATIBLE),
        (sized(None, 3), sized(8, 3), Result.SAME, Result.TRANSPOSE_SAME),
        (sized(4), sized(8), Result.DIM_INCOMPATIBLE, Result.DIM_INCOMPATIBLE),
        (sized(None), sized(8), Result.SAME, Result.DIM_INCOMPATIBLE),
        (listed(True, True, False), listed(False, False, False), Result.TRANSPOSE_SAME, Result.TRANSPOSE_SAME),
        (NeuralType(("B", "T", "C")), SPECTROGRAM, Result.SAME, INCOMPATIBLE),
        (NeuralType(("B", "T")), SPECTROGRAM, INCOMPATIBLE, INCOMPATIBLE),
        (NeuralType(), SPECTROGRAM, Result.SAME, INCOMPATIBLE),
        (NeuralType(), LOSS, Result.SAME, INCOMPATIBLE),
        (LOSS, NeuralType(elements_type=types.LossType()), Result.SAME, Result.SAME),
        (LOSS, NeuralType(("B",), types.LossType()), INCOMPATIBLE, INCOMPATIBLE),
        (NeuralType(("B", "Any", "Any"), ChannelType()), SPECTROGRAM, Result.GREATER, INCOMPATIBLE),
        (NeuralType(("T", "Any")), NeuralType(("B", "D")), Result.SAME, INCOMPATIBLE),  # as NeMo compares
        (NeuralType(("Any", "T")), NeuralType(("B", "D")), INCOMPATIBLE, INCOMPATIBLE),
        (sound(8000), sound(16000), Result.SAME_TYPE_INCOMPATIBLE_PARAMS, Result.SAME_TYPE_INCOMPATIBLE_PARAMS),
        (sound(16000), sound(16000), Result.SAME, Result.SAME),
        (NeuralType(("B", "T"), types.AudioSignal()), sound(16000), Result.SAME, Result.SAME),
        (NeuralType(FRAMES, Box()), NeuralType(FRAMES, Box()), Result.SAME, Result.SAME),
        (NeuralType(FRAMES, Box()), NeuralType(FRAMES, Corners()), Result.GREATER, Result.LESS),
    ],
)
def test_a_comparison_has_nemo_s_result(first: NeuralType, second: NeuralType, there: Any, back: Any) -> None:
    assert (first.compare(second), second.compare(first)) == (there, back)


def test_a_type_prints_its_axes_and_elements() -> None:
    assert str(NeuralType(("B", "C", "Any"), ChannelType())) == "axes: (batch, dimension, any); elements_type: ChannelType"
    assert str(LOSS) == "axes: None; elements_type: LossType"
    assert repr(AxisType(AxisKind.Width, 3)) == "width:3"
    assert repr(AxisType(AxisKind.Time, is_list=True)) == "time_listdim"
    assert repr(types.MaskType()) == "MaskType"
    assert NeuralType(("B",), types.MaskType(), optional=True).optional


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
    module: Any = importlib.import_module(f"cadenza.compat.{version}.core.neural_types")
    public = [getattr(module, name) for name in module.__all__]
    assert len([one for one in public if isinstance(one, type) and issubclass(one, types.ElementType)]) == elements
    assert module.NmTensor is importlib.import_module(f"cadenza.compat.{version}.core").NmTensor


# -- ports --------------------------------------------------------------------------------------------


def test_a_wrong_port_is_an_error_that_names_the_module() -> None:
    graph = line()
    with pytest.raises(core.NeuralPortNameMismatchError, match=r"line.* \(LineNM\) has no input port 'X'.*It has \['x'\]"):
        graph.net(X=graph.x)
    with pytest.raises(core.NeuralPortNameMismatchError, match=r"was called without \['target'\]"):
        MSELoss()(predictions=graph.prediction)
    with pytest.raises(core.NeuralPortNameMismatchError, match=r"accepts NmTensors by name only. Its ports are \['x'\]"):
        graph.net(graph.x)
    layer = DataLayerNM.of([], ["x"])
    for wrapped, name in (
        (layer, r"datalayernm\d+ \(DataLayerNM\)"),
        (LossNM.of(nn.functional.l1_loss, ["a", "b"]), r"l1_loss \(LossNM\)"),
        (NonTrainableNM.of(torch.relu, ["a"], ["b"]), r"relu \(NonTrainableNM\)"),
        (TrainableNM.of(nn.Linear(1, 1), ["a"], ["b"]), r"linear \(Linear\)"),
    ):
        with pytest.raises(core.NeuralPortNameMismatchError, match=f"^{name} has no input port 'wrong'"):
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
        assert isinstance(loss.ntype.elements_type, types.LossType)
        assert loss.ntype.compare(LOSS) is Result.SAME
        with pytest.raises(Mismatch, match=r"accepts .*ChannelType; got 'loss' of .*LossType") as caught:
            net(x=loss)
        assert isinstance(caught.value, types.NeuralTypeError)
        assert caught.value.message == str(caught.value)
    with pytest.raises(Mismatch, match=r"port 'x' of taylornet\d+ \(TaylorNet\) accepts .*ChannelType"):
        net(x=y)
    with pytest.raises(Mismatch, match=r"port 'target' of .* needs an NmTensor; got a Tensor"):
        MSELoss()(predictions=net(x=x), target=torch.zeros(1))


def test_the_error_has_the_result_of_the_comparison() -> None:
    class Narrow(Scale):
        width = 4

    class Wide(DataLayerNM):
        output_ports = ports(x=NeuralType((AxisType(AxisKind.Batch), AxisType(AxisKind.Dimension, 8)), ChannelType()))

    with pytest.raises(Mismatch, match=r"dimension:8.* comparison is DIM_INCOMPATIBLE"):
        Narrow()(x=Wide()())


def test_tensors_of_modules_without_types_fit_every_port() -> None:
    x, y = RealFunctionDataLayer(batch_size=4, n=8)()
    doubled = NonTrainableNM.of(lambda value: 2 * value, ["value"], ["twice"])(value=x)
    assert MSELoss()(predictions=TaylorNet(dim=2)(x=doubled), target=y).name == "loss"
    prediction = line().prediction
    assert LineNM()(x=prediction).ntype is prediction.ntype


class Regression(TaylorNet):
    """A module that says of its outputs that they are predictions."""

    output_ports = ports(y_pred=NeuralType(("B", "D"), types.RegressionValuesType()))


class WeightedNM(LossNM):
    """A loss of predictions of any type, with optional weights."""

    input_ports = ports(
        scores=NeuralType(("B", "D"), types.PredictionsType()),
        target=NeuralType(("B", "D"), types.VoidType()),
        weights=NeuralType(optional=True),
    )
    output_ports = ports(loss=LOSS)

    def _loss_function(self, scores: Tensor, target: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        return ((scores - target).abs() * weights).mean()


def test_special_types_fit_general_ones_void_accepts_all_and_optional_ports_may_be_omitted() -> None:
    x, y = RealFunctionDataLayer(n=8, batch_size=4)()
    prediction = Regression(dim=2)(x=x)
    loss = WeightedNM()(scores=prediction, target=y)
    assert loss.producer_args.keys() == WeightedNM()(scores=prediction, target=y, weights=None).producer_args.keys()
    train([loss], max_steps=1)
    train([WeightedNM()(scores=prediction, target=y, weights=y)], max_steps=1)
    with pytest.raises(Mismatch, match=r"accepts .*PredictionsType; got 'x' of realfunctiondatalayer\d+"):
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

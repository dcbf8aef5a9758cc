"""What user code reads from modules and their calls: outputs by name, weights, devices, configurations."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.backends.pytorch import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import (
    DeviceType,
    NeuralModule,
    NeuralModuleFactory,
    NmTensor,
    OperationMode,
    Optimization,
    WeightShareTransform,
)
from cadenza.compat.nemo.core.neural_types import ChannelType, NeuralType, NeuralTypeComparisonResult
from cadenza.compat.nemo.utils.app_state import AppState
from tests.compat.nemo.graphs import SGD, LineNM, line


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
    def test_several_outputs_are_a_named_tuple_in_the_order_of_the_ports(self) -> None:
        data = RealFunctionDataLayer(n=4, batch_size=2)()
        x, y = data
        assert type(data).__name__ == "RealFunctionDataLayerOutput"
        assert data._fields == ("x", "y")
        assert (data.x, data.y, data[0]) == (x, y, x)

    def test_a_single_output_is_the_tensor_and_names_that_python_does_not_allow_have_an_index(self) -> None:
        assert isinstance(TaylorNet(dim=2)(x=RealFunctionDataLayer(n=4, batch_size=2)().x), NmTensor)
        outputs = DataLayerNM.of([], ["audio-signal", "y"])()
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

    def test_a_tensor_that_goes_into_two_ports_has_two_consumers(self) -> None:
        x, _ = RealFunctionDataLayer(n=4, batch_size=2)()
        add = NonTrainableNM.of(torch.add, ["a", "b"], ["sum"], name="add")
        add(a=x, b=x)
        assert [port.port_name for port in x.consumers] == ["a", "b"]

    def test_a_tensor_is_of_the_type_of_its_port(self) -> None:
        x: NmTensor = RealFunctionDataLayer(n=4, batch_size=2)().x
        port = NeuralType(("B", "D"), ChannelType())
        assert issubclass(NmTensor, NeuralType)
        assert x.compare(port) is x.ntype.compare(port) is NeuralTypeComparisonResult.SAME

    def test_force_pt_computes_and_so_do_values_without_it(self) -> None:
        net, x = TaylorNet(dim=3), torch.ones(2, 1)
        assert torch.equal(net(force_pt=True, x=x), net(x=x))
        assert MSELoss()(force_pt=True, predictions=x, target=x) == 0
        assert NonTrainableNM.of(torch.neg, ["x"], ["y"])(force_pt=True, x=x).sum() == -2

    def test_inputs_may_be_named_like_arguments_of_python(self) -> None:
        (mask,) = DataLayerNM.of([], ["x", "name"])()[1:]
        assert NonTrainableNM.of(torch.neg, ["name"], ["y"])(name=mask).producer_args == {"name": mask}


class TestWeights:
    def test_copied_weights_are_separate(self) -> None:
        first, second = TaylorNet(dim=3), TaylorNet(dim=3)
        second.set_weights(first.get_weights())
        assert torch.equal(first.fc1.weight, second.fc1.weight)
        nn.init.zeros_(first.fc1.weight)
        assert second.fc1.weight.any()
        assert [trainable for _, trainable in first.get_weights().values()] == [True, True]

    def test_weights_are_copied_under_other_names_and_transposed(self) -> None:
        wide, narrow = TrainableNM.of(nn.Linear(3, 2), ["x"], ["y"]), TrainableNM.of(nn.Linear(2, 3), ["x"], ["y"])
        renames = {"module.weight": ("module.weight", WeightShareTransform.TRANSPOSE)}
        wide.set_weights(narrow.get_weights(), renames)
        assert torch.equal(wide.get_weights()["module.weight"][0], narrow.get_weights()["module.weight"][0].T)

    def test_tied_weights_are_one_parameter_that_both_modules_train(self) -> None:
        embedding, output = nemo.backends.pytorch.common.SequenceEmbedding(5, 4), TrainableNM.of(nn.Linear(4, 5), ["x"], ["y"])
        names = {"embedding.weight": ("module.weight", WeightShareTransform.SAME)}
        embedding.tie_weights_with(output, ["embedding.weight"], names)
        tokens, labels = DataLayerNM.of([(torch.arange(4).view(2, 2), torch.zeros(2, 2).long())], ["tokens", "labels"])()
        scores = output(x=embedding(input_seq=tokens))
        loss = LossNM.of(lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()), ["y", "t"])(y=scores, t=labels)
        before = embedding.embedding.weight.detach().clone()
        NeuralModuleFactory().train([loss], "adam", {"lr": 0.1, "max_steps": 2})
        assert embedding.embedding.weight is output.get_weights()["module.weight"][0]
        assert not torch.equal(before, embedding.embedding.weight)

    def test_files_restore_a_module(self, tmp_path: Path) -> None:
        first, second, path = TaylorNet(dim=3), TaylorNet(dim=3), str(tmp_path / "net.pt")
        first.save_to(path)
        second.restore_from(path)
        assert all(map(torch.equal, first.parameters(), second.parameters()))
        torch.save({"fc1.weight": Path}, path)
        with pytest.raises(pickle.UnpicklingError):
            second.restore_from(path)

    def test_frozen_modules_count_no_weights(self) -> None:
        net = TaylorNet(dim=3)
        assert (net.num_weights, net.is_trainable(), net.is_frozen()) == (4, True, False)
        net.freeze()
        assert (net.num_weights, net.is_trainable(), net.is_frozen()) == (0, False, True)
        net.unfreeze({"fc1.bias"})
        assert (net.num_weights, net.is_frozen()) == (1, True)

    def test_the_operation_mode_switches_between_training_and_evaluation_mode(self) -> None:
        net = TaylorNet(dim=3)
        assert (net.operation_mode, net.training) == (OperationMode.both, True)
        net.operation_mode = OperationMode.evaluation
        assert (net.operation_mode, net.training, net.fc1.training) == (OperationMode.evaluation, False, False)
        net.operation_mode = OperationMode.training
        assert net.training

    def test_user_modules_read_the_private_names_of_the_base_class(self) -> None:
        factory = NeuralModuleFactory(placement=DeviceType.CPU, optimization_level="O1")
        net, data = TrainableNM("bert-base", "mine"), DataLayerNM()
        assert (net._pretrained_model_name, net.name) == ("bert-base", "mine")
        assert (net._factory, net._opt_level, net._uuid) == (factory, Optimization.mxprO1, net.unique_instance_id)
        assert (data._factory, data._opt_level) == (factory, Optimization.mxprO1)

    def test_a_module_without_weights_has_the_same_methods(self, tmp_path: Path) -> None:
        loss = MSELoss()
        loss.freeze()
        loss.unfreeze()
        loss.save_to(str(tmp_path / "nothing.pt"))
        assert (loss.get_weights(), loss.num_weights, loss.is_trainable()) == (None, 0, False)
        assert not (tmp_path / "nothing.pt").exists()
        with pytest.raises(NotImplementedError, match="has no weights to restore"):
            loss.restore_from(str(tmp_path / "nothing.pt"))

    def test_a_loop_over_modules_may_restore_one_without_weights(self) -> None:
        NonTrainableNM.of(torch.neg, ["x"], ["y"]).restore_from("no such file")

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
            net.tie_weights_with(other, ["fc1.bias"], {"fc1.bias": ("fc1.bias", WeightShareTransform.TRANSPOSE)})


class TestPlacement:
    def test_modules_take_their_device_from_the_newest_factory(self) -> None:
        factory = NeuralModuleFactory(placement=DeviceType.CPU)
        net = TaylorNet(dim=2)
        assert (net.placement, net._device, net.factory) == (DeviceType.CPU, torch.device("cpu"), factory)
        other = NeuralModuleFactory(set_default=False)
        assert NeuralModuleFactory.get_default_factory() is factory
        NeuralModuleFactory.set_default_factory(other)
        assert TaylorNet(dim=2).factory is other
        NeuralModuleFactory.reset_default_factory()
        assert TaylorNet(dim=2).factory is None

    def test_on_one_process_the_placement_is_never_all_gpus(self) -> None:
        for given in (None, DeviceType.AllGpu):  # user code makes a DistributedSampler for AllGpu
            assert NeuralModuleFactory(placement=given).placement in (DeviceType.GPU, DeviceType.CPU)

    def test_modules_can_be_copied(self) -> None:
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
        for kind in (PairNM, NeuralModule):
            again = kind.import_from_config(path)
            assert type(again) is PairNM
            assert again.init_params == {"a": value, "b": 2}
        assert PairNM.import_from_config(path, overwrite_params={"b": 5}).init_params == {"a": value, "b": 5}

    def test_yaml_of_nemo_with_sections_is_read(self, tmp_path: Path) -> None:
        spec = "nemo.backends.pytorch.tutorials.toys.TaylorNet"
        text = f"net:\n  header: {{nemo_core_version: 0.11.0, full_spec: {spec}}}\n  init_params:\n    dim: 4\n"
        (tmp_path / "model.yml").write_text(text)
        net = NeuralModule.import_from_config(str(tmp_path / "model.yml"), "net", name="mine")
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
            NeuralModule.import_from_config(str(path))
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


def test_a_tensor_of_a_module_without_types_fits_every_port() -> None:
    net, graph = LineNM(), line()
    assert net(x=graph.prediction).ntype is graph.prediction.ntype
    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "max_steps": 1})

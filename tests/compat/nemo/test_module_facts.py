"""What user code reads from modules and their calls, and the callbacks that save, unfreeze and set them (spec B6)."""

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
from cadenza.callbacks import Checkpoint
from cadenza.compat.nemo import backends
from cadenza.compat.nemo.backends.pytorch import DataLayerNM, LossNM, NonTrainableNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import (
    CheckpointCallback,
    DeviceType,
    NeuralModule,
    NeuralModuleFactory,
    NmTensor,
    OperationMode,
    Optimization,
    WeightShareTransform,
)
from cadenza.compat.nemo.core.callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback
from cadenza.compat.nemo.core.neural_types import ChannelType, NeuralType, NeuralTypeComparisonResult
from cadenza.compat.nemo.utils.app_state import AppState
from cadenza.testing import tiny_trainer
from tests.compat.nemo.graphs import Line, LineNM, line, names_in, numbers, train, written


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
        assert x.compare(port) is x.ntype.compare(port) is NeuralTypeComparisonResult.SAME
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
        renames = {"module.weight": ("module.weight", WeightShareTransform.TRANSPOSE)}
        wide.set_weights(narrow.get_weights(), renames)
        assert torch.equal(wide.get_weights()["module.weight"][0], narrow.get_weights()["module.weight"][0].T)

    def test_tied_weights_are_one_parameter_that_both_modules_train(self) -> None:
        embedding, output = backends.pytorch.common.SequenceEmbedding(5, 4), TrainableNM.of(nn.Linear(4, 5), ["x"], ["y"])
        names = {"embedding.weight": ("module.weight", WeightShareTransform.SAME)}
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
            net.tie_weights_with(other, ["fc1.bias"], {"fc1.bias": ("fc1.bias", WeightShareTransform.TRANSPOSE)})


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


Policy, Method = ValueSetterCallback.Policy, ValueSetterCallback.Method


def test_both_versions_have_the_three_callbacks() -> None:
    for name in ("ModuleSaverCallback", "UnfreezeCallback", "ValueSetterCallback"):
        assert getattr(nemo.core, name) is getattr(nemo10.core, name) is getattr(nemo.core.deprecated_callbacks, name)


# -- ModuleSaverCallback ------------------------------------------------------------------------------


def test_files_are_written_at_multiples_of_step_freq_and_at_the_end_with_the_final_weights(tmp_path: Path) -> None:
    graph = line()
    train(graph, ModuleSaverCallback([graph.net], step_freq=2, folder=str(tmp_path / "new")), max_steps=5)
    name = f"LineNM_{graph.net.unique_instance_id}"
    assert names_in(tmp_path / "new") == [f"{name}-STEP-{step}.pt" for step in (2, 4, 5)]
    train(graph, ModuleSaverCallback([graph.net], step_freq=-1, folder=str(tmp_path / "end")), max_steps=3)
    assert names_in(tmp_path / "end") == [f"{name}-STEP-3.pt"]
    other = LineNM()
    other.restore_from(str(tmp_path / "end" / f"{name}-STEP-3.pt"))
    assert all(map(torch.equal, other.parameters(), graph.net.parameters()))


def test_only_its_own_old_files_are_removed(tmp_path: Path) -> None:
    graph = line()
    saver = ModuleSaverCallback([graph.net], step_freq=1, folder=str(tmp_path), checkpoints_to_keep=2)
    train(graph, saver, CheckpointCallback(str(tmp_path), step_freq=1, checkpoints_to_keep=0), max_steps=5)
    own = [name for name in names_in(tmp_path) if name.startswith("LineNM_")]
    assert [name.rpartition("-")[2] for name in own] == ["3.pt", "4.pt", "5.pt"]  # that of the end is extra, as in NeMo
    assert len(list(tmp_path.glob("trainer-STEP-*.pt"))) == 5


def test_wrong_arguments_of_these_callbacks_are_errors() -> None:
    with pytest.raises(TypeError, match="must hold neural modules; got Linear"):
        ModuleSaverCallback([nn.Linear(1, 1)])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ValueError, match="step_freq must be a whole number"):
        ModuleSaverCallback([], step_freq=0)

    with pytest.raises(ValueError, match="must cover the steps 0 to 9 without gaps; they cover 0 to 4, 5 to 9"):
        ValueSetterCallback(nn.Dropout(), "p", [Policy(Method.Const(1), 0, 4), Policy(Method.Const(1), 5, 9)], 9)
    with pytest.raises(ValueError, match="total_steps must be the number of steps of the training; got None"):
        ValueSetterCallback(nn.Dropout(), "p")
    with pytest.raises(AttributeError, match="has no attribute 'probability'"):
        ValueSetterCallback(nn.Dropout(), "probability", total_steps=1)


# -- UnfreezeCallback ---------------------------------------------------------------------------------


def states(graph: Line, *, frozen: bool = True) -> tuple[list[tuple[int, bool, bool]], Any]:
    """Return a list, and a callback that adds the step, whether the weight is trainable and whether it has changed."""
    if frozen:
        graph.net.freeze(["layer.weight"])
    seen: list[tuple[int, bool, bool]] = []

    @nemo.core.on_step_end
    def see(state: Any) -> None:
        weight = graph.net.get_weights()["layer.weight"][0]
        seen.append((state["step"], weight.requires_grad, weight.item() != 0.5))

    return seen, see


def test_modules_are_unfrozen_and_trained_from_the_start_epoch_on_and_in_a_resumed_training_too(tmp_path: Path) -> None:
    graph = line(batches=2)
    seen, see = states(graph)
    keep: dict[str, Any] = {"folder": str(tmp_path), "step_freq": 2}
    train(graph, CheckpointCallback(**keep), UnfreezeCallback([graph.net], start_epoch=1), see, num_epochs=2)
    assert seen == [(0, False, False), (1, False, False), (2, True, True), (3, True, True)]
    again = line(batches=2)
    seen, see = states(again)
    train(again, CheckpointCallback(**keep), UnfreezeCallback([again.net], 1), see, num_epochs=3)
    assert seen == [(4, True, True), (5, True, True)]


def test_a_module_that_is_frozen_again_stays_frozen_in_later_epochs() -> None:
    graph = line(batches=1)
    seen, see = states(graph, frozen=False)
    freeze = nemo.core.on_epoch_end(lambda state: graph.net.freeze(["layer.weight"]))
    train(graph, UnfreezeCallback([graph.net], start_epoch=0), freeze, see, num_epochs=2)
    assert [trainable for _, trainable, _ in seen] == [True, False]


# -- ValueSetterCallback ------------------------------------------------------------------------------


def test_constant_and_linear_policies_with_fractions(tmp_path: Path) -> None:
    graph, dropout, seen = line(), nn.Dropout(0.9), list[float]()
    factory = NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)
    policies = [Policy(method=Method.Const(0.2), start=0.0, end=0.5), Policy(Method.Linear(0.2, 0.0), start=0.5, end=1.0)]
    setter = ValueSetterCallback(dropout, "p", policies, total_steps=6, tb_writer=factory.tb_writer)
    see = nemo.core.on_batch_start(lambda state: seen.append(dropout.p))
    train(graph, setter, see, factory=factory, max_steps=6)
    assert seen == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.0])
    folder = tmp_path / "tensorboard"
    assert written(folder) == [("param/Dropout.p", step) for step in range(6)]
    assert numbers(folder, "param/Dropout.p") == pytest.approx(seen)


@pytest.mark.parametrize(
    ("policies", "values"),
    [
        # after the last step it does not change
        ([Policy(lambda step, steps: step / steps, 0, 2), Policy(Method.Const(1.0), 2, 3)], [0.0, 0.5, 1.0, 1.0]),
        (None, [0.9] * 4),
    ],
    ids=["steps and a function of one's own", "no policies"],
)
def test_policies_of_steps_set_the_value_of_each_step(policies: Any, values: list[float]) -> None:
    dropout, seen = nn.Dropout(0.9), list[float]()
    see = nemo.core.on_step_end(lambda state: seen.append(dropout.p))
    train(line(), ValueSetterCallback(dropout, "p", policies, total_steps=3), see, max_steps=4)
    assert seen == values


def test_a_resumed_training_continues_in_the_right_policy(tmp_path: Path) -> None:
    policies = [Policy(Method.Const(0.5), 0, 2), Policy(Method.Linear(0.4, 0.0), 2, 7)]
    for steps in (5, 7):
        dropout, seen = nn.Dropout(0.9), list[tuple[int, float]]()
        see = nemo.core.on_step_end(lambda state: seen.append((state["step"], round(dropout.p, 4))))  # noqa: B023
        keep = CheckpointCallback(str(tmp_path), step_freq=4)
        train(line(), keep, ValueSetterCallback(dropout, "p", policies, 7), see, max_steps=steps)
    assert seen == [(5, 0.1), (6, 0.0)]


def test_it_works_beside_native_checkpoints_in_a_native_run(tmp_path: Path) -> None:
    dropout = nn.Dropout(0.9)
    setter = ValueSetterCallback(dropout, "p", [Policy(Method.Linear(0.4, 0.0), 0, 5)], 5)
    tiny_trainer(callbacks=[setter, Checkpoint(every="2 steps")], steps=5, directory=tmp_path).fit(resume="auto")
    assert dropout.p == 0.0

"""The factory: ``nf.infer``, ``PtActions``, folders (case 20 of part F1) and other methods; and helpers of ``nemo.utils``."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.backends.pytorch import PtActions
from cadenza.compat.nemo.core import CheckpointCallback, DeviceType, NeuralModuleFactory, NeuralType, Optimization
from cadenza.compat.nemo.utils import get_checkpoint_from_dir, get_cuda_device, get_device, rgetattr, rsetattr
from cadenza.compat.nemo10 import logging
from cadenza.compat.nemo10.core import NeuralModuleFactory as OldFactory
from cadenza.compat.neural.helpers import pad_to
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import SGD, LineNM, line, logged, train, worst_of


class TestInfer:
    def test_it_returns_one_value_per_batch_for_each_tensor_and_computes_in_evaluation_mode(self) -> None:
        graph = line(batches=3)
        predictions, inputs = NeuralModuleFactory().infer([graph.prediction, graph.x], verbose=False) or ([], [])
        assert all(map(torch.equal, inputs, (x for x, _ in tiny_loader(3))))
        assert all(torch.equal(value, x * 0.5) for value, x in zip(predictions, inputs, strict=True))
        assert not predictions[0].requires_grad
        assert graph.net.modes == [False] * 3
        assert graph.net.training
        assert [len(values) for values in NeuralModuleFactory().infer([graph.x, graph.y]) or ()] == [3, 3]
        assert graph.net.modes == [False] * 3  # a data layer alone can be read

    def test_it_restores_the_newest_files_or_those_of_a_pattern(self, tmp_path: Path) -> None:
        graph, factory = line(), NeuralModuleFactory()
        train(graph, CheckpointCallback(str(tmp_path), step_freq=2), factory=factory, max_steps=5)
        final = factory.infer([graph.prediction])
        fresh = line()
        assert torch.equal((factory.infer([fresh.prediction], checkpoint_dir=str(tmp_path)) or [])[0][0], (final or [])[0][0])
        factory.infer([fresh.prediction], checkpoint_dir=str(tmp_path), ckpt_pattern="STEP-2")
        stored = torch.load(tmp_path / "LineNM-STEP-2.pt")
        assert torch.equal(fresh.weights[0], stored["layer.weight"])

    def test_only_the_given_modules_are_restored(self, tmp_path: Path) -> None:
        graph, other = line(), LineNM("other")
        both = other(x=graph.prediction)
        torch.save({"layer.weight": torch.full((1, 1), 3.0), "layer.bias": torch.zeros(1)}, tmp_path / "LineNM_1-STEP-7.pt")
        NeuralModuleFactory().infer([both], checkpoint_dir=str(tmp_path), modules_to_restore=other)
        assert (graph.weights[0].item(), other.layer.weight.item()) == (0.5, 3.0)
        with pytest.raises(ValueError, match="must hold neural modules with trainable weights"):
            NeuralModuleFactory().infer([both], checkpoint_dir=str(tmp_path), modules_to_restore=[graph.data])

    def test_kept_values_are_not_computed_again(self) -> None:
        graph, factory = line(batches=2), NeuralModuleFactory()
        worst, computed = worst_of(graph)
        first = factory.infer([worst], cache=True)
        called = len(graph.net.modes)
        assert factory.infer([worst], use_cache=True) == first
        assert len(graph.net.modes) == called
        assert len(computed) == 4  # the wanted tensor itself is computed again
        with pytest.raises(ValueError, match=r"Call clear_cache\(\) first"):
            factory.infer([worst], cache=True)
        factory.clear_cache()
        with pytest.raises(ValueError, match="use_cache=True needs values of an earlier call"):
            factory.infer([worst], use_cache=True)
        with pytest.raises(ValueError, match="got both"):
            factory.infer([worst], cache=True, use_cache=True)


class TestActions:
    def test_actions_without_a_factory_train_and_infer(self) -> None:
        graph, seen = line(), list[int]()
        actions = PtActions()
        callback = nemo.core.on_step_end(lambda state: seen.append(state["step"]))
        actions.train([graph.loss], None, "sgd", {**SGD, "max_steps": 3}, [callback])
        assert seen == [0, 1, 2]
        assert (actions.step, actions.epoch, len(actions.optimizers)) == (3, 0, 1)
        assert len((actions.infer([graph.loss]) or [])[0]) == 5

    @pytest.mark.parametrize("package", [nemo, nemo10])
    def test_step_epoch_and_optimizers_are_saved_and_restored(self, package: object, tmp_path: Path) -> None:
        actions, path = package.backends.pytorch.PtActions(), str(tmp_path / "trainer.pt")  # type: ignore[attr-defined]
        net = LineNM()
        actions.create_optimizer("sgd", net, {"lr": 1.0})
        actions.create_optimizer("adam", [net], optimizer_params={"lr": 2.0})
        actions.save_state_to(path)
        assert sorted(torch.load(path)) == sorted(["step", "epoch" if package is nemo else "epoch_num", "optimizer_state"])
        actions.step, actions.epoch_num = 123, 324
        for optimizer in actions.optimizers:
            optimizer.param_groups[0]["lr"] = 0
        actions.restore_state_from(path)
        assert (actions.step, actions.epoch, actions.epoch_num) == (0, 0, 0)
        assert [optimizer.param_groups[0]["lr"] for optimizer in actions.optimizers] == [1.0, 2.0]
        with pytest.raises(FileNotFoundError):
            actions.restore_state_from(str(tmp_path / "none.pt"))
        torch.save({"step": Path}, path)
        with pytest.raises(ValueError, match="pickled code"):
            actions.restore_state_from(path)

    def test_things_to_optimize_are_modules_or_tensors(self) -> None:
        graph = line()
        optimizer = NeuralModuleFactory().create_optimizer("sgd", graph.loss, {"lr": 0.1})
        assert optimizer.param_groups[0]["params"] == list(graph.net.parameters())
        with pytest.raises(ValueError, match=r"needs a list of neural modules or NmTensors; got \['net'\]"):
            NeuralModuleFactory().create_optimizer("sgd", ["net"], {"lr": 0.1})  # type: ignore[list-item]  # the mistake under test


class TestFactory:
    def test_the_first_arguments_are_in_the_order_of_the_version(self, tmp_path: Path) -> None:
        first = NeuralModuleFactory(None, "O0", DeviceType.CPU, False, 3, True, str(tmp_path / "new"))
        assert (first.placement, first.random_seed, first.work_dir) == (DeviceType.CPU, 3, str(tmp_path / "new"))
        pytorch, exact = nemo10.core.Backend.PyTorch, Optimization.mxprO0
        second = nemo10.core.NeuralModuleFactory(pytorch, None, exact, DeviceType.CPU, False, 4)
        assert (second.optim_level, second.random_seed) == (Optimization.mxprO0, 4)
        with pytest.raises(NotImplementedError, match=r"backend must be Backend\.PyTorch"):
            nemo10.core.NeuralModuleFactory(nemo10.core.Backend.NotSupported)

    def test_precision_has_a_name_and_cudnn_benchmark_excludes_a_seed(self) -> None:
        assert NeuralModuleFactory(optimization_level="O1").optim_level is Optimization.mxprO1
        assert NeuralModuleFactory(optimization_level=Optimization.mxprO1).precision == "fp16"
        with pytest.raises(ValueError, match="must be one of O0, O1, O2, O3"):
            NeuralModuleFactory(optimization_level="fp16")

        try:
            NeuralModuleFactory(cudnn_benchmark=True)
            assert torch.backends.cudnn.benchmark
            with pytest.raises(ValueError, match="which random_seed= forbids"):
                NeuralModuleFactory(cudnn_benchmark=True, random_seed=1)
        finally:
            torch.backends.cudnn.benchmark = False

    def test_what_is_not_available_says_what_to_use_and_one_process_needs_no_agreement(self) -> None:
        factory, graph = NeuralModuleFactory(), line()
        factory.sync_all_processes(status=False)
        with pytest.raises(NotImplementedError, match=r"module.save_to\('net.onnx'\) for the weights, or torch.onnx.export"):
            factory.deployment_export(graph.net, "net.onnx", "ONNX")
        with pytest.raises(NotImplementedError, match="training_graph is not available"):
            factory.train(training_graph=object(), optimization_params={**SGD, "max_steps": 1})


class TestFolders:
    def test_20_without_folders_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        train(line(), max_steps=1)
        assert list(tmp_path.iterdir()) == []
        factory = OldFactory()
        assert (factory.work_dir, factory.checkpoint_dir, factory.tb_writer) == (None, None, None)
        assert (factory.world_size, factory.global_rank) == (1, None)
        with pytest.raises(ValueError, match="create_tb_writer=True needs log_dir= or tensorboard_dir="):
            OldFactory(create_tb_writer=True)

    def test_20_the_work_directory_holds_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said = types.SimpleNamespace(stdout="commit hash: abc\n")  # the tests may run outside a repository
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
        extra = tmp_path / "config.yaml"
        extra.write_text("lr: 1")
        factory = OldFactory(log_dir=str(tmp_path / "work"), create_tb_writer=True, files_to_copy=[str(extra)])
        assert factory.work_dir == str(tmp_path / "work")
        assert factory.checkpoint_dir == str(tmp_path / "work" / "checkpoints")
        assert isinstance(factory.tb_writer, SummaryWriter)
        logging.info("a message")
        names = {file.name.split("_")[0] for file in (tmp_path / "work").iterdir()}
        assert names >= {"checkpoints", "tensorboard", "cmd-args", "log", "config"}
        [arguments] = (tmp_path / "work").glob("cmd-args_*.log")
        assert arguments.read_text() == " ".join(sys.argv) + "\n"
        [of_git] = (tmp_path / "work").glob("git-info_*.log")
        assert of_git.read_text().startswith("commit hash: abc")
        [copied] = (tmp_path / "work").glob("config_*.yaml")
        assert copied.read_text() == "lr: 1"
        assert "a message" in (tmp_path / "work" / "log_globalrank-0_localrank-0.txt").read_text()

    def test_20_each_folder_can_be_chosen_or_named_by_the_time(self, tmp_path: Path) -> None:
        factory = OldFactory(
            log_dir=str(tmp_path / "work"),
            checkpoint_dir=str(tmp_path / "ck"),
            tensorboard_dir=str(tmp_path / "tb"),
            create_tb_writer=True,
        )
        assert factory.checkpoint_dir == str(tmp_path / "ck")
        assert factory.tb_writer.log_dir == str(tmp_path / "tb")
        assert not (tmp_path / "work" / "checkpoints").exists()
        assert OldFactory(checkpoint_dir=str(tmp_path / "only")).checkpoint_dir == str(tmp_path / "only")
        timed = OldFactory(log_dir=str(tmp_path / "timed"), add_time_to_log_dir=True)
        [folder] = (tmp_path / "timed").iterdir()
        assert (timed.work_dir, timed.checkpoint_dir) == (str(folder), str(folder / "checkpoints"))

    def test_messages_are_written_to_the_folder_of_the_newest_factory(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            OldFactory(log_dir=str(tmp_path / name))
            logging.info("said after %s", name)
        texts = [(tmp_path / name / "log_globalrank-0_localrank-0.txt").read_text() for name in ("a", "b")]
        assert ["said after a" in texts[0], "said after b" in texts[0], "said after b" in texts[1]] == [True, False, True]


# -- nemo.utils ------------------------------------------------------------------------------------


def any_module(module: ModuleType) -> Any:
    """Return a module with the attributes that a table gives it, which type checkers do not see."""
    return module


def test_attributes_are_reachable_after_one_import() -> None:
    utils, core, common = map(any_module, (nemo.utils, nemo.core, nemo.backends.pytorch.common))
    assert utils.helpers.rgetattr is nemo.utils.rgetattr
    assert utils.app_state.AppState().modules is not None
    assert common.losses is not None
    for package in (nemo, nemo10):  # scripts import it from this module, which does not define it
        assert package.core.neural_modules.NmTensor is package.core.NmTensor
    for name in ("ModuleSaverCallback", "UnfreezeCallback", "ValueSetterCallback"):
        assert getattr(nemo.core, name) is getattr(nemo10.core, name) is getattr(core.deprecated_callbacks, name)


def test_attributes_by_dotted_names() -> None:
    net = nn.Sequential(nn.Linear(1, 2))
    assert rgetattr(net, "0.weight") is net[0].weight
    assert rgetattr(net, "0.wight.data", None) is None
    rsetattr(net, "0.bias", None)
    rsetattr(net, "label", "x")
    assert rgetattr(net, "0.bias") is None
    assert rgetattr(net, "label") == "x"
    with pytest.raises(AttributeError, match="wight"):
        rgetattr(net, "0.wight")


def test_devices_and_lengths_that_are_padded_to_a_multiple() -> None:
    assert get_cuda_device(DeviceType.CPU) == torch.device("cpu")
    assert get_cuda_device(DeviceType.GPU) == torch.device("cuda")
    assert get_cuda_device(get_device(None)).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert get_device(local_rank=0) is DeviceType.AllGpu
    assert [pad_to(length, 8) for length in (0, 1, 8, 31)] == [0, 8, 8, 32]


VERSIONS = pytest.mark.parametrize("package", [nemo, nemo10], ids=lambda package: package.__version__)


@VERSIONS
def test_a_modules_ports_are_in_the_docstring_of_the_property(package: ModuleType) -> None:
    decorate: Any = importlib.import_module(f"{package.__name__}.utils.decorators").add_port_docs

    class Module:
        size = 3

        @property
        @decorate()  # type: ignore[untyped-decorator]
        def input_ports(self) -> dict[str, NeuralType]:
            """Return the inputs."""
            return {"x": NeuralType(("B", "D")), "y": NeuralType()}

        @property
        @decorate  # type: ignore[untyped-decorator]
        def output_ports(self) -> dict[str, NeuralType]:
            return {"z": NeuralType(("B", "D"))}

        @property
        @decorate()  # type: ignore[untyped-decorator]
        def of_this_instance(self) -> dict[str, NeuralType]:
            """Return the ports of one instance."""
            return {str(index): NeuralType() for index in range(self.size)}

    assert set(Module().input_ports) == {"x", "y"}
    assert len(Module().of_this_instance) == 3
    text = Module.input_ports.__doc__ or ""
    assert text.startswith("Return the inputs.\n\n* *x* : ")
    assert "\n\n* *y* : " in text
    assert (Module.output_ports.__doc__ or "").startswith("* *z* : ")
    assert Module.of_this_instance.__doc__ == "Return the ports of one instance."


@VERSIONS
def test_a_deprecated_function_warns_once(package: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    deprecated: Any = importlib.import_module(f"{package.__name__}.utils.decorators.deprecated").deprecated

    @deprecated(version="0.12", explanation="Use new().")  # type: ignore[untyped-decorator]
    def old(value: int) -> int:
        """Return the value."""
        return value

    @deprecated  # type: ignore[untyped-decorator]
    def older() -> None:
        pass

    with caplog.at_level("WARNING", "nemo"):
        assert [old(1), old(value=2)] == [1, 2]
        older()
    decorators = importlib.import_module(f"{package.__name__}.utils.decorators")
    assert decorators.deprecated is deprecated  # not the module of this name
    assert logged(caplog) == ["old is deprecated. Version 0.12 removes it. Use new().", "older is deprecated."]
    assert (old.__name__, old.__doc__) == ("old", "Return the value.")


@VERSIONS
def test_the_command_line_of_scripts(package: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    parser = package.utils.NemoArgParser(description="Jasper")
    parser.set_defaults(batch_size=32, optimizer="novograd")
    parser.add_argument("--exp_name", default="Jasper")
    given = vars(parser.parse_args(["--lr", "0.02", "--create_tb_writer", "--eval_datasets", "a", "b", "--num_epochs", "3"]))
    files = ("model_config", "train_dataset", "work_dir", "checkpoint_dir", "tensorboard_dir")
    expected = {
        **dict.fromkeys((*files, "eval_batch_size", "max_steps")),
        "local_rank": 1,
        "amp_opt_level": "O0",
        "cudnn_benchmark": False,
        "eval_datasets": ["a", "b"],
        "batch_size": 32,
        "eval_freq": 1000,
        "optimizer": "novograd",
        "weight_decay": 0.0,
        "num_epochs": 3,
        "lr": 0.02,
        "lr_policy": "WarmupAnnealing",
        "iter_per_step": 1,
        "create_tb_writer": True,
        "checkpoint_save_freq": 1000,
        "exp_name": "Jasper",
    }
    assert isinstance(parser, argparse.ArgumentParser)
    assert given == expected
    args = parser.parse_args(["--work_dir", str(tmp_path), "--amp_opt_level", "O0", "--create_tb_writer"])
    factory = package.core.NeuralModuleFactory(
        local_rank=args.local_rank,
        optimization_level=args.amp_opt_level,
        log_dir=args.work_dir,
        create_tb_writer=args.create_tb_writer,
        cudnn_benchmark=args.cudnn_benchmark,
    )
    assert factory.tb_writer is not None


def test_of_the_files_of_a_module_the_highest_number_counts_and_a_whole_name_comes_first(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        get_checkpoint_from_dir(["Enc"], str(tmp_path / "none"))
    with pytest.raises(ValueError, match="has no numbered file of module 'Enc'"):
        get_checkpoint_from_dir(["Enc"], folder)
    for name in ("Enc-STEP-9.pt", "Enc-STEP-10.pt", "EncDec-STEP-99.pt", "Saver_1a-STEP-3.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert get_checkpoint_from_dir(["Enc", "EncDec"], folder) == [f"{folder}/Enc-STEP-10.pt", f"{folder}/EncDec-STEP-99.pt"]
    assert get_checkpoint_from_dir("Enc", folder, "STEP-9") == [f"{folder}/Enc-STEP-9.pt"]
    assert get_checkpoint_from_dir(["Saver"], folder, return_steps=True) == ([f"{folder}/Saver_1a-STEP-3.pt"], [3])

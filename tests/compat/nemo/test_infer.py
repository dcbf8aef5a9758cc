"""``nf.infer``, ``PtActions``, ``get_checkpoint_from_dir`` and the factory's other methods."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import pytest
import torch

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.backends.pytorch import DataLayerNM, PtActions
from cadenza.compat.nemo.core import CheckpointCallback, DeviceType, NeuralModuleFactory, Optimization
from cadenza.compat.nemo.utils import NemoArgParser, get_checkpoint_from_dir
from cadenza.testing import tiny_loader
from tests.compat.nemo.graphs import SGD, Line, LineNM, line, worst_of


def modes(graph: Line) -> list[bool]:
    """Return whether the line was in training mode, for each of its calls."""
    assert isinstance(graph.net, LineNM)
    return graph.net.modes


class TestInfer:
    def test_it_returns_one_value_per_batch_for_each_tensor(self) -> None:
        graph = line(batches=3)
        predictions, inputs = NeuralModuleFactory().infer([graph.prediction, graph.x]) or ([], [])
        assert all(map(torch.equal, inputs, (x for x, _ in tiny_loader(3))))
        assert all(torch.equal(value, x * 0.5) for value, x in zip(predictions, inputs, strict=True))
        assert not predictions[0].requires_grad

    def test_modules_are_in_evaluation_mode_during_it_and_as_before_after_it(self) -> None:
        graph = line(batches=2)
        NeuralModuleFactory().infer([graph.loss], verbose=False)
        assert modes(graph) == [False, False]
        assert graph.net.training

    def test_it_restores_the_newest_files_or_those_of_a_pattern(self, tmp_path: Path) -> None:
        graph, factory = line(), NeuralModuleFactory()
        factory.train([graph.loss], "sgd", {**SGD, "max_steps": 5}, [CheckpointCallback(str(tmp_path), step_freq=2)])
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
        called = len(modes(graph))
        assert factory.infer([worst], use_cache=True) == first
        assert len(modes(graph)) == called
        assert len(computed) == 4  # the wanted tensor itself is computed again
        with pytest.raises(ValueError, match=r"Call clear_cache\(\) first"):
            factory.infer([worst], cache=True)
        factory.clear_cache()
        with pytest.raises(ValueError, match="use_cache=True needs values of an earlier call"):
            factory.infer([worst], use_cache=True)
        with pytest.raises(ValueError, match="got both"):
            factory.infer([worst], cache=True, use_cache=True)


class TestFilesOfModules:
    def test_the_highest_number_counts_and_a_whole_name_comes_first(self, tmp_path: Path) -> None:
        for name in ("Enc-STEP-9.pt", "Enc-STEP-10.pt", "EncDec-STEP-99.pt", "Saver_1a-STEP-3.pt", "notes.txt"):
            (tmp_path / name).touch()
        folder = str(tmp_path)
        assert get_checkpoint_from_dir(["Enc", "EncDec"], folder) == [f"{folder}/Enc-STEP-10.pt", f"{folder}/EncDec-STEP-99.pt"]
        assert get_checkpoint_from_dir("Enc", folder, "STEP-9") == [f"{folder}/Enc-STEP-9.pt"]
        assert get_checkpoint_from_dir(["Saver"], folder, return_steps=True) == ([f"{folder}/Saver_1a-STEP-3.pt"], [3])

    def test_a_missing_folder_or_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="does not exist"):
            get_checkpoint_from_dir(["Enc"], str(tmp_path / "none"))
        with pytest.raises(ValueError, match="has no numbered file of module 'Enc'"):
            get_checkpoint_from_dir(["Enc"], str(tmp_path))


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
    def test_reset_forgets_the_last_training(self) -> None:
        graph, factory = line(), NeuralModuleFactory()
        factory.train([graph.loss], "sgd", {**SGD, "max_steps": 2})
        factory.reset_trainer()
        assert (factory.step, factory.epoch, factory.optimizers, factory.run) == (0, 0, [], None)
        assert factory.train([graph.loss], "sgd", {**SGD, "max_steps": 1}).progress.step == 1

    def test_the_first_arguments_are_in_the_order_of_the_version(self, tmp_path: Path) -> None:
        first = NeuralModuleFactory(None, "O0", DeviceType.CPU, False, 3, True, str(tmp_path / "new"))
        assert (first.placement, first.random_seed, first.work_dir) == (DeviceType.CPU, 3, str(tmp_path / "new"))
        pytorch, exact = nemo10.core.Backend.PyTorch, Optimization.mxprO0
        second = nemo10.core.NeuralModuleFactory(pytorch, None, exact, DeviceType.CPU, False, 4)
        assert (second.optim_level, second.random_seed) == (Optimization.mxprO0, 4)
        with pytest.raises(NotImplementedError, match=r"backend must be Backend\.PyTorch"):
            nemo10.core.NeuralModuleFactory(nemo10.core.Backend.NotSupported)

    def test_precision_by_name(self) -> None:
        assert NeuralModuleFactory(optimization_level="O1").optim_level is Optimization.mxprO1
        with pytest.raises(ValueError, match="must be one of O0, O1, O2, O3"):
            NeuralModuleFactory(optimization_level="fp16")

    def test_cudnn_benchmark_is_set_and_excludes_a_seed(self) -> None:
        try:
            NeuralModuleFactory(cudnn_benchmark=True)
            assert torch.backends.cudnn.benchmark
            with pytest.raises(ValueError, match="which random_seed= forbids"):
                NeuralModuleFactory(cudnn_benchmark=True, random_seed=1)
        finally:
            torch.backends.cudnn.benchmark = False

    def test_one_process_needs_no_agreement(self) -> None:
        NeuralModuleFactory().sync_all_processes(status=False)

    def test_what_is_not_available_says_what_to_use(self, tmp_path: Path) -> None:
        factory, graph = NeuralModuleFactory(), line()
        with pytest.raises(NotImplementedError, match=r"module.save_to\('net.onnx'\) for the weights, or torch.onnx.export"):
            factory.deployment_export(graph.net, "net.onnx", "ONNX")
        with pytest.raises(NotImplementedError, match="training_graph is not available"):
            factory.train(training_graph=object(), optimization_params={**SGD, "max_steps": 1})

    def test_the_command_line_of_the_examples_makes_a_factory(self, tmp_path: Path) -> None:
        parser = NemoArgParser()
        assert isinstance(parser, argparse.ArgumentParser)
        args = parser.parse_args(["--work_dir", str(tmp_path), "--amp_opt_level", "O0", "--create_tb_writer"])
        factory = NeuralModuleFactory(
            local_rank=args.local_rank,
            optimization_level=args.amp_opt_level,
            log_dir=args.work_dir,
            create_tb_writer=args.create_tb_writer,
            cudnn_benchmark=args.cudnn_benchmark,
        )
        assert factory.tb_writer is not None


def test_weights_in_files_of_the_backend(tmp_path: Path) -> None:
    from cadenza.compat.nemo.backends import get_state_dict, load, save, set_state_dict

    net, other, path = LineNM(), LineNM(), str(tmp_path / "net.pt")
    torch.nn.init.ones_(net.layer.weight)
    save(get_state_dict(net), path)
    set_state_dict(other, load(path))
    assert other.layer.weight.item() == 1.0
    torch.save(Path, path)
    with pytest.raises(pickle.UnpicklingError):
        load(path)


def test_a_data_layer_alone_can_be_read() -> None:
    x, y = DataLayerNM.of(tiny_loader(2), ["x", "y"])()
    assert [len(values) for values in NeuralModuleFactory().infer([x, y]) or ()] == [2, 2]

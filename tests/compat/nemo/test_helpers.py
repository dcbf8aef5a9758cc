"""``nemo.utils``: its helpers, decorators and command line."""

from __future__ import annotations

import argparse
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.core import DeviceType, NeuralType
from cadenza.compat.nemo.utils import get_checkpoint_from_dir, get_cuda_device, get_device, rgetattr, rsetattr
from cadenza.compat.nemo.utils.misc import pad_to
from tests.compat.nemo.graphs import logged


def test_attributes_are_reachable_after_one_import() -> None:
    assert nemo.utils.helpers.rgetattr is nemo.utils.rgetattr
    assert nemo.utils.app_state.AppState().modules is not None
    assert nemo.backends.pytorch.common.losses is not None
    for package in (nemo, nemo10):  # scripts import it from this module, which does not define it
        assert package.core.neural_modules.NmTensor is package.core.NmTensor


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

    with caplog.at_level(logging.WARNING, "nemo"):
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

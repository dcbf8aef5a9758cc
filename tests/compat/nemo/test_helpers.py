"""``nemo.utils.helpers`` and the names of ``nemo.core`` that scripts import."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import cadenza.compat.nemo as nemo
from cadenza.compat.nemo.core import DeviceType
from cadenza.compat.nemo.utils import get_cuda_device, get_device, rgetattr, rsetattr
from cadenza.compat.nemo.utils.misc import pad_to


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


def test_devices() -> None:
    assert get_cuda_device(DeviceType.CPU) == torch.device("cpu")
    assert get_cuda_device(DeviceType.GPU) == torch.device("cuda")
    assert get_cuda_device(get_device(None)).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert get_device(local_rank=0) is DeviceType.AllGpu


@pytest.mark.parametrize(("length", "padded"), [(0, 0), (1, 8), (8, 8), (31, 32)])
def test_lengths_are_padded_to_a_multiple(length: int, padded: int) -> None:
    assert pad_to(length, 8) == padded


IMPORTS = """
utils: logging logging_mode get_checkpoint_from_dir NemoArgParser
utils.helpers: get_checkpoint_from_dir rgetattr rsetattr get_cuda_device
utils.decorators: add_port_docs deprecated
utils.decorators.port_docs: add_port_docs
core: NmTensor NeuralModule NeuralModuleFactory DeviceType WeightShareTransform CheckpointCallback ValueSetterCallback
core.neural_types: NmTensor AxisType AxisKind SpectrogramType NeuralType
core.neural_modules: NeuralModule NmTensor WeightShareTransform
core.neural_factory: NeuralModuleFactory DeviceType Optimization
core.callbacks: CheckpointCallback
backends.pytorch: NonTrainableNM TrainableNM LossNM DataLayerNM PtActions
backends.pytorch.common: losses CrossEntropyLossNM SequenceEmbedding
backends.pytorch.common.losses: CrossEntropyLossNM
backends.pytorch.actions: PtActions
backends.pytorch.tutorials.toys: TaylorNet MSELoss
"""
OF_0_11 = """
core: OperationMode ModuleType SimpleLogger on_step_end
core.deprecated_callbacks: ActionCallback ModuleSaverCallback
utils.app_state: AppState
backends: get_state_dict set_state_dict save load
"""
OF_0_10 = """
core: Backend ActionCallback EvaluatorCallback UnfreezeCallback ModelMode
core.callbacks: ModuleSaverCallback logging
"""


@pytest.mark.parametrize(("version", "lines"), [("nemo", IMPORTS + OF_0_11), ("nemo10", IMPORTS + OF_0_10)])
def test_the_import_lines_of_scripts(version: str, lines: str) -> None:
    for line in lines.split("\n"):
        path, _, names = line.partition(":")
        for name in names.split():
            module = importlib.import_module(f"cadenza.compat.{version}.{path}")
            assert hasattr(module, name), f"{path}.{name}"


def test_attributes_are_reachable_after_one_import() -> None:
    assert nemo.utils.helpers.rgetattr is nemo.utils.rgetattr
    assert nemo.utils.app_state.AppState().modules is not None
    assert nemo.backends.pytorch.common.losses is not None

"""A table of NeMo's re-exporting modules, from which both NeMo adapters create them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

Homes = Mapping[str, str]
"""Names, separated by spaces, by the module of ``cadenza.compat.neural`` that defines them; ``*`` is its ``__all__``."""

_TOYS = "CrossEntropyLoss L1Loss MSELoss RealFunctionDataLayer TaylorNet"

BOTH: Mapping[str, Homes] = {
    "backends.pytorch.common.losses": {"losses": "CrossEntropyLossNM LossAggregatorNM MSELoss SequenceLoss"},
    "backends.pytorch.common.multi_data": {"data_layers": "DataCombination MultiDataLayer MultiDataset"},
    "backends.pytorch.common.other": {"layers": "SequenceEmbedding ZerosLikeNM"},
    "backends.pytorch.common.parts": {"layers": "Attention MultiLayerPerceptron"},
    "backends.pytorch.common.zero_data": {"data_layers": "ZerosDataLayer neuralType2TensorShape"},
    "backends.pytorch.optimizers": {"updates": "AdamW Novograd master_params"},
    "collections": {},
    "core.neural_types.axes": {"axes": "AxisKind AxisKindAbstract AxisType"},
    "core.neural_types.comparison": {"elements": "NeuralTypeComparisonResult"},
    "core.neural_types.neural_type": {
        "ports": "NeuralPortNameMismatchError NeuralPortNmTensorMismatchError NeuralType NeuralTypeError",
        "tensors": "NmTensor",
    },
    "utils.argparse": {"script_arguments": "NemoArgParser"},
    "utils.decorators": {"decorators": "add_port_docs deprecated"},
    "utils.decorators.deprecated": {"decorators": "deprecated"},
    "utils.decorators.port_docs": {"decorators": "add_port_docs"},
    "utils.exp_logging": {"logs": "get_logger"},
    "utils.helpers": {"helpers": "get_checkpoint_from_dir get_cuda_device get_device rgetattr rsetattr"},
    "utils.lr_policies": {
        "policies": "CosineAnnealing InverseSquareRootAnnealing PolynomialDecayAnnealing PolynomialHoldDecayAnnealing "
        "SquareAnnealing SquareRootAnnealing WarmupAnnealing WarmupHoldPolicy WarmupPolicy get_all_lr_classes get_lr_policy"
    },
    "utils.misc": {"helpers": "pad_to"},
    "utils.nemo_logging": {"logs": "LogMode Logger"},
}
OF_0_10: Mapping[str, Homes] = {
    **BOTH,
    "backends.pytorch.tutorials.toys": {"tutorials": f"{_TOYS} TaylorNetO"},
    "core.neural_types.elements": {"elements": "*"},
}
OF_0_11: Mapping[str, Homes] = {
    **BOTH,
    "backends.pytorch.tutorials.toys": {"tutorials": _TOYS},
    "backends.torch_backend": {"state_dicts": "get_state_dict load save set_state_dict"},
    "core.deprecated_callbacks": {
        "action": "ActionCallback",
        "evaluator": "EvaluatorCallback",
        "loss_logger": "SimpleLossLoggerCallback WandbCallback",
        "module_callbacks": "ModuleSaverCallback UnfreezeCallback ValueSetterCallback",
    },
    "core.neural_types.elements": {"elements": "*", "elements_of_0_11": "*"},
    "utils.app_state": {"app_state": "AppState"},
}


def provide(package: str, aliases: Mapping[str, Homes]) -> None:
    """Create the modules of a table and register them with ``import`` and their parents. Parents come first."""
    for path, homes in aliases.items():
        name = f"{package}.{path}"
        parent, _, last = name.rpartition(".")
        module = ModuleType(name, f"``nemo.{path}``.")
        module.__spec__ = ModuleSpec(name, None, is_package=any(other.startswith(f"{path}.") for other in aliases))
        module.__path__ = module.__spec__.submodule_search_locations or []
        found = {name: home for home, names in homes.items() for name in _listed(home, names)}
        vars(module)["__all__"] = sorted(found)
        for alias, home in found.items():
            setattr(module, alias, getattr(import_module(f"cadenza.compat.neural.{home}"), alias))
        sys.modules[name] = module
        vars(sys.modules[parent]).setdefault(last, module)  # the function `deprecated` of `utils.decorators` stays


def _listed(home: str, names: str) -> list[str]:
    module = import_module(f"cadenza.compat.neural.{home}")
    return [*module.__all__] if names == "*" else names.split()

"""What to use instead of the names of NeMo 0.11 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from cadenza.compat.neural.absent import Rows, common

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

_GRAPH = "Call the modules with named tensors: `cadenza.compat.nemo.core.NeuralModuleFactory.train` finds the graph."
_TYPES = "Use `cadenza.compat.nemo.core.neural_types.VoidType`, or a class of your own derived from its `ElementType`."
_NUMBERS = "Use `cadenza.compat.nemo.core.Optimization` to train with mixed precision."
_CORE = "Import the name from `cadenza.compat.nemo.core`."

ABSENT: Rows = {
    **common("cadenza.compat.nemo"),
    "backends": {
        "backend": "Remove the call: PyTorch is the only backend. Its modules are in `cadenza.compat.nemo.backends.pytorch`.",
        "get_state_dict set_state_dict": "Use `torch.nn.Module.state_dict` and `torch.nn.Module.load_state_dict`.",
        "load save": "Use `torch.load` and `torch.save`.",
    },
    "backends.load_backend": {"*": "Remove the import: PyTorch is the only backend, `cadenza.compat.nemo.backends.pytorch`."},
    "backends.torch_backend": {"*": "Use `torch.load` and `torch.save`."},
    "backends.pytorch": {
        "DataLayerNM LossNM NonTrainableNM TrainableNM": "Import it from `cadenza.compat.nemo.backends.pytorch.nm`."
    },
    "backends.pytorch.actions": {
        "AmpOptimizations FusedAdam FusedLAMB FusedNovoGrad LARC amp": _NUMBERS,
        "PtActions": "Use `cadenza.compat.nemo.core.NeuralModuleFactory`, which creates a native `cadenza.Trainer`.",
    },
    "backends.pytorch.common.losses": {
        "BCEWithLogitsLossNM": "Use `torch.nn.BCEWithLogitsLoss` with `cadenza.compat.nemo.backends.pytorch.nm.LossNM.of`.",
    },
    "backends.pytorch.tutorials.toys": {"*": "Import the name from `cadenza.compat.nemo.backends.pytorch.tutorials`."},
    "backends.pytorch.tutorials": {
        "DialogDataLayer EOS_token EncoderRNN GreedyLuongAttnDecoderRNN LuongAttnDecoderRNN MAX_LENGTH "
        "MIN_COUNT MaskedXEntropyLoss PAD_token SOS_token Voc batch2TrainData binaryMatrix filterPair "
        "filterPairs indexesFromSentence inputVar loadPrepareData normalizeString outputVar readVocs "
        "trimRareWords unicodeToAscii zeroPadding": "Write the modules with `torch.nn` and wrap "
        "them with `cadenza.compat.nemo.backends.pytorch.nm.TrainableNM.of`.",
    },
    "collections.cv": {"*": "Use the package torchvision with `cadenza.compat.nemo.backends.pytorch.nm.TrainableNM.of`."},
    "core.actions": {
        "Actions": "Use `cadenza.compat.nemo.core.NeuralModuleFactory`, which creates a native `cadenza.Trainer`.",
        "topological_sort_from_leaves": _GRAPH,
    },
    "core": {
        "ModuleType": "Test with `isinstance`: the kinds are classes in `cadenza.compat.nemo.backends.pytorch.nm`.",
        "PretrainedModelInfo": "Load the weights with `torch.nn.Module.load_state_dict`.",
        "WeightShareTransform": "Assign the same `torch.nn.Parameter` to both modules.",
        "on_action_end on_action_start on_batch_end on_batch_start on_epoch_end on_epoch_start on_step_end "
        "on_step_start": "Import it from `cadenza.compat.nemo.core.callbacks`.",
    },
    "core.callbacks": {
        "ModuleSaverCallback": "Use `cadenza.callbacks.Checkpoint` with `weights_only=True`.",
        "UnfreezeCallback": "Use `cadenza.callbacks.Freeze` with `until=`.",
        "ValueSetterCallback": "Use `cadenza.callbacks.ScheduleValue`.",
    },
    "core.deprecated_callbacks": {"*": _CORE},
    "core.module_decorators": {
        "* run_only_on_device skip_in_data_parallel": "Remove the decorator: batches and modules are on one device, "
        "`cadenza.Run.device`."
    },
    "core.nemo_model": {
        "* NEMO_TMP_FOLDER NeMoModel": "Write the model as a `torch.nn.Module` and wrap it with "
        "`cadenza.compat.nemo.backends.pytorch.nm.TrainableNM.of`."
    },
    "core.neural_factory": {
        "DeviceType Optimization": _CORE,
        "DeploymentFormat": "Use `torch.export.export` or `torch.onnx.export`.",
        "OperationMode": "Read `torch.nn.Module.training`.",
    },
    "core.neural_graph": {"* NeuralGraph": _GRAPH},
    "core.neural_interface": {"* NeuralInterface": _GRAPH},
    "core.neural_modules": {"*": _CORE},
    "core.neural_types.axes": {"*": "Import the name from `cadenza.compat.nemo.core.neural_types`."},
    "core.neural_types.comparison": {"*": "Import the name from `cadenza.compat.nemo.core.neural_types`."},
    "core.neural_types.elements": {"*": "Import the name from `cadenza.compat.nemo.core.neural_types`."},
    "core.neural_types.neural_type": {"*": "Import the name from `cadenza.compat.nemo.core.neural_types`."},
    "utils.app_state": {
        "* AppState": "Use `cadenza.compat.nemo.core.NeuralModuleFactory`, which holds the state of a training."
    },
    "utils.configuration_error": {
        "* ConfigurationError": "Use `ValueError`; a port that does not fit is a "
        "`cadenza.compat.nemo.core.NeuralPortNameMismatchError`."
    },
    "utils.configuration_parsing": {"*": "Read the settings with `json.loads`."},
    "utils.neural_graph": {"*": _GRAPH},
    "utils.nmtensor_registry": {"* NmTensorNameRegistry": "Use `cadenza.compat.nemo.core.NmTensor.rename`."},
}

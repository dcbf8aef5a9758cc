"""What to use instead of the names of NeMo 0.10 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from cadenza.compat.neural.absent import Rows, common

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

_TYPES = "Use `cadenza.compat.nemo10.core.neural_types.VoidType`, or a class of your own derived from its `ElementType`."
_NUMBERS = "Use `cadenza.compat.nemo10.core.Optimization` to train with mixed precision."
_CORE = "Import the name from `cadenza.compat.nemo10.core`."

ABSENT: Rows = {
    **common("cadenza.compat.nemo10"),
    "backends.pytorch": {
        "DataLayerNM LossNM NonTrainableNM TrainableNM": "Import it from `cadenza.compat.nemo10.backends.pytorch.nm`."
    },
    "backends.pytorch.actions": {
        "* AmpOptimizations FusedAdam FusedLAMB FusedNovoGrad LARC amp": _NUMBERS,
        "PtActions": "Use `cadenza.compat.nemo10.core.NeuralModuleFactory`, which creates a native `cadenza.Trainer`.",
    },
    "backends.pytorch.tutorials.toys": {"*": "Import the name from `cadenza.compat.nemo10.backends.pytorch.tutorials`."},
    "backends.pytorch.tutorials": {
        "DialogDataLayer EOS_token EncoderRNN GreedyLuongAttnDecoderRNN LuongAttnDecoderRNN MAX_LENGTH "
        "MIN_COUNT MaskedXEntropyLoss PAD_token SOS_token Voc batch2TrainData binaryMatrix filterPair "
        "filterPairs indexesFromSentence inputVar loadPrepareData normalizeString outputVar readVocs "
        "trimRareWords unicodeToAscii zeroPadding": "Write the modules with `torch.nn` and wrap "
        "them with `cadenza.compat.nemo10.backends.pytorch.nm.TrainableNM.of`.",
    },
    "core": {
        "PretrainedModelInfo": "Load the weights with `torch.nn.Module.load_state_dict`.",
        "WeightShareTransform": "Assign the same `torch.nn.Parameter` to both modules.",
    },
    "core.callbacks": {
        "logging": "Use `cadenza.compat.nemo10.logging`.",
        "ModuleSaverCallback": "Use `cadenza.callbacks.Checkpoint` with `weights_only=True`.",
        "UnfreezeCallback": "Use `cadenza.callbacks.Freeze` with `until=`.",
        "ValueSetterCallback": "Use `cadenza.callbacks.ScheduleValue`.",
    },
    "core.neural_factory": {
        "logging": "Use `cadenza.compat.nemo10.logging`.",
        "Actions": "Use `cadenza.compat.nemo10.core.NeuralModuleFactory`, which creates a native `cadenza.Trainer`.",
        "Backend DeviceType Optimization": _CORE,
        "DeploymentFormat": "Use `torch.export.export` or `torch.onnx.export`.",
        "ModelMode": "Read `torch.nn.Module.training`.",
    },
    "core.neural_modules": {"*": _CORE},
    "core.neural_types": {
        "CanNotInferResultNeuralType": _TYPES,
    },
    "core.neural_types.axes": {"*": "Import the name from `cadenza.compat.nemo10.core.neural_types`."},
    "core.neural_types.comparison": {"*": "Import the name from `cadenza.compat.nemo10.core.neural_types`."},
    "core.neural_types.elements": {"*": "Import the name from `cadenza.compat.nemo10.core.neural_types`."},
    "core.neural_types.neural_type": {"*": "Import the name from `cadenza.compat.nemo10.core.neural_types`."},
}

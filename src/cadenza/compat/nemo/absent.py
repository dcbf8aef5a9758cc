"""What to use instead of the names of NeMo 0.11 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from cadenza.compat.neural.absent_of_both import Rows, common

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

_GRAPH = "Call the modules with named tensors: `cadenza.compat.nemo.core.NeuralModuleFactory.train` finds the graph."

ABSENT: Rows = {
    **common("cadenza.compat.nemo"),
    "backends": {
        "backend": "Remove the call: PyTorch is the only backend. Its modules are in `cadenza.compat.nemo.backends.pytorch`.",
    },
    "backends.load_backend": {"*": "Remove the import: PyTorch is the only backend, `cadenza.compat.nemo.backends.pytorch`."},
    "backends.pytorch.common.losses": {
        "BCEWithLogitsLossNM": "Use `torch.nn.BCEWithLogitsLoss` with `cadenza.compat.nemo.backends.pytorch.nm.LossNM.of`.",
    },
    "collections.cv": {"*": "Use the package torchvision with `cadenza.compat.nemo.backends.pytorch.nm.TrainableNM.of`."},
    "core.actions": {
        "topological_sort_from_leaves": _GRAPH,
    },
    "core.module_decorators": {
        "* run_only_on_device skip_in_data_parallel": "Remove the decorator: batches and modules are on one device, "
        "`cadenza.Run.device`."
    },
    "core.nemo_model": {
        "* NEMO_TMP_FOLDER NeMoModel": "Write the model as a `torch.nn.Module` and wrap it with "
        "`cadenza.compat.nemo.backends.pytorch.nm.TrainableNM.of`."
    },
    "core.neural_graph": {"* NeuralGraph": _GRAPH},
    "core.neural_interface": {"* NeuralInterface": _GRAPH},
    "utils.configuration_error": {
        "* ConfigurationError": "Use `ValueError`; a port that does not fit is a "
        "`cadenza.compat.nemo.core.NeuralPortNameMismatchError`."
    },
    "utils.configuration_parsing": {"*": "Read the settings with `json.loads`."},
    "utils.neural_graph": {"*": _GRAPH},
    "utils.nmtensor_registry": {"* NmTensorNameRegistry": "Use `cadenza.compat.nemo.core.NmTensor.rename`."},
}

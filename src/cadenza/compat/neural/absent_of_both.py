"""What to use instead of the names that neither adapter of NeMo provides (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

Rows = Mapping[str, Mapping[str, str]]


def common(package: str) -> Rows:
    """Return the part of ``ABSENT`` that NeMo 0.10 and 0.11 have in common, with the names of one adapter."""
    nm = f"{package}.backends.pytorch.nm"
    wrap = f"`{nm}.TrainableNM.of` makes a neural module of a `torch.nn.Module`, and `{nm}.DataLayerNM.of` of a loader."
    return {
        "collections.asr": {"*": f"Use the package torchaudio. {wrap}"},
        "collections.nlp": {"*": f"Use the package transformers. {wrap}"},
        "collections.simple_gan": {"*": f"Write the two networks with `torch.nn`. {wrap}"},
        "collections.tts": {"*": f"Use the package torchaudio. {wrap}"},
        "backends.pytorch.module_wrapper": {"* TrainableNeuralModuleWrapper": f"Use `{nm}.TrainableNM.of`."},
        "backends.pytorch.torchvision": {"*": f"Use the package torchvision. {wrap}"},
        "backends.pytorch.tutorials.chatbot": {
            "* DialogDataLayer EOS_token EncoderRNN GreedyLuongAttnDecoderRNN LuongAttnDecoderRNN MAX_LENGTH MIN_COUNT "
            "MaskedXEntropyLoss PAD_token SOS_token Voc batch2TrainData binaryMatrix filterPair filterPairs "
            "indexesFromSentence inputVar loadPrepareData normalizeString outputVar readVocs trimRareWords unicodeToAscii "
            "zeroPadding": f"Write the modules with `torch.nn`. {wrap}"
        },
        "constants": {"*": f"Remove the import: `{package}.logging` reads no environment variable."},
        "package_info": {"*": f"Use `{package}.__version__`."},
        "utils.env_var_parsing": {"*": "Read `os.environ`."},
        "utils.exp_logging": {
            "ExpManager get_git_diff get_git_hash": f"Pass `log_dir=` to `{package}.core.NeuralModuleFactory`, which creates "
            "the folders and log files.",
        },
        "utils.formatters": {"*": "Use `logging.Formatter`."},
        "utils.metaclasses": {"*": "Put `functools.cache` on a function that creates the object."},
        "utils.misc": {"Config": "Use `types.SimpleNamespace` for settings."},
        "utils.helpers": {"maybe_download_from_cloud": "Use `torch.hub.download_url_to_file`."},
        "backends.pytorch.actions": {
            "AmpOptimizations FusedAdam FusedLAMB FusedNovoGrad LARC amp": f"Use `{package}.core.Optimization` to train with "
            "mixed precision."
        },
        "core.neural_factory": {"DeploymentFormat": "Use `torch.export.export` or `torch.onnx.export`."},
        **_common_modules(package),
        "core.neural_modules": {"PretrainedModelInfo": "Load the weights with `torch.nn.Module.load_state_dict`."},
    }


def _common_modules(package: str) -> Rows:
    """Return the rows for ``nemo.backends.pytorch.common``."""
    nm = f"{package}.backends.pytorch.nm"
    wrap = f"Write the module with `torch.nn` and wrap it with `{nm}.TrainableNM.of`."
    return {
        "backends.pytorch.common": {
            "DecoderRNN EncoderRNN": f"Use `torch.nn.LSTM` or `torch.nn.GRU` with `{nm}.TrainableNM.of`.",
            "BeamSearch GreedySearch": f"Write a function and pass it to `{nm}.NonTrainableNM.of`.",
        },
        "backends.pytorch.common.rnn": {"*": wrap},
        "backends.pytorch.common.search": {"*": f"Write a function and pass it to `{nm}.NonTrainableNM.of`."},
        "backends.pytorch.common.metrics": {"*": "Use a metric of the package torchmetrics in `cadenza.callbacks.Evaluate`."},
    }

"""What to use instead of the names of NeMo 0.10 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from cadenza.compat.neural.absent_of_both import Rows, common

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

_TYPES = "Use `cadenza.compat.nemo10.core.neural_types.VoidType`, or a class of your own derived from its `ElementType`."

ABSENT: Rows = {
    **common("cadenza.compat.nemo10"),
    "backends.pytorch.tutorials.toys": {"TaylorNetO": "Use `cadenza.compat.nemo10.backends.pytorch.tutorials.TaylorNet`."},
    "backends.pytorch.tutorials": {
        "DialogDataLayer EOS_token EncoderRNN GreedyLuongAttnDecoderRNN LuongAttnDecoderRNN MAX_LENGTH "
        "MIN_COUNT MaskedXEntropyLoss PAD_token SOS_token Voc batch2TrainData binaryMatrix filterPair "
        "filterPairs indexesFromSentence inputVar loadPrepareData normalizeString outputVar readVocs "
        "trimRareWords unicodeToAscii zeroPadding": "Write the modules with `torch.nn` and wrap "
        "them with `cadenza.compat.nemo10.backends.pytorch.nm.TrainableNM.of`.",
    },
    "core.neural_types.neural_type": {
        "CanNotInferResultNeuralType": _TYPES,
    },
}

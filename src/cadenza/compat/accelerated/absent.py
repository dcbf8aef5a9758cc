"""What to use instead of pytorch-accelerated's names that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL = "pytorch_accelerated"
GUIDE = "docs/guides/from-pytorch-accelerated.md"

_LOGGER = "Call `logging.getLogger` with a name of your own. The trainer logs under the name `cadenza`."

ABSENT: Mapping[str, Mapping[str, str]] = {
    "": {
        "notebook_launcher": "Start a script with torchrun (`torch.distributed.run`); a notebook uses one process.",
        "set_seed": "Call `torch.manual_seed` before you create the model. Importing this adapter seeds nothing.",
        "logger": _LOGGER,
    },
    "callbacks": {"logger": _LOGGER},
}

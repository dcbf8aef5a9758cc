"""What to use instead of pytorch-accelerated's names that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL = "pytorch_accelerated"
GUIDE = "docs/guides/from-pytorch-accelerated.md"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "": {
        "notebook_launcher": "Start one script with `torchrun`, or use one process in a notebook.",
        "set_seed": "Call `torch.manual_seed` before you create the model.",
    },
    "callbacks": {
        "WSDCheckpointCallback": "Use `cadenza.callbacks.Checkpoint` with `every=` for the steps where the decay starts.",
    },
}

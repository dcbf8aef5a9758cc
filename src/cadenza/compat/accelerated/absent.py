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
    "callbacks": {
        "CallbackMethodNotImplementedError": "Define the method in your callback; an unknown event is an `AttributeError`.",
        "get_default_callbacks": "Pass `callbacks=`, or use `cadenza.compat.accelerated.trainer.DEFAULT_CALLBACKS`.",
        "logger": _LOGGER,
    },
    "finetuning": {"BN_MODULES": "Use a tuple of `torch.nn.BatchNorm1d`, `torch.nn.BatchNorm2d` and `torch.nn.BatchNorm3d`."},
    "trainer": {
        "replace_trainer_placeholder_values": "Use `cadenza.compat.accelerated.trainer.TrainerPlaceholderValues` in "
        "`functools.partial`; the trainer replaces them."
    },
    "utils": {
        "DataLoaderSlice": "Use `itertools.islice`, or `cadenza.callbacks.Limit`.",
        "worker_init_fn": "Remove it: `torch.utils.data.DataLoader` seeds its workers, and Cadenza makes the seeds resumable.",
    },
}

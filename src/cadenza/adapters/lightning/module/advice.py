"""Arguments of Lightning's ``Trainer`` that `Trainer.from_lightning` answers, besides those that every trainer does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERY = 'Use evaluate_every=, such as "1 epoch" or "500 steps"; None evaluates never.'
_NEVER = "A stop takes effect at once. EarlyStopping(ignore_first=...) begins later."
_LIMITED = "cadenza.compat.lightning.validate, test and predict take limit=."

ADVICE: Mapping[str, str] = {
    "val_check_interval": _EVERY,
    "check_val_every_n_epoch": _EVERY,
    "limit_val_batches": _EVERY,
    "num_sanity_val_steps": "Use sanity_batches=.",
    "val_dataloaders": "Give the loaders as the second argument: (train, val).",
    "min_epochs": _NEVER,
    "min_steps": _NEVER,
    "limit_test_batches": _LIMITED,
    "limit_predict_batches": _LIMITED,
    "enable_model_summary": "Add Summary() to callbacks.",
    "gradient_clip_algorithm": "Add ClipGradients(max_norm=...) or ClipGradients(max_value=...) to callbacks.",
    "inference_mode": "Leave it out: evaluations compute no gradients.",
    "use_distributed_sampler": "Leave it out: loaders are split over the ranks, unless they have a distributed sampler.",
    "profiler": "Add Profile() to callbacks.",
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True) before the run.",
    "barebones": "Leave it out: unused parts cost nothing. progress=False shows no progress bar.",
    "plugins": "Use precision= and driver=.",
    "sync_batchnorm": "Add ConvertSyncBatchNorm() to callbacks.",
    "reload_dataloaders_every_n_epochs": "Give a loader that changes with the epoch; its set_epoch(epoch) is called.",
    "enable_autolog_hparams": "Leave it out: run.info.arguments has the hyperparameters, and sinks show them.",
    "model_registry": "Add a sink of your tracker to callbacks.",
}
"""By argument, what to use instead."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise an error for an argument that only Lightning's trainer has, or that a LightningModule cannot have.

    Raises:
        TypeError: An argument is one of Lightning's trainer.
        ValueError: The model is to be compiled.
    """
    for name in given:
        if name in ADVICE:
            raise TypeError(f"Trainer.from_lightning has no argument {name!r}. {ADVICE[name]}")
    if given.get("compile"):
        raise ValueError(
            f"compile={given['compile']!r} compiles the forward of a model, and a LightningModule computes its loss in "
            "training_step. Compile layers in the module, such as self.net.compile() in configure_model."
        )

"""Arguments of Lightning's ``Trainer`` that `Trainer.from_lightning` answers. The guide has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEVICE = 'Use device="cpu", "cuda" or "cuda:1"; start several processes with torchrun.'
_EVERY = 'Use evaluate_every=, such as "2 epochs" or "500 batches"; None evaluates never.'
_LIMIT = "Add Limit(train=..., evaluation=...) to callbacks: numbers of batches. evaluate_every=None evaluates never."
_NEVER = "A stop takes effect at once. EarlyStopping(ignore_first=...) begins later."
_DATA = "Give the loaders as the second argument: (train, val)."
_LIMITED = "cadenza.compat.lightning.validate, test and predict take limit=."

ADVICE: Mapping[str, str] = {
    "accelerator": _DEVICE,
    "devices": _DEVICE,
    "strategy": 'Use driver="ddp" or "fsdp", and start with torchrun.',
    "num_nodes": "Start the processes of all machines with torchrun --nnodes=....",
    "logger": "Add a sink such as TensorBoard(), Csv() or Wandb() to callbacks.",
    "fast_dev_run": "Add Limit(train=1, evaluation=1) to callbacks, and use max_epochs=1.",
    "min_epochs": _NEVER,
    "min_steps": _NEVER,
    "max_time": "Add TimeLimit(...) to callbacks.",
    "limit_train_batches": _LIMIT,
    "limit_val_batches": _LIMIT,
    "limit_test_batches": _LIMITED,
    "limit_predict_batches": _LIMITED,
    "overfit_batches": "Add Limit(train=...) to callbacks, and give a loader that does not shuffle.",
    "val_check_interval": _EVERY,
    "check_val_every_n_epoch": _EVERY,
    "num_sanity_val_steps": "Use sanity_batches=; it is 0 by default.",
    "log_every_n_steps": "Leave it out: each step has a record, and writing it costs no wait.",
    "enable_checkpointing": "Add Checkpoint(...) to callbacks, and give directory=. Without it, no checkpoint is written.",
    "enable_progress_bar": "Use progress=.",
    "enable_model_summary": "Add Summary() to callbacks.",
    "accumulate_grad_batches": "Use accumulate=.",
    "gradient_clip_val": "Add ClipGradients(max_norm=...) or ClipGradients(max_value=...) to callbacks.",
    "gradient_clip_algorithm": "Add ClipGradients(max_norm=...) or ClipGradients(max_value=...) to callbacks.",
    "deterministic": "Call torch.use_deterministic_algorithms(True) before the run; seed= seeds it.",
    "benchmark": "Set torch.backends.cudnn.benchmark before the run.",
    "inference_mode": "Leave it out: evaluations compute no gradients.",
    "use_distributed_sampler": "Leave it out: loaders are split over the ranks, unless they have a distributed sampler.",
    "profiler": "Add Profile() to callbacks.",
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True) before the run.",
    "barebones": "Leave it out: unused parts cost nothing. progress=False shows no progress bar.",
    "plugins": "Use precision= and driver=.",
    "sync_batchnorm": "Add ConvertSyncBatchNorm() to callbacks.",
    "reload_dataloaders_every_n_epochs": "Give a loader that changes with the epoch; its set_epoch(epoch) is called.",
    "default_root_dir": "Use directory=.",
    "enable_autolog_hparams": "Leave it out: run.info.arguments has the hyperparameters, and sinks show them.",
    "model_registry": "Add a sink of your tracker to callbacks.",
    "train_dataloaders": _DATA,
    "val_dataloaders": _DATA,
    "datamodule": "Give it as the second argument.",
    "loader": _DATA,
    "model": "The module is the first argument.",
    "optimizer": "configure_optimizers of the module returns the optimizers.",
    "compute_loss": "training_step of the module returns the loss.",
    "step_fn": "training_step of the module is the step: set automatic_optimization = False to update in it.",
    "ckpt_path": "Call trainer.fit(resume=...); cadenza.compat.lightning.load_weights reads the weights of a .ckpt file.",
}
"""By argument of Lightning's trainer, or of a native one that the module replaces, what to use instead."""

_PRECISIONS: Mapping[Any, str] = {
    **dict.fromkeys(("bf16-mixed",), 'Use precision="bf16".'),
    **dict.fromkeys(("16-mixed", "16", 16), 'Use precision="fp16".'),
    **dict.fromkeys(("32-true", "32", 32), "Leave it out: this is the default."),
    **dict.fromkeys(("64-true", "64", 64), "Call module.double(), and give data in float64."),
    **dict.fromkeys(("bf16-true", "16-true"), "Call module.bfloat16() or module.half(), and give data of this type."),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise an error for arguments that only Lightning's trainer has, or that a LightningModule replaces.

    Raises:
        TypeError: The module or native arguments replace some; the message names all of them.
        ValueError: A value is one of Lightning's trainer, or the model is to be compiled.
    """
    wrong = [name for name in given if name in ADVICE]
    if len(wrong) == 1:
        raise TypeError(f"Trainer.from_lightning has no argument {wrong[0]!r}. {ADVICE[wrong[0]]}")
    if wrong:
        lines = "\n".join(f"  {name}: {ADVICE[name]}" for name in wrong)
        raise TypeError(f"Trainer.from_lightning does not have these arguments:\n{lines}")
    precision = given.get("precision")
    if isinstance(precision, int | str) and precision in _PRECISIONS:
        raise ValueError(f"precision must be 'fp32', 'bf16' or 'fp16'; got {precision!r}. {_PRECISIONS[precision]}")
    if given.get("compile"):
        raise ValueError(
            f"compile={given['compile']!r} compiles the forward of a model, and a LightningModule computes its loss in "
            "training_step. Compile layers in the module, such as self.net.compile() in configure_model."
        )

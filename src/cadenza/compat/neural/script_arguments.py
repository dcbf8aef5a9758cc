"""The command line of NeMo's scripts (``nemo.utils.NemoArgParser``)."""

from __future__ import annotations

import argparse
import os
from typing import Any

__all__ = ["NemoArgParser"]

_FLAG: dict[str, Any] = {"action": "store_true"}
_NUMBER: dict[str, Any] = {"type": int}

OPTIONS: dict[str, dict[str, Any]] = {
    "amp_opt_level": {"default": "O0", "choices": ["O0", "O1", "O2", "O3"], "help": "precision: float32 is O0, float16 is O3"},
    "cudnn_benchmark": _FLAG | {"help": "let cuDNN search for the fastest kernels"},
    "model_config": {"help": "file with the settings of the model"},
    "train_dataset": {"help": "path of the training data"},
    "eval_datasets": {"nargs": "*", "help": "paths of the evaluation data"},
    "batch_size": _NUMBER | {"help": "samples in a training batch, for each process"},
    "eval_batch_size": _NUMBER | {"help": "samples in an evaluation batch, for each process"},
    "eval_freq": _NUMBER | {"default": 1000, "help": "steps between evaluations"},
    "optimizer": {"choices": ["sgd", "adam", "fused_adam", "adam_w", "novograd", "lamb"], "help": "name of the optimizer"},
    "weight_decay": {"type": float, "default": 0.0},
    "num_epochs": _NUMBER | {"help": "epochs to train; give this or --max_steps"},
    "max_steps": _NUMBER | {"help": "steps to train; give this or --num_epochs"},
    "lr": {"type": float, "default": 1e-3, "help": "initial learning rate"},
    "lr_policy": {"default": "WarmupAnnealing", "help": "name of the learning rate policy"},
    "iter_per_step": _NUMBER | {"default": 1, "help": "batches per step"},
    "work_dir": {"help": "directory of the logs and checkpoints"},
    "checkpoint_dir": {"help": "directory of the checkpoints"},
    "create_tb_writer": _FLAG | {"help": "write to TensorBoard"},
    "tensorboard_dir": {"help": "directory of TensorBoard's files"},
    "checkpoint_save_freq": _NUMBER | {"default": 1000, "help": "steps between checkpoints"},
}


class NemoArgParser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` with the options of NeMo's scripts.

    ``--local_rank`` is read from the environment variable ``LOCAL_RANK``, which torchrun sets. Options that are None by default
    stay None: set them with `set_defaults`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_argument(
            "--local_rank", default=os.environ.get("LOCAL_RANK"), type=int, help="rank of this process on its machine"
        )
        for name, settings in OPTIONS.items():
            self.add_argument(f"--{name}", **settings)

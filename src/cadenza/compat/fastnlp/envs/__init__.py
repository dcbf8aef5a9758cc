"""``fastNLP.envs``: environment variables, and the rank of this process.

As in fastNLP, the import sets ``FASTNLP_LAUNCH_TIME``, and in a process of torchrun ``FASTNLP_GLOBAL_RANK``.
"""

import os

from cadenza.compat.fastnlp.envs import imports as imports
from cadenza.compat.fastnlp.envs.distributed import (
    all_rank_call_context,
    fastnlp_no_sync_context,
    get_global_rank,
    is_cur_env_distributed,
    rank_zero_call,
    rank_zero_rm,
)
from cadenza.compat.fastnlp.envs.env import (
    FASTNLP_BACKEND,
    FASTNLP_BACKEND_LAUNCH,
    FASTNLP_CHECKPOINT_FILENAME,
    FASTNLP_DISTRIBUTED_CHECK,
    FASTNLP_EVALUATE_RESULT_FILENAME,
    FASTNLP_GLOBAL_RANK,
    FASTNLP_GLOBAL_SEED,
    FASTNLP_LAUNCH_TIME,
    FASTNLP_LOG_LEVEL,
    FASTNLP_MODEL_FILENAME,
    FASTNLP_NO_SYNC,
    FASTNLP_REMOVE_LOCAL_RANK,
    USER_CUDA_VISIBLE_DEVICES,
)
from cadenza.compat.fastnlp.envs.utils import get_gpu_count, launch_time

__all__ = [
    "FASTNLP_BACKEND",
    "FASTNLP_BACKEND_LAUNCH",
    "FASTNLP_CHECKPOINT_FILENAME",
    "FASTNLP_DISTRIBUTED_CHECK",
    "FASTNLP_EVALUATE_RESULT_FILENAME",
    "FASTNLP_GLOBAL_RANK",
    "FASTNLP_GLOBAL_SEED",
    "FASTNLP_LAUNCH_TIME",
    "FASTNLP_LOG_LEVEL",
    "FASTNLP_MODEL_FILENAME",
    "FASTNLP_NO_SYNC",
    "FASTNLP_REMOVE_LOCAL_RANK",
    "USER_CUDA_VISIBLE_DEVICES",
    "all_rank_call_context",
    "fastnlp_no_sync_context",
    "get_global_rank",
    "get_gpu_count",
    "is_cur_env_distributed",
    "rank_zero_call",
    "rank_zero_rm",
]


def _set_variables() -> None:
    launch_time()
    os.environ.setdefault(FASTNLP_LOG_LEVEL, "AUTO")
    if {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= os.environ.keys():
        os.environ[FASTNLP_GLOBAL_RANK] = os.environ["RANK"]
        os.environ.setdefault(FASTNLP_BACKEND_LAUNCH, "1")


_set_variables()

"""``fastNLP.envs.utils``."""

from __future__ import annotations

import os
import time
from datetime import datetime

import torch

from cadenza.compat.fastnlp.envs.env import FASTNLP_GLOBAL_SEED, FASTNLP_LAUNCH_TIME


def get_gpu_count() -> int:
    """Return the number of GPUs; -1 without one."""
    return torch.cuda.device_count() or -1


def get_global_seed() -> int:
    """Return the seed of all processes. The first call chooses it, from the clock, and puts it in the environment."""
    return int(os.environ.setdefault(FASTNLP_GLOBAL_SEED, str(time.time_ns() // 1000 % 1_000_000)))


def launch_time() -> str:
    """Return the start time of this process or of its parent, such as ``2026-11-21-09_30_00_123456``: a name for folders."""
    return os.environ.setdefault(FASTNLP_LAUNCH_TIME, datetime.now().strftime("%Y-%m-%d-%H_%M_%S_%f"))
